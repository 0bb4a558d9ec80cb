"""Parser for time spans: `from 00:12 to 00:15`, `[12.0, 15.0]`, `{"start": 12, "end": "0:15"}`, `<start>12</start> …`.

The parser first finds times. The text before, between and after two consecutive times then decides whether they form a span.
Every check examines a bounded part of the text, so the running time is linear in the length of the text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dsreason.rewards.reading.plain import find_json_values, is_none_answer, normalize_key, to_finite_float

Span = tuple[float, float]
"""Start and end in seconds, as written; the end may precede the start."""

NUMBER = r"[0-9]{1,9}(?:\.[0-9]{1,9})?"
UNITS = {
    "h": (3600.0, r"h(?:ours?|rs?)?"),
    "m": (60.0, r"m(?:in(?:ute)?s?)?"),
    "ms": (0.001, r"(?:ms|msecs?|milliseconds?)"),
    "s": (1.0, r"s(?:ec(?:ond)?s?)?"),
}
"""Unit → its length in seconds, and the pattern for its spellings in lower case (texts are lower-cased first)."""
HOURS, MINUTES, MILLISECONDS, SECONDS = (rf"({NUMBER})[\s-]?{written}(?![a-z])" for _, written in UNITS.values())
AND = r"[\s,]{0,2}(?:and\s)?"
CLOCK = r"(?:([0-9]{1,3}):)?([0-9]{1,4}):([0-9]{1,2}(?:\.[0-9]{1,9}|,[0-9]{3}(?![0-9:]))?)(?:\s?s(?:ec)?(?![a-z]))?"
TIME = re.compile(
    rf"(?<![\w.:])(?:(?P<clock>{CLOCK})|(?P<h>{HOURS}(?:{AND}{MINUTES})?(?:{AND}{SECONDS})?)|(?P<m>{MINUTES}(?:{AND}{SECONDS})?)"
    rf"|(?P<ms>{MILLISECONDS})|(?P<s>{SECONDS})|(?P<bare>{NUMBER}))(?![\w:])(?!\.[0-9])"
)
PART = re.compile("|".join(rf"(?P<{unit}>{NUMBER})[\s-]?{written}(?![a-z])" for unit, (_, written) in UNITS.items()))

WINDOW = 80
"""Number of characters that are examined before, between and after two times."""
WORD = re.compile(r"[a-z][a-z_]*|-{1,3}>|=>|-{1,3}|\.{2,3}|[~/]")
TO = {"to", "until", "till", "til", "through", "thru", "->", "-->", "--->", "=>", "-", "--", "---", "..", "...", "~"}
EMPTY_WORDS = (
    "a at is are was about around approximately roughly approx the of in on its it time timestamp mark video clip point "
    "second seconds sec secs s min mins minute minutes t and then lasts lasting running up all way also or"
)
FILLING = set(EMPTY_WORDS.split())
"""Words that do not change the meaning of a text."""
GOING_ON = "when while as where during with for that which this after before i he she they there"
FOLLOWING = FILLING | set(GOING_ON.split())
"""Words that may follow a span whose times have no units."""
START_WORDS = {"start", "starts", "started", "starting", "begin", "begins", "beginning", "began", "onset", "tmin"}
END_WORDS = {
    "end",
    "ends",
    "ended",
    "ending",
    "finish",
    "finishes",
    "finished",
    "stop",
    "stops",
    "stopped",
    "tmax",
} | TO
START_KEYS = ("start", "begin", "from", "tstart", "tmin", "onset", "s", "starts", "timestart")
END_KEYS = ("end", "to", "until", "tend", "tmax", "finish", "stop", "e", "ends", "timeend")
TIME_WORDS = re.compile(r"(?:time(?:stamp)?|timestamps|seconds?|secs?|at|s)\Z")


def read_spans(text: str) -> list[Span] | None:
    """Return all spans in a text (see `to_plain`); [] if it states that there are none, None if it could not be parsed."""
    values = find_json_values(text)
    spans_read = [span for value in values for span in iter_json_spans(value)]
    if not spans_read and (is_none_answer(text) or (values and not any(has_content(value) for value in values))):
        return []
    return spans_read or find_text_spans(text.lower()) or None


def has_content(value: Any) -> bool:
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]
    return any(not isinstance(item, dict | list) or has_content(item) for item in inside)


def iter_json_spans(value: Any) -> Iterator[Span]:
    if isinstance(value, dict):
        keys = {reduce_key(key): item for key, item in value.items()}
        ends = [
            next((parse_json_time(keys[key]) for key in names if key in keys), None) for names in (START_KEYS, END_KEYS)
        ]
        inside = list(value.values())
    elif isinstance(value, list):
        ends = [parse_json_time(item) for item in value] if len(value) == 2 else []
        inside = value
    else:
        yield from find_text_spans(value[:WINDOW].lower(), whole=True) if isinstance(value, str) else ()
        return
    match ends:
        case [float(start), float(end)]:
            yield start, end
        case _:
            for item in inside:
                yield from iter_json_spans(item)


def reduce_key(key: Any) -> str:
    """Reduce a key to its keyword: `start_time` → `start`."""
    name = normalize_key(key)
    return TIME_WORDS.sub("", name) or name


def parse_json_time(value: Any) -> float | None:
    """Convert a number of seconds, or a string that consists of a single time, to seconds; return None for anything else."""
    if not isinstance(value, str):
        return to_finite_float(value)
    match = TIME.search(value[:WINDOW].lower())
    alone = match is not None and not find_words(value[:WINDOW].lower().replace(match[0], " ", 1)) - FILLING
    return Time.of(match).seconds() if match is not None and alone and not value.strip().startswith("-") else None


def find_words(text: str) -> set[str]:
    return set(WORD.findall(text))


@dataclass(frozen=True)
class Time:
    start: int
    end: int
    value: float
    unit: float | None
    """Length in seconds of the time's first unit (1 for a clock time); None for a number without a unit."""

    @classmethod
    def of(cls, match: re.Match[str]) -> Time:
        if match["bare"]:
            return cls(match.start(), match.end(), float(match["bare"]), None)
        if match["clock"]:
            *hours, minutes, seconds = match["clock"].rstrip("sec ").replace(",", ".").split(":")
            value = 3600 * float(hours[0] if hours else 0) + 60 * float(minutes) + float(seconds)
            return cls(match.start(), match.end(), value, 1.0)
        parts = [
            (UNITS[part.lastgroup or ""][0], float(part[part.lastgroup or ""])) for part in PART.finditer(match[0])
        ]
        return cls(match.start(), match.end(), sum(unit * count for unit, count in parts), parts[0][0])

    def seconds(self, unit: float | None = None) -> float:
        """Return the time in seconds.

        Args:
            unit: length in seconds of the unit to assume for a number without one, namely the unit of the span's other time;
                None means seconds.
        """
        return self.value * (unit or 1.0) if self.unit is None else self.value


