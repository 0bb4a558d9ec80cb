"""Training of world models: on real clips, and by rewards of sampled ones; the loop is in `loop.py`."""
