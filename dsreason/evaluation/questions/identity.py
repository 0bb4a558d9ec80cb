"""Identity of questions: it depends neither on which others are asked, nor on the requested form of the answer."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import PurePath
from typing import Any

from dsreason.data.messages import format_shown_seconds

REQUESTS = {
    "multiple_choice": "Answer with the option's letter from the given choices directly.",
    "yes_no": "Answer with yes or no directly.",
    "open": "Answer the question using a single word or phrase.",
}
"""Last line of a benchmark question, by its kind; the first is cosmos-reason1's."""
REASONING_REQUEST = (
    "Please answer the question in the following format: <think> your reasoning </think> <answer> your {} </answer>."
)
REQUEST_LINES = re.compile(
    rf"(?:\n(?:{'|'.join(map(re.escape, REQUESTS.values()))}))?"
    rf"(?:\n{re.escape(REASONING_REQUEST).replace(re.escape('{}'), '[^<>]*')})?\Z"
)


def compute_question_key(text: str, media: Iterable[str]) -> str:
    """Stands for a question in its id: a hash of its words (options included, the requests of `REQUESTS` not) and of its
    media, see `name_medium`."""
    content = "\n".join([REQUEST_LINES.sub("", text, count=1), *media])
    return hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def name_medium(part: dict[str, Any]) -> str:
    """The file's name without its ending, and the seconds of it where only those are shown: `0123`, `0123@2.5-4`."""
    name, seconds = PurePath(part[part["type"]]).stem, format_shown_seconds(part)
    return f"{name}@{seconds}" if seconds else name


def make_question_id(dataset: str, video_id: str, key: str, seen: Counter[str]) -> str:
    """`<dataset>/<video_id>/<key>`, for which `seen` counts: the second of exact repeats ends in `-2`, and so on."""
    plain = f"{dataset}/{video_id}/{key}"
    seen[plain] += 1
    return plain if seen[plain] == 1 else f"{plain}-{seen[plain]}"
