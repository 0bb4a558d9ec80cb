"""Adapter for preference rows of Hugging Face data sets: `prompt`, `chosen`, `rejected`, and optionally `images` and `videos`.

    {"id": "7", "prompt": "Which way does it move?", "chosen": "left", "rejected": "right", "videos": ["clips/7.mp4"]}

`prompt`, `chosen` and `rejected` are each a text or messages (a list, or its JSON text). `chosen` and `rejected` may also be
complete conversations that start with the same messages; the row then needs no `prompt`, but if it has one, both conversations
must contain it.

`images` and `videos` (or `image` and `video`) hold one media item or a list: paths, resolved below `data.media_path` if relative,
or Hugging Face images (as bytes). A part `{"type": "image"}` of the prompt shows the next item. If the prompt has no such parts,
all media precede the first user text.

The prompt may also be called `question`, and the optional column `system` holds the system message. The optional columns
`ref_chosen_logprob` and `ref_rejected_logprob` hold the log-probabilities of the reference model.
"""

from __future__ import annotations

import json
import re
from typing import Any

from data_adapters.conversations import collect_media, fill_media, get_dict_parts, get_text, parse_messages
from dsreason.data.rows import get_optional_text, text_field
from dsreason.data.types import Message, Sample
from dsreason.errors import DataError

KINDS = ("image", "video")
MARK = re.compile("<(image|video)>")
MESSAGE_KEYS = {"role", "content", "from", "value"}
"""Keys of messages in the formats that data sets commonly use."""
COLUMNS = {"id", "prompt", "question", "system", "chosen", "rejected", "answer", "image", "images", "video", "videos"}


def to_sample(row: dict[str, Any]) -> Sample:
    prompt = read_prompt(row)
    preferred, rejected = (read_conversation(row, field, prompt) for field in ("chosen", "rejected"))
    answer = get_optional_text(row, "answer") or get_text(preferred[-1].get("content"))
    return Sample(
        id=str(row.get("id", "")),
        messages=place_media(preferred, row, "chosen"),
        answer=answer,
        meta={name: value for name, value in row.items() if name not in COLUMNS},
        rejected=place_media(rejected, row, "rejected"),
    )


def read_prompt(row: dict[str, Any]) -> list[Message]:
    """Return the messages in the column `prompt` or `question`; an empty list if the row has neither."""
    field = "prompt" if row.get("prompt") is not None else "question"
    content = to_messages(row.get(field), field)
    messages: list[Message] = [{"role": "user", "content": content}] if isinstance(content, str) else content
    system = get_optional_text(row, "system")
    return messages if system is None else [{"role": "system", "content": system}, *messages]


def to_messages(raw: Any, field: str) -> str | list[Message]:
    """Return plain text unchanged, and messages (or their JSON text) without the null columns that Arrow adds."""
    if isinstance(raw, str):
        listed = parse_listed_messages(raw)
        if listed is None:
            return raw
        raw = listed
    messages = parse_messages([] if raw is None else raw, field)
    return [{key: value for key, value in message.items() if value is not None} for message in messages]


def parse_listed_messages(text: str) -> list[Message] | None:
    """Parse a JSON list of messages; return None if the text is not such a list, for example an answer that lists boxes.

    Raise DataError if the items look like messages but not all of them have a role.
    """
    if not text.lstrip().startswith("["):
        return None
    try:
        messages = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not messages or not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        return None
    if all("role" in message for message in messages):
        return messages
    if faulty := next((message for message in messages if MESSAGE_KEYS & {str(key).lower() for key in message}), None):
        raise DataError(
            f"the JSON list of messages has a message without a role: {faulty!r:.200}; add role and content to every "
            "message"
        )
    return None


def read_conversation(row: dict[str, Any], field: str, prompt: list[Message]) -> list[Message]:
    """Return the prompt followed by the answer in this column, or the column's complete conversation."""
    if row[field] is None:
        raise DataError(f"field {field!r} must be a string or a list of messages; got null")
    messages = to_messages(row[field], field)
    if isinstance(messages, str):
        messages = [{"role": "assistant", "content": text_field(row, field)}]
    if not messages:
        raise DataError(f"field {field!r} is an empty list, but must contain an answer")
    if messages[0].get("role") != "assistant":
        return merge_prompt(messages, field, prompt)
    if not prompt:
        raise DataError(
            f"field {field!r} has only an answer, and the row has no prompt; add the column 'prompt', or put complete "
            "conversations into 'chosen' and 'rejected'"
        )
    return [*prompt, *messages]


def merge_prompt(messages: list[Message], field: str, prompt: list[Message]) -> list[Message]:
    """Add the row's system message to a complete conversation.

    Raise DataError if the conversation lacks a message of the prompt.
    """
    if messages[0].get("role") not in ("system", "user"):
        return messages  # an unknown role is rejected later, when all messages are checked
    if prompt and prompt[0].get("role") == "system" and messages[0]["role"] != "system":
        messages = [prompt[0], *messages]
    present = [get_role_and_text(message) for message in messages]
    for required in map(get_role_and_text, prompt):
        if required[1] and required not in present:
            raise DataError(
                f"field {field!r} is a complete conversation, but it lacks the row's {required[0]} message "
                f"{required[1]!r:.200}; add the message to the conversation, or remove it from the row"
            )
    return messages


def get_role_and_text(message: Message) -> tuple[Any, str]:
    """Return a message's role, and its text without tags such as `<image>`."""
    return message.get("role"), MARK.sub("", get_text(message.get("content") or "")).strip()


def place_media(messages: list[Message], row: dict[str, Any], field: str) -> list[Message]:
    """Insert the media of the row's columns into the messages. Raise DataError if a media item is not shown."""
    waiting = {kind: collect_media(row, kind) for kind in KINDS}
    has_media_parts = any(part.get("type") in KINDS for message in messages for part in get_dict_parts(message))
    messages = [fill_media(message, waiting) for message in messages]
    if not has_media_parts:
        return put_media_first(messages, [{"type": kind, kind: item} for kind in KINDS for item in waiting[kind]])
    for kind, unused in waiting.items():
        if unused:
            raise DataError(
                f"field {field!r}: {len(unused)} of the row's {kind}s are not shown; add a part of type {kind!r} for "
                "each to the prompt, or remove all image and video parts"
            )
    return messages


def put_media_first(messages: list[Message], media: list[dict[str, Any]]) -> list[Message]:
    """Insert the media before the text of the first user message."""
    first = next((i for i, message in enumerate(messages) if message.get("role") == "user"), None)
    if not media or first is None:
        return messages
    content = messages[first].get("content")
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else list(content or ())
    return [*messages[:first], {**messages[first], "content": [*media, *parts]}, *messages[first + 1 :]]
