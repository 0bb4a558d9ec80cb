"""Asking questions, reading and grading the answers, and reporting what came of it."""

from dsreason.evaluation.parsing import parse
from dsreason.evaluation.types import Parsed

__all__ = ["Parsed", "parse"]
