"""Supervised fine-tuning; the loop is in `loop.py`."""
