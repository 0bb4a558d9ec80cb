"""Sinks for metrics: files and experiment trackers, with one module per sink."""
