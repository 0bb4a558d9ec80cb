"""Functions that parse a multiple-choice question's options from a field or from the question's text, and format them."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import replace
from string import ascii_uppercase
from typing import Any

from dsreason.data.messages import get_text
from dsreason.data.types import Sample
from dsreason.errors import DataError
from dsreason.text import normalize_option, split_response

WIDE = str.maketrans(
    {wide: wide - 0xFEE0 for wide in (*range(0xFF21, 0xFF3B), *range(0xFF41, 0xFF5B), *map(ord, "（）［］"))}
)
"""Full-width letter or bracket, as used in East Asian texts → ASCII character."""
BOLD = re.compile(r"(?<!\w)\*\*(?!\s)|(?<!\s)\*\*(?!\w)")
"""Pattern for Markdown's bold marker; the power operator `**` between numbers does not match."""
SEPARATORS = " ,;*"
BEFORE = r"(?:[-•*][ \t]+)?(?:[Oo]ption[ \t]+)?"
STYLES = [
    re.compile(rf"{position}{BEFORE}{label}[ \t]*", re.MULTILINE)
    for position, labels in (
        (
            r"(?:^|(?<=[\s,;:?]))",
            (
                r"\(([A-Za-z])\)",
                r"\[([A-Z])\]",
                r"([A-Za-z])\)",
                r"(?<!\b[A-Z]\.\s)([A-Z])\.(?=\s)",
                r"([A-Z]):(?=\s)",
                r"([A-Z])[、．：]",
            ),
        ),
        (
            r"^[ \t]*",
            (
                r"\(([A-Za-z])\)",
                r"\[([A-Z])\]",
                r"([A-Za-z])\)",
                r"([A-Z])[.:](?=[\s\w])",
                r"([a-z])\.(?=[ \t])",
                r"([A-Z])[ \t]+[-–—](?=[ \t])(?![ \t]+[A-Z]$)",
            ),
        ),
    )
    for label in labels
]
"""Styles of option labels: `(A) left`, `[A] left`, `A) left`, `A. left`, `A: left` and `A、left` anywhere in a text; `A.left`,
`a. left` and `A - x` only at the start of a line.

All labels in a list have the same style, except for bullets or "Option" before them. Initials in a name and graph edges such as
`A - B` do not match. Labels at line starts take precedence, because an option's text may mention another option.
"""
MARKUP = re.compile(r"\\boxed\s{0,9}\{(.{0,1000})\}|\*\*|\$")
LEAD = re.compile(
    r"\A(?:the\s+)?(?:(?:correct|right|best|final)\s+)?(?:answer|option|choice)(?:\s+is|\s*:)?\s+(?:option\s+)?",
    re.IGNORECASE,
)
LONGEST = 1000


def options_field(given: Any, field: str) -> dict[str, str] | None:
    """Return the options in a row's field as letter → text, with numbers converted to strings; None if it has no options.

    Values that are None are dropped, because Arrow adds them to give all rows the same letters. Raise DataError if the field is
    not a mapping of letters to texts.
    """
    if given is None:
        return None
    if not isinstance(given, dict) or not all(isinstance(text, str | int | float | None) for text in given.values()):
        raise DataError(f"field {field!r} must map each letter to a string; got {given!r:.100}")
    return {letter: str(text) for letter, text in given.items() if text is not None} or None


def format_options(options: Mapping[str, str] | None) -> list[str]:
    """Format each option as a line of the question: `(A) left`."""
    return [f"({letter}) {text}" for letter, text in (options or {}).items()]


option_lines = format_options
"""Former name of `format_options`, kept because users' adapters may import it."""


def own_letter(answer: str, options: Iterable[str]) -> str | None:
    """Return the option letter that equals the answer, ignoring case; None if no letter matches."""
    return next((letter for letter in options if letter.lower() == answer.lower()), None)


