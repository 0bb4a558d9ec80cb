"""The DeepSpeed engine around the policy: building, learning rate, offload, and the reference weights."""
