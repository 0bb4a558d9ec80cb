"""Models and their processors: loading, token positions, log-probabilities, and tiny models for trials and tests."""
