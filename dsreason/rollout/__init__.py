"""Rollout engines: completions of the policy, the weights they get, and the memory they give back."""
