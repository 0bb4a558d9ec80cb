"""Options that stand in the question's text rather than in a field of the row."""

from __future__ import annotations

import re
from dataclasses import replace
from string import ascii_uppercase

from dsreason.data.messages import text_of
from dsreason.data.types import Sample

ANYWHERE, OWN_LINE = r"(?:^|(?<=[\s,;:?]))", r"^[ \t]*"
STYLES = [
    re.compile(rf"{place}(?:[-•*][ \t]+)?(?:\*\*)?(?:[Oo]ption[ \t]+)?{label}(?:\*\*)?[ \t]*", re.MULTILINE)
    for place, label in (
        (ANYWHERE, r"\(([A-Za-z])\)"),
        (ANYWHERE, r"\[([A-Z])\]"),
        (ANYWHERE, r"([A-Za-z])\)"),
        (ANYWHERE, r"(?<!\b[A-Z]\.\s)([A-Z])\.(?=\s)"),
        (OWN_LINE, r"([A-Z])\.(?=\w)"),
        (ANYWHERE, r"([A-Z]):(?=\s)"),
        (ANYWHERE, r"([A-Z])、"),
    )
]
"""`(A) left`, `[A] left`, `A) left`, `A. left`, `A.left`, `A: left`, `A、left`, bullets or "Option" before them aside.

All of a list have the same. Not the initials of a name.
"""
MARKUP = re.compile(r"\\boxed\s*\{(.*)\}|\*\*|\$")
LEAD = re.compile(
    r"\A(?:the\s+)?(?:(?:correct|right|best|final)\s+)?(?:answer|option|choice)(?:\s+is|\s*:)?\s+(?:option\s+)?",
    re.IGNORECASE,
)
LONGEST = 1000
TAGGED = re.compile(r"<answer>((?:(?!</?answer>).)*)</answer>", re.DOTALL)


def with_options(sample: Sample) -> Sample:
    """With the options that the question's text lists, where the row has none and its answer is one of them.

    The prompt stays as it is. The question is the user's last message; the answer is `sample.answer`, else the last
    assistant message. A row whose `question_kind` is another than multiple choice is left alone.
    """
    options = None if sample.options else options_in_question(sample)
    replies = [text_of(message) for message in sample.messages if message["role"] == "assistant"]
    answer = sample.answer if sample.answer is not None else (replies or [""])[-1]
    if options is None or option_letter(answer, options) is None:
        return sample
    return replace(sample, options=options)


def options_in_question(sample: Sample) -> dict[str, str] | None:
    """Those that the user's last message lists, see `listed_options`; None where `question_kind` is another."""
    if sample.meta.get("question_kind", "multiple_choice") != "multiple_choice":
        return None
    asked = [text_of(message) for message in sample.messages if message["role"] == "user"]
    return listed_options(asked[-1]) if asked else None


def listed_options(question: str) -> dict[str, str] | None:
    """The options that a text lists, a line each or one behind the other: two or more, lettered from A without a gap.

    Example: `What caused it?\nA) Rain\nB) Ice` gives `{"A": "Rain", "B": "Ice"}`. Of several lists the longest, and of
    those the last. None where there is none. A text is cut after 1000 characters. Keys are capitals, as in `(a) Rain`.
    """
    runs: list[list[re.Match[str]]] = []
    for style in STYLES:
        for label in style.finditer(question):
            if label[1].upper() == "A":
                runs.append([label])
            elif runs and label.re is runs[-1][0].re and label[1].upper() == ascii_uppercase[len(runs[-1]) % 26]:
                runs[-1].append(label)
    for run in sorted((run for run in reversed(runs) if len(run) > 1), key=len, reverse=True):
        end_of_line = question.find("\n", run[-1].end())  # what follows the last option is none
        ends = [*(label.start() for label in run[1:]), end_of_line if end_of_line >= 0 else len(question)]
        texts = [_plain(question[label.end() : end][:LONGEST]) for label, end in zip(run, ends, strict=True)]
        if all(re.search(r"\w", text) for text in texts):
            if not any(text.endswith("?") for text in texts[:-1]):
                texts[-1] = texts[-1].rstrip("? ")  # of the question: `Is it A) left or B) right?`
            return {label[1].upper(): text for label, text in zip(run, texts, strict=True)}
    return None


def _plain(text: str) -> str:
    """Without what separates an option from the next: `left, or` is `left`."""
    return re.sub(r"(?:[\s,;*]+(?:or|and)?)?[\s,;*]*\Z", "", " ".join(text.split()))


def option_letter(answer: str, options: dict[str, str]) -> str | None:
    """The letter that a row's answer gives: `B`, `(b)`, `B.`, `B) left`, `The answer is B`, or the text of one option.

    That is inside `<answer>` tags, if there are any; bold and boxed ones count.
    """
    tagged = TAGGED.findall(answer)
    given = (tagged[-1] if tagged else answer).strip()
    if not any(_same(given, text) for text in options.values()):
        given = LEAD.sub("", MARKUP.sub(r"\1", given).strip())
    lettered = re.fullmatch(r"[(\[]?([A-Za-z])(?:[)\].:、]+|\Z)\s*(.*)", given, re.DOTALL)
    if lettered is not None:
        letter = next((letter for letter in options if letter.upper() == lettered[1].upper()), None)
        if letter is not None and (not lettered[2] or _same(lettered[2], options[letter])):
            return letter
    named = [letter for letter, text in options.items() if _same(given, text)]
    return named[0] if len(named) == 1 else None


def _same(one: str, other: str) -> bool:
    """Case, white space and a full stop at the end do not count."""
    return _comparable(one) == _comparable(other)


def _comparable(text: str) -> str:
    return " ".join(text.casefold().split()).rstrip(" .")
