"""Parsers of numbers, times and shapes in texts of models. They accept any text and return None if they cannot parse it."""
