"""The processor of a model folder: loading it, and checking that it fits the model and that its chat template ends."""
