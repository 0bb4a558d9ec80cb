"""Parsers for verdicts, such as "the answer is no", and for yes-or-no answers."""

from __future__ import annotations

import re
from collections.abc import Iterator

from dsreason.answers.phrases import CHANGED_MIND, ECHO, LED_YES_NO, PROVISIONAL, REFUSAL, VERDICT, YES_NO
from dsreason.answers.text import find_last_boxed, split_sentences, strip_markup, take_text_before

UNREAD = ("", "none")
"""(answer, rule) that a parser returns if it finds no answer."""


def iter_verdicts(text: str, pattern: re.Pattern[str] = VERDICT) -> Iterator[tuple[int, str]]:
    """Yield (start index, up to 500 characters after it on the same line) for each verdict that is not negated."""
    for match in pattern.finditer(text):
        if not is_refused(text, match.start()):
            yield match.start(), text[match.end() : match.end() + 500].partition("\n")[0]


def is_refused(text: str, start: int) -> bool:
    """Return whether the words before the verdict at `start` negate or limit it: "I do not think that", "at first", "if"."""
    before = take_text_before(text, start, 200)
    sentence = re.split(r"[.;!?\n→⇒]|[=-]>|\b(?:so|therefore|thus|hence|but|because)\b", before)[-1]
    clause = re.split("[,:]", sentence)[-1]
    return REFUSAL.search(clause) is not None or PROVISIONAL.search(sentence) is not None


def read_yes_no(text: str) -> tuple[str, str]:
    """Return `yes` or `no`, and the rule that found it: the last verdict, or else the first words of lines or sentences.

    If several lines or sentences begin with yes or no, they must agree; if none does, conclusions such as "so no" count.
    Synonyms such as "true" and "definitely not" count as well. After a change of mind ("wait"), only the later text counts.
    """
    boxed = find_last_boxed(text)
    plain = ECHO.sub("", strip_markup(text if boxed is None else boxed))
    plain = CHANGED_MIND.split(plain)[-1]
    verdict_words = [_to_yes_no(match[1]) for _, line in iter_verdicts(plain) if (match := YES_NO.match(line))]
    if verdict_words:
        return verdict_words[-1], "answer is"
    for parts in (plain.splitlines(), split_sentences(plain)):
        first_words = {_to_yes_no(match[1]) for part in parts if (match := YES_NO.match(part))}
        if first_words:
            return (first_words.pop(), "yes or no") if len(first_words) == 1 else UNREAD
    conclusions = {
        _to_yes_no(next(filter(None, match.groups())))
        for match in LED_YES_NO.finditer(plain)
        if not is_refused(plain, match.start())
    }
    return (conclusions.pop(), "conclusion") if len(conclusions) == 1 else UNREAD


def _to_yes_no(word: str) -> str:
    return "yes" if word.lower() in ("yes", "true") else "no"
