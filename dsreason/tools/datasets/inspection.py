"""Statistics about data sets: counts, lengths, media, labels and duplicates.

Two rows are duplicates if they have the same user messages, ignoring case, punctuation and spaces, and the same media, in the
same order and with the same displayed seconds.
Two media items are the same if their files have the same bytes: files of equal size are compared by SHA-256. This finds a clip
under two names, but not a re-encoded clip.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from dsreason.data.chat import Encoder
from dsreason.data.labels import Label, normalise_label
from dsreason.data.order import pick_evenly
from dsreason.data.sources import SampleDataset
from dsreason.errors import DataError
from dsreason.files.disk import compute_sha256
from dsreason.media.files import find_local_file
from dsreason.media.frames import describe_video_path, list_files
from dsreason.tools.datasets.processes import run_tracked
from dsreason.tools.datasets.row_facts import (
    MediumFacts,
    MediumUse,
    RowFacts,
    UnusableRow,
    collect_medium_facts,
    read_facts,
)

Media = Mapping[MediumUse, MediumFacts | DataError]

COMMON = 10
"""Maximum number of answers, system prompts or pixel differences in a report; the most frequent ones are reported."""


@dataclass(frozen=True)
class Spread:
    """Distribution of a set of numbers; 95 % of them do not exceed `p95`."""

    min: float
    median: float
    p95: float
    max: float


@dataclass(frozen=True)
class MediaReport:
    """Facts about the readable media files of one kind."""

    files: int
    bytes: int
    height: Spread | None
    width: Spread | None
    seconds: Spread | None = None
    fps: Spread | None = None


@dataclass(frozen=True)
class Letter:
    """Number of rows whose correct answer is this letter, and the number to expect if all options were equally likely."""

    count: int
    expected: float


@dataclass(frozen=True)
class PreferenceReport:
    """Facts about rows with a chosen and a rejected answer. If nearly all chosen answers are longer, the model learns length."""

    rows: int
    rejected_characters: Spread | None
    longer_chosen: int
    undecided: int
    """Number of rows whose two conversations are the same."""


@dataclass(frozen=True)
class PixelReport:
    """Media items in the measured rows: how many were compared, and how many would differ in frames or size in cosmos-rl."""

    compared: int
    differing: int
    examples: list[str]


@dataclass(frozen=True)
class PartReport:
    """Report on one part of the data: training, validation, or a test set.

    `unusable` counts rows by reason, and `unreadable_media` counts files; `Inspection.problems` lists both.
    """

    rows: int
    inspected: int
    unusable: dict[str, int]
    unreadable_media: int
    modalities: dict[str, int]
    question_characters: Spread | None
    answer_characters: Spread | None
    tokens: Spread | None
    too_long: int | None
    """Number of rows with more tokens than `max_length`; None without a model."""
    media: dict[str, MediaReport]
    letters: dict[str, Letter]
    unlisted_answers: int
    """Number of rows whose short answer is not among the question's options; such rows do not count as multiple choice."""
    answers: dict[str, int]
    """Most frequent short answers in rows without options: answer → number of rows."""
    best_constant: float | None
    """Share of the rows with a short answer or letter for which the best constant answer is right; None without such rows."""
    system_prompts: dict[str, int]
    with_think: int
    with_answer_tag: int
    several_turns: int
    duplicates: int
    """Number of rows with the same question and media as an earlier row."""
    pixels: PixelReport | None = None
    """Differences from cosmos-rl; None without a model."""
    preferences: PreferenceReport | None = None
    """Facts about preference rows; None if no row has a rejected answer."""


@dataclass(frozen=True)
class Overlap:
    """Numbers of rows in one part that are also in another part: complete rows, and rows with shared media."""

    part: str
    other: str
    same_rows: int
    same_media: int


@dataclass(frozen=True)
class Inspection:
    parts: dict[str, PartReport]
    overlaps: list[Overlap]
    max_length: int | None
    problems: list[dict[str, Any]] = field(default_factory=list)
    """All unusable rows and unreadable files, each with the keys part, where, kind and reason."""
    balance: dict[str, Label] = field(default_factory=dict)
    """Label → number of its training rows, and how many of them an epoch uses; empty if `data.balance` is unset."""
    duplicates: list[dict[str, Any]] = field(default_factory=list)
    """All rows that repeat an earlier row. Each entry has the keys `part` and `where` for the row, and `of_part` and `of` for
    the earlier row."""


