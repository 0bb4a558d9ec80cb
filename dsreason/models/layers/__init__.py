"""Functions that replace parts of transformers' layers in a built model: fused kernels, and delta nets in packed rows."""