def find_text_spans(text: str, *, whole: bool = False) -> list[Span]:
    """Return the spans in a lower-case text. Spans that are only vaguely stated count only if there are no clear ones.

    If `whole` is true, return a span only if it makes up the entire text.
    """
    times = [Time.of(match) for match in TIME.finditer(text)]
    if whole and (len(times) != 2 or find_words(text) - FILLING - TO - {"from", "between"}):
        return []
    clear: list[Span] = []
    vague: list[Span] = []
    number = 0
    while number + 1 < len(times):
        first, second = times[number : number + 2]
        kind = find_relation(text, first, second, alone=len(times) == 2)
        if kind is not None:
            span = (first.seconds(second.unit), second.seconds())
            (vague if kind == "vague" else clear).append(span)
            number += 1
        number += 1
    return clear or vague


def find_relation(text: str, first: Time, second: Time, *, alone: bool) -> str | None:
    """Return how clearly two consecutive times form a span: `clear`, `vague`, or None if they do not form one."""
    gap = text[first.end : second.start]
    before, behind = text[max(0, first.start - WINDOW) : first.start], text[second.end : second.end + WINDOW]
    if len(gap) > WINDOW or re.search(r"-\s?\Z", before) or re.match(r"\s?-\s?[0-9]", behind):
        return None
    around = select_words(before)
    between = select_words(gap)
    if {"frame", "frames"} & {*around[-1:], *between, *select_words(behind)[:1]}:
        return None
    bare = first.unit is None and second.unit is None
    inside = re.search(r"[\[(<{]\s{0,3}\Z", before) is not None and re.match(r"\s{0,3}[\])>}]", behind) is not None
    if inside and re.fullmatch(r"\s{0,3}(?:[,;|]|[\])>}]\s{0,3}[,;]?\s{0,3}[\[(<{])\s{0,3}", gap):
        return "clear"
    if around[-1:] and reduce_word(around[-1]) in START_WORDS and between and reduce_word(between[-1]) in END_WORDS:
        return "clear"
    joined = len(between) == 1 and between[0] in TO
    if joined or (not between and "and" in find_words(gap) and around[-1:] == ["between"]):
        if not bare or inside:
            return "clear"
        following = WORD.match(behind.lstrip())
        return "vague" if following is None or following[0] in FOLLOWING else None
    nothing_else = alone and not around and not between and not select_words(behind)
    return "vague" if nothing_else and re.fullmatch(r"[\s,;|\])>}\[(<{]{1,9}", gap) else None


def select_words(text: str) -> Sequence[str]:
    """Return the words and signs that carry meaning, in order."""
    return [word for word in WORD.findall(text) if word not in FILLING and word != "/"]


def reduce_word(word: str) -> str:
    """Reduce a word to its keyword: `start_time` → `start`, `t_end` → `end`."""
    bare = TIME_WORDS.sub("", normalize_key(word)) or word
    return bare.removeprefix("t") if bare in ("tstart", "tend") else bare
