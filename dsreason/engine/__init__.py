"""The policy's DeepSpeed engine: construction, learning rate, offload, weight averages and reference weights."""
