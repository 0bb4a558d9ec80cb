"""Image and video files: which frames are shown, how large, and their pixels."""
