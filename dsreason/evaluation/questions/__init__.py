"""The questions of an evaluation, and the grading of their answers."""
