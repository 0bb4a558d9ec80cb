"""Who answers questions: a rollout engine in this process, or a server."""
