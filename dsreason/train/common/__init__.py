"""Code shared by all trainers: preflight checks, run setup, validation, step accounting, checkpoints and exports."""
