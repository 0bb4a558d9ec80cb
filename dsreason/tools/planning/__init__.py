"""`dsreason plan`: estimates a run's GPU memory, host memory and disk space from its configuration and the model's shape."""
