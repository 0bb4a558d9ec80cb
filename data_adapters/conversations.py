"""Hugging Face data sets with OpenAI-style messages in the column `conversations` (or `messages`), as a list or as JSON text.

    {"id": "7", "conversations": [
        {"role": "user", "content": [{"type": "video", "video": "clips/7.mp4"}, {"type": "text", "text": "Which way?"}]},
        {"role": "assistant", "content": "left"}]}

Media are paths, relative ones below `data.media_path`, or Hugging Face images (their bytes). A part may also leave its
medium out, `{"type": "image"}`: it is then the next one of the row's column `image` or `images` (`video`, `videos`).
"""

from __future__ import annotations

import json
from typing import Any

from dsreason.data.types import Message, Sample
from dsreason.errors import DataError


def to_sample(row: dict[str, Any]) -> Sample:
    column = "conversations" if "conversations" in row else "messages"
    waiting = {kind: in_columns(row, kind) for kind in ("image", "video")}
    messages = [fill(tidy(message), waiting) for message in parse(row[column], column)]
    for kind, left in waiting.items():
        shown = sum(is_medium(part, kind) for message in messages for part in parts_of(message))
        if left and (shown == 0 or len(left) < len(in_columns(row, kind))):
            raise DataError(
                f"field {column!r}: {len(left)} of the row's {kind}s are not shown; give each a part of type {kind!r}"
            )
    return Sample(str(row.get("id", "")), messages, answer=row.get("answer") or last_reply(messages))


def parse(value: Any, column: str) -> list[Message]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise DataError(f"field {column!r}: is no JSON: {error}") from error
    if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
        raise DataError(f"field {column!r}: must be a list of messages with role and content")
    return value


def tidy(message: Message) -> Message:
    """Without the None entries that Arrow fills in so that all parts have the same keys."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    parts = [{k: v for k, v in part.items() if v is not None} if isinstance(part, dict) else part for part in content]
    return {**message, "content": parts}


def in_columns(row: dict[str, Any], kind: str) -> list[Any]:
    given = [row.get(kind), row.get(f"{kind}s")]
    return [medium for one in given if one for medium in (one if isinstance(one, list) else [one])]


def parts_of(message: Message) -> list[Any]:
    content = message.get("content")
    return content if isinstance(content, list) else []


def is_medium(part: Any, kind: str) -> bool:
    return isinstance(part, dict) and part.get("type") == kind


def fill(message: Message, waiting: dict[str, list[Any]]) -> Message:
    """With the media of the row's columns in the parts that name none."""
    if not isinstance(message.get("content"), list):
        return message
    return {**message, "content": [fill_part(part, waiting) for part in message["content"]]}


def fill_part(part: Any, waiting: dict[str, list[Any]]) -> Any:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in waiting or kind in part:
        return part
    if not waiting[kind]:
        raise DataError(f"a part of type {kind!r} names no {kind}, and the row's columns have no further one")
    return {**part, kind: waiting[kind].pop(0)}


def last_reply(messages: list[Message]) -> str | None:
    """What the conversation ends with, where that is the assistant's: the reference answer to what comes before."""
    last: Message = messages[-1] if messages else {}
    return text_of(last["content"]) if last.get("role") == "assistant" else None


def text_of(content: Any) -> str:
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content if isinstance(part, dict))
    return str(content)
