"""Rewards of world models: what a clip is worth."""