def inspect_data(
    datasets: Mapping[str, SampleDataset],
    encoder: Encoder | None = None,
    *,
    limit: int | None = None,
    workers: int = 0,
) -> Inspection:
    """Inspect every row, or `limit` evenly spaced rows from each data set; only the media's headers are read.

    Args:
        datasets: data sets by name, in the order of the report; each is compared with the earlier ones.
        encoder: encoder that counts the rows' tokens; None skips the count.
    """
    facts_of_part: dict[str, list[RowFacts | UnusableRow]] = {}
    for name, dataset in datasets.items():
        rows = pick_evenly(len(dataset), limit)
        work = partial(read_facts, dataset, encoder)
        read = run_tracked(work, rows, dataset.describe_location, workers, f"reading {name}", "rows")
        facts_of_part[name] = [
            UnusableRow(dataset.describe_location(row), str(result)) if isinstance(result, DataError) else result
            for row, result in zip(rows, read, strict=True)
        ]
    uses = list(
        dict.fromkeys(use for facts in facts_of_part.values() for row in select_usable(facts) for use in row.media)
    )
    results = run_tracked(
        collect_medium_facts, uses, lambda use: describe_video_path(use.path), workers, "reading media headers", "files"
    )
    media = dict(zip(uses, results, strict=True))
    keys = compute_content_keys(media, workers)
    return Inspection(
        parts={name: report(len(datasets[name]), facts, media, keys, encoder) for name, facts in facts_of_part.items()},
        overlaps=find_overlaps({name: select_usable(facts) for name, facts in facts_of_part.items()}, keys),
        max_length=encoder.max_length if encoder else None,
        problems=list_problems(facts_of_part, media),
        duplicates=find_repeated(facts_of_part, keys),
    )


def select_usable(facts: Iterable[RowFacts | UnusableRow]) -> list[RowFacts]:
    return [row for row in facts if isinstance(row, RowFacts)]


# ---------------------------------------------------------------- media


def compute_content_keys(media: Media, workers: int) -> dict[str, str]:
    """Return a content key for each file: path → key. Only files with the same size as another file are read and hashed."""
    sizes = {use.path: facts.size for use, facts in media.items() if isinstance(facts, MediumFacts)}
    counts = Counter(sizes.values())
    alike = [path for path, size in sizes.items() if counts[size] > 1]
    hashes = run_tracked(
        lambda path: [compute_sha256(find_local_file(file)) for file in list_files(path)],
        alike,
        describe_video_path,
        workers,
        "comparing media",
        "files",
    )
    by_path = dict(zip(alike, hashes, strict=True))
    return {path: str(by_path.get(path, size)) for path, size in sizes.items()}


def report_media(files: Sequence[MediumFacts]) -> MediaReport:
    return MediaReport(
        files=len(files),
        bytes=sum(file.size for file in files),
        height=compute_spread(file.height for file in files),
        width=compute_spread(file.width for file in files),
        seconds=compute_spread(file.seconds for file in files),
        fps=compute_spread(file.fps for file in files),
    )


# ---------------------------------------------------------------- report on one part


def report(
    num_rows: int,
    facts: Sequence[RowFacts | UnusableRow],
    media: Media,
    keys: Mapping[str, str],
    encoder: Encoder | None,
) -> PartReport:
    rows = select_usable(facts)
    bad = [row for row in facts if isinstance(row, UnusableRow)]
    files = {use: media[use] for row in rows for use in row.media}
    readable = [(use.kind, file) for use, file in files.items() if isinstance(file, MediumFacts)]
    short = count_answers(row.answer for row in rows if not row.letters)
    return PartReport(
        rows=num_rows,
        inspected=len(facts),
        unusable=dict(Counter("missing media" if row.is_missing_media else "other" for row in bad)),
        unreadable_media=len(files) - len(readable),
        modalities=dict(Counter(get_modality(row) for row in rows)),
        question_characters=compute_spread(row.question_length for row in rows),
        answer_characters=compute_spread(row.answer_length for row in rows),
        tokens=compute_spread(row.tokens for row in rows),
        too_long=sum((row.tokens or 0) > encoder.max_length for row in rows) if encoder else None,
        media={
            kind: report_media([file for of_kind, file in readable if of_kind == kind])
            for kind in ("image", "video")
            if any(use.kind == kind for use in files)
        },
        letters=count_letters(rows),
        unlisted_answers=sum(row.is_unlisted for row in rows),
        answers=dict(short.most_common(COMMON)),
        best_constant=compute_best_constant(rows),
        system_prompts=dict(Counter(row.system_prompt for row in rows if row.system_prompt).most_common(COMMON)),
        with_think=sum(row.has_think for row in rows),
        with_answer_tag=sum(row.has_answer_tag for row in rows),
        several_turns=sum(row.turns > 1 for row in rows),
        duplicates=len(rows) - len({make_row_key(row, keys) for row in rows}),
        pixels=report_pixels(rows) if encoder else None,
        preferences=report_preferences(rows),
    )


