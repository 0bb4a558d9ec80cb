"""Facts that `dsreason data inspect` collects about each row and each media file."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from dsreason.data.chat import Encoder
from dsreason.data.labels import get_answer_label
from dsreason.data.messages import format_shown_seconds, get_text, list_media_parts
from dsreason.data.options import find_options_in_question
from dsreason.data.sources import SampleDataset
from dsreason.data.types import Message, Sample
from dsreason.errors import DataError
from dsreason.media.files import find_local_file
from dsreason.media.frames import list_files
from dsreason.media.images import probe_image
from dsreason.media.videos import probe_video
from dsreason.text import split_response
from dsreason.tools.datasets.pixels import list_pixel_differences

MISSING_FILE = re.compile(r"\bno (such )?(file|clip|image|video)\b")
"""Pattern that matches any adapter's message about a missing file."""


@dataclass(frozen=True)
class MediumUse:
    kind: Literal["image", "video"]
    path: str


@dataclass(frozen=True)
class RowFacts:
    """Facts about a usable row. `tokens` is None without a model, or if a media item cannot be measured."""

    where: str
    """File and row."""
    question: str
    """Hash of the user's normalised messages; see `normalise`."""
    question_length: int
    answer_length: int
    tokens: int | None
    media: tuple[MediumUse, ...]
    seconds: tuple[str, ...]
    """Part of each media item that is displayed, in seconds; see `format_shown_seconds`."""
    answer: str | None
    """The correct letter if the question has options, otherwise the short answer; None if the row has neither."""
    letters: tuple[str, ...]
    """Letters of the options."""
    is_unlisted: bool
    """Whether the question lists options that do not include the answer."""
    system_prompt: str
    turns: int
    """Number of assistant replies."""
    has_think: bool
    has_answer_tag: bool
    pixel_differences: tuple[str, ...] = ()
    """Differences from cosmos-rl in the row's media; see `list_pixel_differences`. Empty without a model."""
    rejected_length: int | None = None
    """Total length of the replies in a preference row's rejected conversation; None for other rows."""
    is_undecided: bool = False
    """Whether a preference row's two conversations are the same."""


@dataclass(frozen=True)
class UnusableRow:
    where: str
    reason: str

    @property
    def is_missing_media(self) -> bool:
        return MISSING_FILE.search(self.reason) is not None


@dataclass(frozen=True)
class MediumFacts:
    """Facts about a media item. `size` is in bytes; `seconds` and `fps` are None for images."""

    size: int
    height: int
    width: int
    seconds: float | None = None
    fps: float | None = None


def read_facts(dataset: SampleDataset, encoder: Encoder | None, row: int) -> RowFacts:
    sample, tokens, differences = dataset[row], None, list[str]()
    if encoder is not None:
        with suppress(DataError):  # the media are read one by one later, and errors are reported then
            tokens, differences = encoder.measure(sample), list_pixel_differences(encoder, sample)
    return collect_row_facts(dataset.describe_location(row), sample, tokens, differences)


def collect_row_facts(where: str, sample: Sample, tokens: int | None, differences: Iterable[str] = ()) -> RowFacts:
    questions = [get_text(message) for message in sample.messages if message["role"] == "user"]
    replies = list_replies(sample.messages)
    parts = list(map(split_response, replies))
    system = [get_text(message) for message in sample.messages if message["role"] == "system"]
    media, answer = list_media_parts(sample.messages), get_answer_label(sample)
    return RowFacts(
        where=where,
        question=hashlib.sha256(normalise(" ".join(questions)).encode()).hexdigest(),
        question_length=sum(map(len, questions)),
        answer_length=sum(map(len, replies)),
        tokens=tokens,
        media=tuple(MediumUse(part["type"], part[part["type"]]) for part in media),
        seconds=tuple(map(format_shown_seconds, media)),
        answer=answer,
        letters=tuple(sample.options or ()),
        is_unlisted=not sample.options and answer is not None and find_options_in_question(sample) is not None,
        system_prompt=system[0] if system else "",
        turns=len(replies),
        has_think=any(part.thoughts for part in parts),
        has_answer_tag=any(part.tagged for part in parts),
        pixel_differences=tuple(differences),
        rejected_length=None if sample.rejected is None else sum(map(len, list_replies(sample.rejected))),
        is_undecided=sample.rejected == sample.messages,
    )


def list_replies(messages: Iterable[Message]) -> list[str]:
    return [get_text(message) for message in messages if message["role"] == "assistant"]


def normalise(text: str) -> str:
    """Return the text's words and numbers in lower case, separated by spaces: `Which way?\\n` and `which WAY` become equal."""
    return " ".join(re.findall(r"\w+", text.casefold()))


def collect_medium_facts(use: MediumUse) -> MediumFacts:
    """Collect facts from the file's header; only a video's first frame is decoded."""
    size = sum(find_local_file(file).stat().st_size for file in list_files(use.path))
    if use.kind == "image":
        height, width = probe_image(use.path)
        return MediumFacts(size, height, width)
    info = probe_video(use.path)
    return MediumFacts(size, info.height, info.width, info.duration, info.fps)
