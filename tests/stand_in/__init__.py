"""A stand-in for a GPU: `cuda:0` in a process of its own, computed by the CPU, where mixed devices are an error."""
