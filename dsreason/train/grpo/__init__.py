"""The GRPO trainer; the training loop is in `loop.py`."""
