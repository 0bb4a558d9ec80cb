"""Question ids, which depend neither on the other questions asked nor on the requested answer format."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import PurePath
from typing import Any

from dsreason.data.messages import format_shown_seconds
from dsreason.media.frames import is_frame_list, list_files

REQUESTS = {
    "multiple_choice": "Answer with the option's letter from the given choices directly.",
    "yes_no": "Answer with yes or no directly.",
    "open": "Answer the question using a single word or phrase.",
}
"""Kind of question → last line of a benchmark question. The line for multiple choice is the same as in cosmos-reason1."""
REASONING_REQUEST = (
    "Please answer the question in the following format: <think> your reasoning </think> <answer> your {} </answer>."
)
REQUEST_LINES = re.compile(
    rf"(?:\n(?:{'|'.join(map(re.escape, REQUESTS.values()))}))?"
    rf"(?:\n{re.escape(REASONING_REQUEST).replace(re.escape('{}'), '[^<>]*')})?\Z"
)


def compute_question_key(text: str, media: Iterable[str]) -> str:
    """Compute the hash of a question's text and media (see `name_medium`) that is a part of its id.

    The text includes the options, but not the lines from `REQUESTS` and `REASONING_REQUEST`.
    """
    content = "\n".join([REQUEST_LINES.sub("", text, count=1), *media])
    return hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def name_medium(part: dict[str, Any]) -> str:
    """Return a media item's file name without suffix, plus its range in seconds if only a part is used: `0123`, `0123@2.5-4`.

    The name of a video given as frames lists all frames with their folders: `0123/1.png 0123/2.png`.
    """
    path, seconds = part[part["type"]], format_shown_seconds(part)
    name = PurePath(path).stem
    if is_frame_list(path):
        name = " ".join("/".join(PurePath(frame).parts[-2:]) for frame in list_files(path))
    return f"{name}@{seconds}" if seconds else name


def make_question_id(dataset: str, video_id: str, key: str, seen: Counter[str]) -> str:
    """Build the id `<dataset>/<video_id>/<key>`, and count it in `seen`. A repeated id gets a suffix: `-2`, `-3`, …"""
    plain = f"{dataset}/{video_id}/{key}"
    seen[plain] += 1
    return plain if seen[plain] == 1 else f"{plain}-{seen[plain]}"
