"""A stand-in for a GPU: `cuda:0` in a separate process, computed by the CPU; mixing devices is an error."""