def report_preferences(rows: Sequence[RowFacts]) -> PreferenceReport | None:
    lengths = [(row.answer_length, row.rejected_length) for row in rows if row.rejected_length is not None]
    if not lengths:
        return None
    return PreferenceReport(
        rows=len(lengths),
        rejected_characters=compute_spread(rejected for _, rejected in lengths),
        longer_chosen=sum(chosen_length > rejected for chosen_length, rejected in lengths),
        undecided=sum(row.is_undecided for row in rows),
    )


def report_pixels(rows: Sequence[RowFacts]) -> PixelReport:
    differences = [text for row in rows for text in row.pixel_differences]
    compared = sum(len(row.media) for row in rows if row.tokens is not None)
    return PixelReport(compared, len(differences), list(dict.fromkeys(differences))[:COMMON])


def compute_spread(numbers: Iterable[float | None]) -> Spread | None:
    known_numbers = [number for number in numbers if number is not None]
    if not known_numbers:
        return None
    low, middle, high, top = (float(value) for value in np.percentile(known_numbers, [0, 50, 95, 100]))
    return Spread(low, middle, high, top)


def get_modality(row: RowFacts) -> str:
    kinds = {use.kind for use in row.media}
    return " and ".join(sorted(kinds)) if kinds else "text"


def count_letters(rows: Iterable[RowFacts]) -> dict[str, Letter]:
    """Count correct answers by letter.

    Example: in two rows with options A to D, A and B are each correct once → A: 1 (expected 0.5).
    """
    rows_with_letters = [row for row in rows if row.letters]
    right = Counter(row.answer for row in rows_with_letters)
    names = sorted({letter for row in rows_with_letters for letter in row.letters})
    return {
        name: Letter(right[name], sum(1 / len(row.letters) for row in rows_with_letters if name in row.letters))
        for name in names
    }


def count_answers(answers: Iterable[str | None]) -> Counter[str]:
    """Count the answers; answers that differ only in case or a final full stop count as one, spelled like the first."""
    known_answers, first = [answer for answer in answers if answer is not None], dict[str, str]()
    return Counter(first.setdefault(normalise_label(answer), answer) for answer in known_answers)


def compute_best_constant(rows: Iterable[RowFacts]) -> float | None:
    answers = count_answers(row.answer for row in rows)
    return max(answers.values()) / answers.total() if answers else None


# ---------------------------------------------------------------- duplicates

Key = tuple[str, tuple[str, ...], tuple[str, ...]]


def make_media_key(row: RowFacts, keys: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(keys.get(use.path, use.path) for use in row.media)


def make_row_key(row: RowFacts, keys: Mapping[str, str]) -> Key:
    return row.question, make_media_key(row, keys), row.seconds


def find_overlaps(parts: Mapping[str, Sequence[RowFacts]], keys: Mapping[str, str]) -> list[Overlap]:
    """Find the overlaps between each part and every earlier part."""
    names = list(parts)
    overlaps = []
    for i, name in enumerate(names):
        for other in names[:i]:
            rows = {make_row_key(row, keys) for row in parts[other]}
            media = {key for row in parts[other] for key in make_media_key(row, keys)}
            overlaps.append(
                Overlap(
                    part=name,
                    other=other,
                    same_rows=sum(make_row_key(row, keys) in rows for row in parts[name]),
                    same_media=sum(not media.isdisjoint(make_media_key(row, keys)) for row in parts[name]),
                )
            )
    return overlaps


def find_repeated(
    facts_by_part: Mapping[str, Sequence[RowFacts | UnusableRow]], keys: Mapping[str, str]
) -> list[dict[str, Any]]:
    first: dict[Key, tuple[str, RowFacts]] = {}
    listed = []
    for name, facts in facts_by_part.items():
        for row in select_usable(facts):
            other, same = first.setdefault(make_row_key(row, keys), (name, row))
            if same is not row:
                listed.append({"part": name, "where": row.where, "of_part": other, "of": same.where})
    return listed


def list_problems(facts_by_part: Mapping[str, Sequence[RowFacts | UnusableRow]], media: Media) -> list[dict[str, Any]]:
    listed = []
    for name, facts in facts_by_part.items():
        for row in facts:
            if isinstance(row, UnusableRow):
                found_here = [("missing media" if row.is_missing_media else "unusable row", row.reason)]
            else:
                files = [media[use] for use in row.media]
                found_here = [("unreadable media", str(file)) for file in files if isinstance(file, DataError)]
            listed += [{"part": name, "where": row.where, "kind": kind, "reason": why} for kind, why in found_here]
    return listed
