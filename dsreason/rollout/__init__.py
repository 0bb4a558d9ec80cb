"""Rollout engines, which complete prompts with the policy's weights and release their memory while the policy trains."""
