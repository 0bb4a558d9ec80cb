"""Shared parts of all trainers: opening a run, its checks, validation, counting steps, saving and finishing."""
