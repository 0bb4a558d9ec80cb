"""`dsreason doctor`: whether a machine can train, a finding with its cure for everything that was looked at."""
