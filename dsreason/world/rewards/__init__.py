"""Rewards of world models, which score clips."""
