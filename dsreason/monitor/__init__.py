"""Measurements of a run: metrics, progress, memory, FLOPs and profiles."""
