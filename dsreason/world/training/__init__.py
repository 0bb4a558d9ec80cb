"""Training of world models on real clips or with rewards for sampled clips; `loop.py` contains the training loop."""
