"""`dsreason data`: its commands, and the tables that they print."""
