"""Evaluation of world models: results of clips, mean rewards with intervals, comparisons and HTML pages."""
