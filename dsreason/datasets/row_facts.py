"""What `dsreason data inspect` notes of one row, and of one media file."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Literal

from dsreason.data.chat import Encoder
from dsreason.data.messages import media_parts, shown_seconds, text_of
from dsreason.data.options import option_letter
from dsreason.data.sources import SampleDataset
from dsreason.data.types import Sample
from dsreason.errors import DataError
from dsreason.files.disk import sha256_of
from dsreason.media.media import local_path, probe_image, probe_video

THINK = re.compile(r"<think>.*?</think>", re.DOTALL)
ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
MISSING_FILE = re.compile(r"\bno (such )?(file|clip|image|video)\b")
"""Matches the DataErrors about a missing file, whichever adapter looked for it."""
SHORT_ANSWER = 40
"""Longest answer in characters that is counted among the frequent answers."""


@dataclass(frozen=True)
class MediumUse:
    kind: Literal["image", "video"]
    path: str


@dataclass(frozen=True)
class RowFacts:
    """Of a row that gives a sample. `tokens` is None without a model, or where a medium cannot be measured."""

    where: str
    """File and row."""
    question: str
    """Hash of the user's words, see `normalised`."""
    question_length: int
    answer_length: int
    tokens: int | None
    media: tuple[MediumUse, ...]
    seconds: tuple[str, ...]
    """Which of each medium are shown, see `shown_seconds`."""
    answer: str | None
    """A letter where there are options, else a short answer."""
    letters: tuple[str, ...]
    """Of the options."""
    system_prompt: str
    turns: int
    """Replies of the assistant."""
    has_think: bool
    has_answer_tag: bool


@dataclass(frozen=True)
class UnusableRow:
    where: str
    reason: str

    @property
    def is_missing_media(self) -> bool:
        return MISSING_FILE.search(self.reason) is not None


@dataclass(frozen=True)
class MediumFacts:
    """`size` in bytes; `seconds` and `fps` are None for images."""

    size: int
    height: int
    width: int
    seconds: float | None = None
    fps: float | None = None


@dataclass(frozen=True)
class RowReader:
    """Picklable: row number → its facts."""

    dataset: SampleDataset
    encoder: Encoder | None

    def __call__(self, row: int) -> RowFacts:
        sample = self.dataset[row]
        return row_facts(self.dataset.location(row), sample, self._tokens(sample))

    def _tokens(self, sample: Sample) -> int | None:
        if self.encoder is None:
            return None
        try:
            return self.encoder.measure(sample)
        except DataError:  # its media are read one by one, and reported there
            return None


def row_facts(where: str, sample: Sample, tokens: int | None) -> RowFacts:
    asked = [text_of(message) for message in sample.messages if message["role"] == "user"]
    replies = [text_of(message) for message in sample.messages if message["role"] == "assistant"]
    system = [text_of(message) for message in sample.messages if message["role"] == "system"]
    reply = replies[-1] if replies else sample.answer or ""
    shown = media_parts(sample.messages)
    return RowFacts(
        where=where,
        question=hashlib.sha256(normalised(" ".join(asked)).encode()).hexdigest(),
        question_length=sum(map(len, asked)),
        answer_length=sum(map(len, replies)),
        tokens=tokens,
        media=tuple(MediumUse(part["type"], part[part["type"]]) for part in shown),
        seconds=tuple(map(shown_seconds, shown)),
        answer=option_letter(sample.answer or reply, sample.options or {}) or short_answer(sample.answer or reply),
        letters=tuple(sample.options or ()),
        system_prompt=system[0] if system else "",
        turns=len(replies),
        has_think=any(THINK.search(text) for text in replies),
        has_answer_tag=any(ANSWER.search(text) for text in replies),
    )


def normalised(text: str) -> str:
    """Lower case, words and numbers only, one space between them: `Which way?\\n` and `which WAY` are the same."""
    return " ".join(re.findall(r"\w+", text.casefold()))


def short_answer(text: str) -> str | None:
    """What stands in `<answer>` tags, else what is not in `<think>` tags; None where that is a longer text."""
    tagged = ANSWER.findall(text)
    answer = (tagged[-1] if tagged else THINK.sub("", text)).strip()
    return answer if 0 < len(answer) <= SHORT_ANSWER and "\n" not in answer else None


def medium_facts(use: MediumUse) -> MediumFacts:
    """From the file's header; nothing is decoded but a video's first frame."""
    size = local_path(use.path).stat().st_size
    if use.kind == "image":
        height, width = probe_image(use.path)
        return MediumFacts(size, height, width)
    info = probe_video(use.path)
    return MediumFacts(size, info.height, info.width, info.duration, info.fps)


def content_hash(path: str) -> str:
    return sha256_of(local_path(path))
