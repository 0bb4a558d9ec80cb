"""Run configuration: its schemas, and functions that load it and merge it with a DeepSpeed JSON."""
