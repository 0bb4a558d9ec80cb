"""Code shared by all trainers: preflight checks, opening a run, validation, bookkeeping of steps, checkpoints and exports."""
