"""The shipped adapters. Each converts rows in a published format to `Sample` objects."""
