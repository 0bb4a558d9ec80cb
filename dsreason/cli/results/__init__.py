"""Commands that show the results of runs and evaluations."""
