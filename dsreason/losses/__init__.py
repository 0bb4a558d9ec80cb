"""Losses, pure functions of log-probabilities."""
