"""Losses as pure functions of log-probabilities."""
