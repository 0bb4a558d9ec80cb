"""Models and their processors: loading, positions, log-probabilities, and tiny models for trials and tests."""
