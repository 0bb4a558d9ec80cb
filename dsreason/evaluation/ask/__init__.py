"""Answering of questions: by a rollout engine in this process, or by a server."""