def with_options(sample: Sample) -> Sample:
    """Add the options listed in the question's text to a sample that has none, provided that its answer is one of them.

    The prompt does not change. The question is the last user message; the answer is `sample.answer`, or else the last assistant
    message. A sample with a `question_kind` other than multiple choice does not change.
    """
    options = None if sample.options else find_options_in_question(sample)
    replies = [get_text(message) for message in sample.messages if message["role"] == "assistant"]
    answer = sample.answer if sample.answer is not None else (replies or [""])[-1]
    if options is None or find_option_letter(answer, options) is None:
        return sample
    return replace(sample, options=options)


def find_options_in_question(sample: Sample) -> dict[str, str] | None:
    """Return the options listed in the last user message; None unless the question is multiple choice."""
    if sample.meta.get("question_kind", "multiple_choice") != "multiple_choice":
        return None
    questions = [get_text(message) for message in sample.messages if message["role"] == "user"]
    return parse_listed_options(questions[-1]) if questions else None


def parse_listed_options(question: str) -> dict[str, str] | None:
    """Return the options listed in a text, on separate lines or inline; None if the text lists fewer than two options.

    The letters must be consecutive, starting with A. If the text has several lists, the longest is used; of equally long lists,
    the last. Option texts are truncated to 1000 characters. Keys are capital letters, even for `(a) Rain`.

    Example: `What caused it?\nA) Rain\nB) Ice` gives `{"A": "Rain", "B": "Ice"}`.
    """
    question = BOLD.sub("", question)
    runs: list[list[re.Match[str]]] = []
    for style in STYLES:
        for label in style.finditer(question.translate(WIDE)):
            if label[1].upper() == "A":
                runs.append([label])
            elif runs and label.re is runs[-1][0].re and label[1].upper() == ascii_uppercase[len(runs[-1]) % 26]:
                text = label.string[runs[-1][-1].end() : label.start()]
                if text.count("(") <= text.count(")"):  # not `A) the van (see B)`
                    runs[-1].append(label)
    long_runs = [run for run in reversed(runs) if len(run) > 1]
    for run in sorted(long_runs, key=lambda run: (len(run), run[0].start(1)), reverse=True):
        end_of_line = question.find("\n", run[-1].end())  # the last option ends with its line
        ends = [*(label.start() for label in run[1:]), end_of_line if end_of_line >= 0 else len(question)]
        texts = [_strip_separators(question[label.end() : end][:LONGEST]) for label, end in zip(run, ends, strict=True)]
        if all(re.search(r"\w", text) for text in texts):
            if not any(text.endswith("?") for text in texts[:-1]):
                # The question mark belongs to the question: `Is it A) left or B) right?`
                texts[-1] = texts[-1].rstrip("? ")
            return {label[1].upper(): text for label, text in zip(run, texts, strict=True)}
    return None


def _strip_separators(text: str) -> str:
    """Remove the punctuation and the conjunction between an option and the next one: `left, or` → `left`."""
    plain = " ".join(text.split()).rstrip(SEPARATORS)
    conjunction = next(
        (word for word in ("or", "and") if plain.endswith(tuple(mark + word for mark in SEPARATORS))), ""
    )
    return plain.removesuffix(conjunction).rstrip(SEPARATORS)


def find_option_letter(answer: str, options: dict[str, str]) -> str | None:
    """Return the letter of the option that an answer selects; None if it selects no option or more than one.

    An answer may be `B`, `(b)`, `B.`, `B) left`, `The answer is B`, or the text of an option. Only the text inside `<answer>`
    tags or after the reasoning is used, and this text may be bold or boxed.
    """
    written = unicodedata.normalize("NFKC", split_response(answer).answer)
    if normalize_option(written) not in map(normalize_option, options.values()):
        written = LEAD.sub("", MARKUP.sub(r"\1", written).strip())
    lettered = re.fullmatch(r"[(\[]?([A-Za-z])(?:[)\].:、]+|\s+[-–—]\s|\Z)\s*(.*)", written, re.DOTALL)
    if lettered is not None:
        letter = next((letter for letter in options if letter.upper() == lettered[1].upper()), None)
        if letter is not None and (
            not lettered[2] or normalize_option(lettered[2]) == normalize_option(options[letter])
        ):
            return letter
    letters = [letter for letter, text in options.items() if normalize_option(written) == normalize_option(text)]
    return letters[0] if len(letters) == 1 else None
