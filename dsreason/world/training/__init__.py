"""Training of world models on real clips, or on rewards of sampled clips; `loop.py` contains the training loop."""
