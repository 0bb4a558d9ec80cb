"""Asking questions, reading and grading the answers, and reporting what came of it."""

from dsreason.answers.parsing import parse
from dsreason.answers.types import Parsed

__all__ = ["Parsed", "parse"]
