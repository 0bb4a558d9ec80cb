"""Parsers for numbers, times and shapes in model answers. They accept any text and return None if they cannot parse it."""
