"""A training run's page, `run.html`, and the comparison of several runs."""
