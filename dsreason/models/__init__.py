"""Models: loading of models and their processors, positions, log-probabilities, and tiny models for trials and tests."""
