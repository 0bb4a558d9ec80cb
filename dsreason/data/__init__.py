"""The data pipeline from rows to the batches of a step: sources, chat template, order, collation, worker processes."""
