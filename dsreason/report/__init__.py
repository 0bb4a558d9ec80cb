"""The page of a training run, `run.html`, and the comparison of several runs."""
