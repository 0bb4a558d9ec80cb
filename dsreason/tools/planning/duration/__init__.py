"""Duration of a training step by phase, estimated from its arithmetic and its memory and network traffic at the GPU's rates."""
