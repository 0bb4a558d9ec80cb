"""Reimplementations of other projects' answer parsers, with their quirks, for comparisons with published results.

The evaluator of cosmos-reason1 takes the first capital letter in the text: `The answer is B` gives T, and `b` gives no answer.
The rewards of cosmos-rl take the unchanged content of the first `<answer>` block or, for GSM8K, the number after `#### `.
"""

from __future__ import annotations

import re

from dsreason.answers.types import AnswerType, Parsed


def parse_compat(text: str, answer_type: AnswerType) -> Parsed:
    """Return the first capital letter as the answer.

    For `reasoning`, only letters in the first `<answer>` block count, and the first `<think>` block is returned as the reasoning.
    """
    if answer_type == "letter":
        return Parsed(*_find_first_capital(text, "first capital"))
    answer, _, rule = _find_first_capital(_extract_tag(text, "answer") or "", "first capital in the answer tags")
    return Parsed(answer, (_extract_tag(text, "think") or "").strip(), rule)


def _find_first_capital(text: str, rule: str) -> tuple[str, str, str]:
    match = re.search("[A-Z]", text)
    return (match[0], "", rule) if match else ("", "", "none")


def extract_tagged_answer(text: str) -> str:
    """Return the stripped content of the first `<answer>…</answer>`, or else the complete text, as cosmos-rl does."""
    inside = _extract_tag(text, "answer")
    return (text if inside is None else inside).strip()


def _extract_tag(text: str, tag: str) -> str | None:
    """Return the content of the first `<tag>…</tag>`, or None.

    A regular expression would rescan the text for each unclosed start tag.
    """
    inside, end, _ = text.partition(f"<{tag}>")[2].partition(f"</{tag}>")
    return inside if end else None


def extract_hash_number(text: str) -> str | None:
    """Return the first number after `#### ` without thousands separators, as cosmos-rl does."""
    match = re.search(r"#### (-?[0-9.,]+)", text)
    return match[1].replace(",", "") if match else None
