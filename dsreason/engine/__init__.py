"""DeepSpeed engine of the policy: construction, learning rate, offload, weight averages and reference weights."""
