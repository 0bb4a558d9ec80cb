"""`dsreason data`: its commands, and the tables that they show."""
