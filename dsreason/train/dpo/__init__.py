"""The DPO trainer, which learns from pairs of a better and a worse answer; the training loop is in `loop.py`."""
