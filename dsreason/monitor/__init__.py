"""Measurements of a run: metrics, progress, memory, and arithmetic."""
