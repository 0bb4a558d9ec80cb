"""What a sample's messages say and show."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from dsreason.data.types import Message, Sample
from dsreason.errors import DataError

SURROGATE = re.compile("[\\ud800-\\udfff]")
"""Half a character: valid in JSON, but tokenizers reject it."""


def check_characters(text: str) -> None:
    if SURROGATE.search(text):
        raise DataError(f"the text contains a lone surrogate (half a character): {text!r:.200}")


def text_of(message: Message) -> str:
    """Its text; of several parts, a line each."""
    content = message["content"]
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content if part["type"] == "text")


def joined_text(message: Message) -> str:
    """Its text as chat templates write it: several parts one behind the other."""
    content = message["content"]
    if isinstance(content, str):
        return content
    return "".join(part["text"] for part in content if part["type"] == "text")


def media_parts(messages: Iterable[Message]) -> list[dict[str, Any]]:
    """The images and videos, in the order in which they are shown."""
    contents = [message["content"] for message in messages if not isinstance(message["content"], str)]
    return [part for content in contents for part in content if part["type"] in ("image", "video")]


def media_paths(messages: Iterable[Message]) -> list[str]:
    return [str(part[part["type"]]) for part in media_parts(messages)]


def shown_seconds(part: dict[str, Any]) -> str:
    """`2.5-4` where only these seconds of a video are shown, "" where all of it is."""
    start, end = part.get("video_start") or 0, part.get("video_end")
    return f"{start}-{'' if end is None else end}" if start or end is not None else ""


def prompt_messages(sample: Sample) -> list[Message]:
    """Return the messages that a completion follows: all but a last one of the assistant."""
    last = sample.messages[-1] if sample.messages else {}
    return sample.messages[:-1] if last.get("role") == "assistant" else sample.messages
