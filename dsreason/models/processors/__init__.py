"""The processor of a model folder: loading, and checks that it matches the model and that its chat template terminates."""
