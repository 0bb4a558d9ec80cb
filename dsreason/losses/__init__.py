"""Losses, which are pure functions of log-probabilities."""
