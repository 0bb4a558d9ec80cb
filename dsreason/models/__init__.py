"""The model: loading, positions, log-probabilities, and tiny models to try everything with."""
