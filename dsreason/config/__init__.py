"""Run configuration: schemas, functions that load a configuration, and functions that merge it with a DeepSpeed JSON."""
