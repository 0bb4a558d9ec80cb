"""Adapters that are shipped: each turns a row of a published format into a `Sample`."""
