"""The data pipeline, from rows to the batches of a step: sources, chat template, row order, collation and worker processes."""
