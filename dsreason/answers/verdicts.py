"""Verdicts, such as "the answer is no", and reading yes or no."""

from __future__ import annotations

import re
from collections.abc import Iterator

from dsreason.answers.phrases import CHANGED_MIND, ECHO, LED_YES_NO, PROVISIONAL, REFUSAL, VERDICT, YES_NO
from dsreason.answers.text import last_boxed, split_sentences, text_before, without_markup

UNREAD = ("", "none")
"""No answer, and the rule that says so."""


def verdicts(text: str, begins: re.Pattern[str] = VERDICT) -> Iterator[tuple[int, str]]:
    """Where each verdict begins, and the rest of its line (as far as it matters); not those that their clause takes back."""
    for match in begins.finditer(text):
        if not is_refused(text, match.start()):
            yield match.start(), text[match.end() : match.end() + 500].partition("\n")[0]


def is_refused(text: str, start: int) -> bool:
    """Whether the clause before a verdict at `start` takes it back ("I do not think that") or its sentence ("at first", "if")."""
    before = text_before(text, start, 200)
    sentence = re.split(r"[.;!?\n→⇒]|[=-]>|\b(?:so|therefore|thus|hence|but|because)\b", before)[-1]
    clause = re.split("[,:]", sentence)[-1]
    return REFUSAL.search(clause) is not None or PROVISIONAL.search(sentence) is not None


def read_yes_no(text: str) -> tuple[str, str]:
    """(`yes` or `no`, the rule); the last verdict ("the answer is no"), else what lines or sentences begin with, if they agree.

    "True" and "definitely not" are answers, too. After a second thought ("wait") only what follows counts.
    """
    boxed = last_boxed(text)
    plain = ECHO.sub("", without_markup(text if boxed is None else boxed))
    plain = CHANGED_MIND.split(plain)[-1]
    verdict_words = [_meant(match[1]) for _, line in verdicts(plain) if (match := YES_NO.match(line))]
    if verdict_words:
        return verdict_words[-1], "answer is"
    for parts in (plain.splitlines(), split_sentences(plain)):
        begun = {_meant(match[1]) for part in parts if (match := YES_NO.match(part))}
        if begun:
            return (begun.pop(), "yes or no") if len(begun) == 1 else UNREAD
    led = {
        _meant(next(filter(None, match.groups())))
        for match in LED_YES_NO.finditer(plain)
        if not is_refused(plain, match.start())
    }
    return (led.pop(), "conclusion") if len(led) == 1 else UNREAD


def _meant(word: str) -> str:
    return "yes" if word.lower() in ("yes", "true") else "no"
