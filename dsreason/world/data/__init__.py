"""Data sets for world models: prompts and clips."""

from dsreason.world.data.dataset import WorldDataset, open_world_data

__all__ = ["WorldDataset", "open_world_data"]
