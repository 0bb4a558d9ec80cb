"""Evaluation of models: asking questions, parsing and grading the answers, and reporting the results."""

from dsreason.answers.parsing import parse
from dsreason.answers.types import Parsed

__all__ = ["Parsed", "parse"]
