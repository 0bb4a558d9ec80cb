"""Checkpoints, which are written atomically, resumed exactly, and exported as Hugging Face model folders."""
