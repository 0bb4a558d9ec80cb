"""`dsreason doctor`: checks whether a machine can train and reports a finding, with a remedy if needed, for each check."""
