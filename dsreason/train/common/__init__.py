"""What all trainers share: opening a run, its checks, validation, counting steps, saving and finishing."""
