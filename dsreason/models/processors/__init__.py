"""Functions that load a model folder's processor, and check that it fits the model and that its chat template terminates."""
