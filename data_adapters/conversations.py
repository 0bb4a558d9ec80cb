"""Hugging Face data sets with OpenAI-style messages in the column `conversations` (or `messages`), as a list or as JSON text.

    {"id": "7", "conversations": [
        {"role": "user", "content": [{"type": "video", "video": "clips/7.mp4"}, {"type": "text", "text": "Which way?"}]},
        {"role": "assistant", "content": "left"}]}

Media are paths, relative ones below `data.media_path`.
"""

from __future__ import annotations

import json
from typing import Any

from dsreason.data.types import Message, Sample
from dsreason.errors import DataError


def to_sample(row: dict[str, Any]) -> Sample:
    column = "conversations" if "conversations" in row else "messages"
    messages = [tidy(message) for message in parse(row[column], column)]
    answers = [text_of(message["content"]) for message in messages if message.get("role") == "assistant"]
    return Sample(str(row.get("id", "")), messages, answer=row.get("answer") or (answers[-1] if answers else None))


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


def text_of(content: Any) -> str:
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content if isinstance(part, dict))
    return str(content)
