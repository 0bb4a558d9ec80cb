"""Evaluation of world models: clips of fixed prompts and noise, their rewards with intervals, comparisons, and pages."""
