"""The model: loading it and its processor, positions, log-probabilities, and tiny models to try everything with."""
