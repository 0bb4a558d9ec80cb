"""Checkpoints: written whole or not at all, resumed exactly, exported as Hugging Face folders."""
