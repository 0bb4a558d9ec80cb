"""What a run measures of itself: metrics, progress, memory, and arithmetic."""
