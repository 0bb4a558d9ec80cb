"""Image and video files: the choice of frames and sizes, and the decoding of pixels."""
