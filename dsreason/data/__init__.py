"""Data pipeline that turns rows into each step's batches: sources, chat template, row order, collation and worker processes."""
