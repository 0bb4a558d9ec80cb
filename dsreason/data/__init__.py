"""Data pipeline that turns rows into the batches of a step: sources, chat template, row order, collation, worker processes."""
