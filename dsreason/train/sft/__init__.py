"""The trainer for supervised fine-tuning (SFT); the training loop is in `loop.py`."""
