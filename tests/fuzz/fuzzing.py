"""Generated inputs for one reader, in seeded rounds until the time limit is reached."""

from __future__ import annotations

import itertools
import signal
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

from hypothesis import HealthCheck, given, note, seed, settings
from hypothesis import strategies as st

ROUND = 200
"""Number of inputs per round; the seed of a round reproduces them."""
CPU_SECONDS = 10
"""Maximum number of CPU seconds per input."""
Fuzz = Callable[[Callable[[Any], object], st.SearchStrategy[Any]], None]

texts = st.text(max_size=30)
numbers = st.one_of(st.integers(), st.integers(-3, 3), st.floats(), st.sampled_from([10**30, -(10**400), 2**63, 1e308]))
values = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, texts),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=8,
)
"""Strategy for arbitrary JSON values."""


def run_rounds(check: Callable[[Any], object], inputs: st.SearchStrategy[Any], seconds: float, first: int) -> None:
    """Call `check` with the inputs of the rounds `first`, `first + 1`, …; a failure reports its round and the smallest failing
    input."""
    end = time.monotonic() + seconds
    for number in itertools.count(first):
        run_round(check, inputs, number)
        if time.monotonic() > end:
            print(f"{(number - first + 1) * ROUND} inputs, rounds {first} to {number}")
            return


def run_round(check: Callable[[Any], object], inputs: st.SearchStrategy[Any], number: int) -> None:
    @seed(number)
    @settings(
        max_examples=ROUND, database=None, deadline=None, suppress_health_check=list(HealthCheck), print_blob=False
    )
    @given(inputs)
    def check_one(value: Any) -> None:
        note(f"round {number}: --fuzz-round {number} makes it again")
        within_time(check, value)

    check_one()


def within_time(check: Callable[[Any], object], value: Any, seconds: float = CPU_SECONDS) -> None:
    """Limit the CPU time of this process instead of the wall-clock time, which passes even while other processes run."""
    before = signal.signal(signal.SIGVTALRM, too_slow)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        check(value)
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def too_slow(number: int, frame: FrameType | None) -> NoReturn:
    raise AssertionError("one input took more than its processor time")


@st.composite
def changed(draw: st.DrawFn, document: Any, replacements: st.SearchStrategy[Any] = values) -> Any:
    """Draw the JSON document with one to three changes: values replaced or removed, or keys added."""
    result = document
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(list(paths(result))))
        result = with_change(
            result, path, draw(st.sampled_from(["replace", "replace", "remove", "add"])), draw(replacements)
        )
    return result


def paths(document: Any) -> list[tuple[Any, ...]]:
    """Return the path of every value in the document, including the document itself."""
    result: list[tuple[Any, ...]] = [()]
    inside = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    )
    for key, value in inside:
        result += [(key, *path) for path in paths(value)]
    return result


def with_change(document: Any, path: tuple[Any, ...], how: str, value: Any) -> Any:
    if not path:
        if how == "add" and isinstance(document, dict):
            return {**document, "unheard_of": value}
        if how == "add" and isinstance(document, list):
            return [*document, value]
        return value
    if not isinstance(document, dict | list):
        return value
    copy: Any = document.copy()
    key, *remainder = path
    if how == "remove" and not remainder:
        del copy[key]
    else:
        copy[key] = with_change(copy[key], tuple(remainder), how, value)
    return copy


@st.composite
def damaged(draw: st.DrawFn, contents: st.SearchStrategy[bytes]) -> bytes:
    """Draw contents with bytes changed, removed or inserted, and sometimes truncated.

    Most changes are near the beginning, where the headers are.
    """
    content = bytearray(draw(contents))
    for _ in range(draw(st.integers(1, 8))):
        place = draw(st.one_of(st.integers(0, min(64, len(content))), st.integers(0, len(content))))
        piece = draw(
            st.one_of(st.binary(max_size=8), st.sampled_from([b"\xff" * 4, b"\x7f\xff\xff\xff", bytes(4), bytes(8)]))
        )
        removed = draw(st.sampled_from([len(piece), len(piece), len(piece), 0, len(piece) + 4]))
        content[place : place + removed] = piece
    if draw(st.integers(0, 9)) == 0:
        del content[draw(st.integers(0, len(content))) :]
    return bytes(content)
