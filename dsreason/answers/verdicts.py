"""Verdicts, such as "the answer is no", and reading yes or no."""

from __future__ import annotations

import re
from collections.abc import Iterator

from dsreason.answers.phrases import LED_YES_NO, PROVISIONAL, REFUSAL, VERDICT, YES_NO
from dsreason.answers.text import last_boxed, without_markup

UNREAD = ("", "none")
"""No answer, and the rule that says so."""


def verdicts(text: str, begins: re.Pattern[str] = VERDICT) -> Iterator[tuple[int, str]]:
    """Where each verdict begins, and the rest of its line (as far as it matters); not those that their clause takes back."""
    for match in begins.finditer(text):
        if not is_refused(text[: match.start()]):
            yield match.start(), text[match.end() :][:500].partition("\n")[0]


def is_refused(before: str) -> bool:
    """Whether the clause that leads to a verdict takes it back ("I do not think that"), or its sentence does ("at first", "if")."""
    sentence = re.split(r"[.;!?\n→⇒]|[=-]>|\b(?:so|therefore|thus|hence|but|because)\b", before[-200:])[-1]
    clause = re.split("[,:]", sentence)[-1]
    return REFUSAL.search(clause) is not None or PROVISIONAL.search(sentence) is not None


def read_yes_no(text: str) -> tuple[str, str]:
    """(`yes` or `no`, the rule); the last verdict ("the answer is no"), else what the lines begin with, if they agree."""
    boxed = last_boxed(text)
    plain = without_markup(text if boxed is None else boxed)
    chosen = [found[1].lower() for _, line in verdicts(plain) if (found := YES_NO.match(line))]
    if chosen:
        return chosen[-1], "answer is"
    begun = {found[1].lower() for line in plain.splitlines() if (found := YES_NO.match(line))}
    if len(begun) == 1:
        return begun.pop(), "yes or no"
    led = {
        (found[1] or found[2]).lower() for found in LED_YES_NO.finditer(plain) if not is_refused(plain[: found.start()])
    }
    return (led.pop(), "conclusion") if len(led) == 1 and not begun else UNREAD
