"""Adapter for Hugging Face data sets with OpenAI-style messages in the column `conversations` or `messages`.

    {"id": "7", "conversations": [
        {"role": "user", "content": [{"type": "video", "video": "clips/7.mp4"}, {"type": "text", "text": "Which way?"}]},
        {"role": "assistant", "content": "left"}]}

The column holds a list or its JSON text. Media are paths, resolved below `data.media_path` if relative, or Hugging Face images
(as bytes). A part may also omit its media item, as in `{"type": "image"}`; it then shows the next item of the row's column
`image` or `images` (for videos, `video` or `videos`).
"""

from __future__ import annotations

import json
from typing import Any

from dsreason.data.rows import to_list
from dsreason.data.types import Message, Sample
from dsreason.errors import DataError
from dsreason.problems import describe_parse_error


def to_sample(row: dict[str, Any]) -> Sample:
    column = "conversations" if "conversations" in row else "messages"
    waiting = {kind: collect_media(row, kind) for kind in ("image", "video")}
    messages = [fill_media(message, waiting) for message in parse_messages(row[column], column)]
    for kind, unused in waiting.items():
        has_part = any(part.get("type") == kind for message in messages for part in get_dict_parts(message))
        if unused and (not has_part or len(unused) < len(collect_media(row, kind))):
            raise DataError(
                f"field {column!r}: {len(unused)} of the row's {kind}s are not shown; add a part of type {kind!r} for "
                "each"
            )
    return Sample(str(row.get("id", "")), messages, answer=row.get("answer") or get_last_reply(messages))


def parse_messages(value: Any, column: str) -> list[Message]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise DataError(f"field {column!r} is not valid JSON: {describe_parse_error(error)}") from error
    if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
        raise DataError(f"field {column!r} must be a list of messages with role and content")
    return value


def collect_media(row: dict[str, Any], kind: str) -> list[Any]:
    """Return the media in the columns `image` and `images` (or `video` and `videos`); each column holds one item or a list."""
    return [*to_list(row.get(kind)), *to_list(row.get(f"{kind}s"))]


def get_dict_parts(message: Message) -> list[dict[str, Any]]:
    content = message.get("content")
    return [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []


def fill_media(message: Message, waiting: dict[str, list[Any]]) -> Message:
    """Give each part without a media item the next item of `waiting`, and remove that item from `waiting`."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return {**message, "content": [fill_part(part, waiting) if isinstance(part, dict) else part for part in content]}


def fill_part(part: dict[str, Any], waiting: dict[str, list[Any]]) -> dict[str, Any]:
    part = {key: value for key, value in part.items() if value is not None}  # Arrow gives all parts the same keys
    kind = part.get("type")
    if kind not in waiting or kind in part:
        return part
    if not waiting[kind]:
        raise DataError(
            f"a part of type {kind!r} has no {kind}, and the row's columns have no {kind} left for it; add one or "
            "remove the part"
        )
    return {**part, kind: waiting[kind].pop(0)}


def get_last_reply(messages: list[Message]) -> str | None:
    """Return the text of the last message, which is the reference answer; None if the last message is not the assistant's."""
    last: Message = messages[-1] if messages else {}
    return get_text(last["content"]) if last.get("role") == "assistant" else None


def get_text(content: Any) -> str:
    if isinstance(content, list):
        return "".join(str(part.get("text") or "") for part in content if isinstance(part, dict))
    return str(content)
