"""Stored results, and the scores, comparisons, tables and HTML report that are computed from them."""
