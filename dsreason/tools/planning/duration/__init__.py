"""Duration of a training step by phase, estimated from its arithmetic, memory traffic and network traffic and the GPU's rates."""
