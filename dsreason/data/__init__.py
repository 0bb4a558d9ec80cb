"""From rows to the batches of a step: sources, chat template, order, collating, worker processes."""
