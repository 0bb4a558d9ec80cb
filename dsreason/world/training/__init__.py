"""Training of world models on real clips, or on rewards for sampled clips; `loop.py` contains the training loop."""
