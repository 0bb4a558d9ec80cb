"""Every key of cosmos-rl: what it takes, what becomes of it, or why nothing does."""
