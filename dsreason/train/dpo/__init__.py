"""Preference training (DPO) on pairs of a better and a worse answer; the loop is in `loop.py`."""
