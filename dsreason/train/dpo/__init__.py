"""Training on preferences, pairs of a better and a worse answer; the loop is in `loop.py`."""
