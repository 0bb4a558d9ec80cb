"""`dsreason plan`: the GPU memory, host memory and disk space of a run, planned from its configuration and model shape only."""
