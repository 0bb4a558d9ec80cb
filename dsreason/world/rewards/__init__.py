"""Rewards of world models: what a clip is worth."""

from dsreason.world.rewards.scorer import ClipScorer, Pending, Scores, open_scorer

__all__ = ["ClipScorer", "Pending", "Scores", "open_scorer"]
