"""World models (video diffusion): model families, noise schedules, sampling, data, rewards and training."""
