"""Sinks of metrics: trackers and files, one module each."""
