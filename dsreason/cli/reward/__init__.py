"""`dsreason reward` and `dsreason reward-serve`: rewards without training."""
