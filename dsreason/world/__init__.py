"""World models (video diffusion): families, noise schedules and steps, sampling, data, rewards."""
