"""Adapter for LLaVA annotations: a JSON list (or JSON lines) of conversations about media files below `data.media_path`.

    {"id": "7", "video": "clips/7.mp4", "conversations": [
        {"from": "human", "value": "<video>\\nWhich way does it move?"}, {"from": "gpt", "value": "left"},
        {"from": "human", "value": "And its colour?"}, {"from": "gpt", "value": "red"}]}

Media keys are `image`, `images`, `video` and `videos`; each holds a path or a list of paths. Each `<image>` or `<video>` tag in a
human turn is replaced with the next image or video, so the number of tags must equal the number of media items.
"""

from __future__ import annotations

import re
from typing import Any

from data_adapters.conversations import collect_media, get_last_reply
from dsreason.data.rows import text_field
from dsreason.data.types import Message, Sample
from dsreason.errors import DataError

ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
TAG = re.compile(r"\n?<(image|video)>\n?")


def to_sample(row: dict[str, Any]) -> Sample:
    turns = row["conversations"]
    if not isinstance(turns, list) or not turns:
        raise DataError("field 'conversations' must be a non-empty list of turns with 'from' and 'value'")
    waiting = {kind: collect_media(row, kind) for kind in ("image", "video")}
    for kind, paths in waiting.items():
        num_tags = sum(count_tags(turn, kind) for turn in turns)
        if len(paths) != num_tags:
            raise DataError(
                f"field 'conversations' has {num_tags} <{kind}> tags, but the row has {len(paths)} {kind}s; put one "
                f"tag per {kind} at the position in the text at which to show it"
            )
    messages = [to_message(i, turn, waiting) for i, turn in enumerate(turns)]
    meta = {"kind": row["kind"]} if "kind" in row else {}
    return Sample(str(row.get("id", "")), messages, answer=get_last_reply(messages), meta=meta)


def count_tags(turn: dict[str, Any], kind: str) -> int:
    return str(turn.get("value", "")).count(f"<{kind}>") if ROLES.get(turn.get("from", "")) == "user" else 0


def to_message(number: int, turn: dict[str, Any], waiting: dict[str, list[str]]) -> Message:
    role = ROLES.get(turn.get("from", ""))
    if role is None:
        raise DataError(f"conversations[{number}].from must be one of {', '.join(ROLES)}; got {turn.get('from')!r}")
    text = text_field(turn, "value")
    if role != "user" or not TAG.search(text):
        return {"role": role, "content": text}
    return {"role": role, "content": split_at_tags(text, waiting)}


def split_at_tags(text: str, waiting: dict[str, list[str]]) -> list[dict[str, Any]]:
    """Split the text into parts, replacing each tag and the newlines next to it with the next media item of the tag's kind."""
    parts: list[dict[str, Any]] = []
    pieces = TAG.split(text)  # text, kind, text, kind, …, text
    for i, piece in enumerate(pieces):
        if i % 2:
            parts.append({"type": piece, piece: waiting[piece].pop(0)})
        elif piece:
            parts.append({"type": "text", "text": piece})
    return parts
