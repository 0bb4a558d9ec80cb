"""Keys of theirs that decide something together: each file converts one part of our configuration."""
