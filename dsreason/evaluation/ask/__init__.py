"""Answerers for questions: a rollout engine in this process, or a server."""
