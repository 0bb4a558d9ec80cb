"""Rewards for multiple-choice questions."""

from __future__ import annotations

import re

from dsreason.answers.choices import option_with_text
from dsreason.answers.compat import tagged_answer
from dsreason.answers.text import plain
from dsreason.data.types import Sample
from dsreason.rewards.text import final_answer


def single_choice(completion: str, sample: Sample) -> float:
    """1 if the answer is the reference to the letter, case aside, else 0; the same as cosmos-rl's.

    Both are what is inside the first `<answer>…</answer>`, or the whole text where there is none. `(A)` is not `A`.
    """
    if sample.answer is None:
        return 0.0
    return float(tagged_answer(completion).lower() == tagged_answer(sample.answer).lower())


def single_choice_lenient(completion: str, sample: Sample) -> float:
    """1 if the final answer names the reference's option in any usual way, else 0; see `read_choice`."""
    if sample.answer is None:
        return 0.0
    right = read_choice(sample.answer, sample.options)
    chosen = read_choice(completion, sample.options)
    if right is None or chosen is None:
        return float(plain(final_answer(completion)) == plain(final_answer(sample.answer)))
    return float(chosen == right)


def read_choice(text: str, options: dict[str, str] | None) -> str | None:
    """The option's letter in capitals, or None when no single one is named.

    Read are `A`, `(A)`, `A.`, `A) text`, `A: text`, `**A**`, `\\boxed{A}`, `the answer is A`, `option A` and, where options
    are given, the text of one of them and `A text`. A letter beside the text or letter of another option names none.
    Without options any single letter counts.
    """
    answer = _unwrapped(final_answer(text))
    letters = "|".join(re.escape(key) for key in options) if options else "[A-Z]"
    said = re.split(r"\b(?:answer|option|choice)(?:\s+is)?\b\s*:?", answer, flags=re.IGNORECASE)[-1].strip()
    return _read(answer, letters, options) or _read(said, letters, options)


def _read(text: str, letters: str, options: dict[str, str] | None) -> str | None:
    return _only_letter(text, letters) or option_with_text(text, options) or _letter_and_text(text, letters, options)


def _unwrapped(text: str) -> str:
    for _ in range(2):  # \boxed{\text{A}}
        text = re.sub(r"\\(?:boxed|text)\{([^{}]*)\}", r"\1", text)
    return text.replace("*", "").replace("$", "").strip()


def _only_letter(text: str, letters: str) -> str | None:
    found = re.fullmatch(rf"[(\[]?\s*({letters})\s*[)\].:,;]*", text, re.IGNORECASE)
    return found[1].upper() if found else None


def _letter_and_text(text: str, letters: str, options: dict[str, str] | None) -> str | None:
    """`A) text`, any text; `A text` only with the option's own, since a sentence may begin with "A"."""
    found = re.match(rf"[(\[]?({letters})(?:([)\].:]+|\s+-+\s)\s*|\s+)(.+)", text, re.DOTALL | re.IGNORECASE)
    if found is None:
        return None
    letter, mark, rest = found[1].upper(), found[2], found[3].strip()
    named = _only_letter(rest, letters) or option_with_text(rest, options)
    return letter if named == letter or (named is None and mark) else None


def ordinal_choice(completion: str, sample: Sample, *, step: float = 0.5) -> float:
    """For answers that have an order: 1 for the right one, `step` less for each place beside it, never below 0.

    Whole numbers are as far apart as they differ, letters as their places in the sample's options. Other answers are right
    or wrong (case aside). Answers are read as in `single_choice`.
    """
    if sample.answer is None:
        return 0.0
    given, right = tagged_answer(completion), tagged_answer(sample.answer)
    places = {letter.upper(): place for place, letter in enumerate(sample.options or {})}
    for place in (_whole_number, lambda text: places.get(text.upper())):
        here, there = place(given), place(right)
        if here is not None and there is not None:
            return max(0.0, 1.0 - step * abs(here - there))
    return float(given.lower() == right.lower())


def _whole_number(text: str) -> int | None:
    return int(text) if re.fullmatch(r"[+-]?[0-9]{1,18}", text) else None
