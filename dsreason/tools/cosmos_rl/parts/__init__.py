"""What several keys of theirs decide together: each file one part of our configuration."""
