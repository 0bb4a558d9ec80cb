"""Reimplementation of other projects' answer parsers, quirks included, to compare with their numbers.

cosmos-reason1's evaluator takes the first capital anywhere as the letter: `The answer is B` gives T, `b` gives nothing.
cosmos-rl's rewards take the text of the first `<answer>` block unchanged, and GSM8K's number follows `#### `.
"""

from __future__ import annotations

import re

from dsreason.answers.types import AnswerType, Parsed


def parse_compat(text: str, answer_type: AnswerType) -> Parsed:
    """Return the first letter A to Z for `letter`; for `reasoning`, the first one inside `<answer>…</answer>`.

    Only `reasoning` also returns the first `<think>` block.
    """
    if answer_type == "letter":
        return Parsed(*_find_first_capital(text, "first capital"))
    answer, _, rule = _find_first_capital(_extract_tag(text, "answer") or "", "first capital in the answer tags")
    return Parsed(answer, (_extract_tag(text, "think") or "").strip(), rule)


def _find_first_capital(text: str, rule: str) -> tuple[str, str, str]:
    match = re.search("[A-Z]", text)
    return (match[0], "", rule) if match else ("", "", "none")


def extract_tagged_answer(text: str) -> str:
    """Return the stripped content of the first `<answer>…</answer>`, or else the whole text, as cosmos-rl does."""
    inside = _extract_tag(text, "answer")
    return (text if inside is None else inside).strip()


def _extract_tag(text: str, tag: str) -> str | None:
    """Return what `<tag>(.*?)</tag>` matches, without its repeated scans for a missing end tag."""
    inside, end, _ = text.partition(f"<{tag}>")[2].partition(f"</{tag}>")
    return inside if end else None


def extract_hash_number(text: str) -> str | None:
    """Return the first number after `#### ` without its thousands commas, as cosmos-rl does."""
    match = re.search(r"#### (-?[0-9.,]+)", text)
    return match[1].replace(",", "") if match else None
