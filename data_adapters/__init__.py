"""The shipped adapters; each converts rows of a published format to `Sample` objects."""
