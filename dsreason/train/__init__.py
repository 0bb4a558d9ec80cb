"""The trainers, one per folder, and the code that they share."""
