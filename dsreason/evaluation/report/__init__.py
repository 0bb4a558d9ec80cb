"""Stored results, and what is computed from them: scores, comparisons, tables and the HTML report."""
