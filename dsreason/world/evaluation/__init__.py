"""Evaluation of world models: per-clip results, mean rewards with intervals, comparisons and HTML pages."""
