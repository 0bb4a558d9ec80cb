"""The processor of a model folder: its loading, and checks that it fits the model and that its chat template terminates."""
