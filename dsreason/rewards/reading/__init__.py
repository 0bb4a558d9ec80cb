"""Parsers of numbers, times and shapes in the texts of models. They accept any text and return None if they cannot parse it."""
