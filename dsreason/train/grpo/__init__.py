"""GRPO; the loop is in `loop.py`."""
