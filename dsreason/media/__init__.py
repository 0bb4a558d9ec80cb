"""Image and video files: choosing frames and sizes, and decoding pixels."""
