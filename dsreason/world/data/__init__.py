"""Data of world models: prompts, clips and latents."""

from dsreason.world.data.dataset import WorldDataset, open_world_data

__all__ = ["WorldDataset", "open_world_data"]
