"""Startup, monitoring and clean shutdown of a job's processes."""
