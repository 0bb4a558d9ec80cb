"""Reading answers exactly as others do, quirks included, to compare with their numbers.

In cosmos-reason1's evaluator a letter is the first capital anywhere: `The answer is B` gives T, `b` gives nothing. In
cosmos-rl's rewards an answer is the text of the first `<answer>` block as it stands, and GSM8K's number follows `#### `.
"""

from __future__ import annotations

import re

from dsreason.answers.types import AnswerType, Parsed


def parse_compat(text: str, answer_type: AnswerType) -> Parsed:
    """`letter`: the first of A to Z. `reasoning`: that inside the first `<answer>…</answer>`, and the first `<think>` block."""
    if answer_type == "letter":
        return Parsed(*_first_capital(text, "first capital"))
    answer, _, rule = _first_capital(_inside(text, "answer") or "", "first capital in the answer tags")
    return Parsed(answer, (_inside(text, "think") or "").strip(), rule)


def _first_capital(text: str, rule: str) -> tuple[str, str, str]:
    match = re.search("[A-Z]", text)
    return (match[0], "", rule) if match else ("", "", "none")


def tagged_answer(text: str) -> str:
    """cosmos-rl: what is inside the first `<answer>…</answer>`, else the whole text; without white space around it."""
    inside = _inside(text, "answer")
    return (text if inside is None else inside).strip()


def _inside(text: str, tag: str) -> str | None:
    """What `<tag>(.*?)</tag>` finds, which looks for the end again and again if there is none."""
    inside, end, _ = text.partition(f"<{tag}>")[2].partition(f"</{tag}>")
    return inside if end else None


def hash_number(text: str) -> str | None:
    """cosmos-rl: the first number behind `#### `, without its thousands commas."""
    match = re.search(r"#### (-?[0-9.,]+)", text)
    return match[1].replace(",", "") if match else None
