"""`dsreason doctor`: checks whether a machine can train and reports the findings of all checks, with remedies."""
