"""The trainers, a folder each, and what they share."""
