"""The better and the worse reply in a preference row. Each is a string, messages, or a complete conversation."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from dsreason.data.formats.turns import CONTENT_KEYS, ROLE_KEYS, read_messages
from dsreason.data.messages import join_text
from dsreason.data.types import Message
from dsreason.errors import DataError

REJECTED = ("rejected", "rejected_response", "rejected_messages")
CHOSEN = ("chosen", "chosen_response", "chosen_messages")
COLUMNS = (*CHOSEN, *REJECTED)
MARK = re.compile("<(image|video)>")
MESSAGE_KEYS = {*ROLE_KEYS, *CONTENT_KEYS}
"""Keys of messages in common data set formats."""


def read_pair(row: Mapping[str, Any], base: list[Message]) -> tuple[list[Message], list[Message], set[str]]:
    """Return the conversations with the better and with the worse reply, and the columns read.

    `base` contains the messages from the row's other columns: the prompt or, if the row has no column `chosen`, the prompt with
    the better reply. `chosen` and `rejected` may also be complete conversations, which must then contain the prompt.
    """
    better, worse = (
        next((name for name in names if row.get(name) not in (None, "", [])), None) for names in (CHOSEN, REJECTED)
    )
    if worse is None:
        raise DataError("field 'rejected' is missing, null or empty; a preference needs a better and a worse reply")
    if better is None:
        if not base or base[-1]["role"] != "assistant":
            raise DataError(
                "field 'chosen' is missing, null or empty, and the row has no other reply that could be the better one"
            )
        prompt, preferred = base[:-1], base
    else:
        preferred = read_conversation(row, better, base)
        prompt = base if base and base[-1]["role"] != "assistant" else preferred[:-1]
    rejected = read_conversation(row, worse, prompt, is_implicit=not any(message["role"] == "user" for message in base))
    for name, messages in ((better or "chosen", preferred), (worse, rejected)):
        if messages[-1]["role"] != "assistant":
            raise DataError(
                f"field {name!r} must end with a reply, but ends with a message of the {messages[-1]['role']}"
            )
    return preferred, rejected, {better or "chosen", worse}


def to_messages(raw: Any, column: str, role: str) -> list[Message]:
    """Convert plain text to one message of `role`, and messages (or their JSON text) to a list of messages."""
    if isinstance(raw, str):
        listed = parse_listed_messages(raw)
        if listed is None:
            return [{"role": role, "content": raw}]
        raw = listed
    if isinstance(raw, list) and raw and all(isinstance(item, str) for item in raw):
        raise DataError(
            f"field {column!r} is a list of {len(raw)} texts, {raw!r:.100}; write one text or a list of messages, and a row for "
            "each reply"
        )
    return read_messages(raw, column)


def parse_listed_messages(text: str) -> list[Message] | None:
    """Parse a JSON list of messages; return None for other text, such as a reply that is a list of boxes.

    Raise DataError if an item looks like a message but has no role.
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
            f"a JSON text lists messages, but not all have a role: {faulty!r:.200}; every message must have role and content"
        )
    return None


def read_conversation(
    row: Mapping[str, Any], column: str, prompt: list[Message], *, is_implicit: bool = False
) -> list[Message]:
    """Return the prompt followed by the reply in this column, or the column's complete conversation.

    If `is_implicit`, `prompt` was taken from the chosen conversation, so the column's conversation must start with it.
    """
    messages = to_messages(row[column], column, "assistant")
    if not messages:
        raise DataError(f"field {column!r}: the list is empty; it must have a reply")
    if messages[0]["role"] == "tool":
        raise DataError(
            f"field {column!r} starts with a tool's message; move it to the prompt, or write the whole conversation"
        )
    if messages[0]["role"] != "assistant":
        if is_implicit:
            check_same_prompt(messages, column, prompt)
        return merge_prompt(messages, column, prompt)
    if prompt and prompt[-1]["role"] == "assistant":
        prompt = prompt[:-1] if get_role_and_text(prompt[-1]) == get_role_and_text(messages[-1]) else prompt
    if not prompt:
        raise DataError(
            f"field {column!r} has only a reply, and the row has no prompt; add the column 'prompt', or put complete "
            "conversations into 'chosen' and 'rejected'"
        )
    return [*prompt, *messages]


def check_same_prompt(messages: list[Message], column: str, prompt: list[Message]) -> None:
    """Raise DataError if a conversation differs from the prompt before its last reply. System messages are not compared."""
    texts, others = (
        [get_role_and_text(message) for message in conversation if message["role"] != "system"]
        for conversation in (messages, prompt)
    )
    for number, (text, other) in enumerate(zip(texts, others, strict=False), start=1):
        if text != other:
            raise DataError(
                f"field {column!r} and the chosen conversation differ from message {number} on ({text[1]!r:.100} and "
                f"{other[1]!r:.100}); only the last reply may differ"
            )


def merge_prompt(messages: list[Message], column: str, prompt: list[Message]) -> list[Message]:
    """Add the row's system message to a complete conversation.

    Raise DataError if the conversation lacks a message of the prompt.
    """
    if prompt and prompt[0]["role"] == "system" and messages[0]["role"] != "system":
        messages = [prompt[0], *messages]
    existing_messages = [get_role_and_text(message) for message in messages]
    required = prompt[:-1] if prompt and prompt[-1]["role"] == "assistant" else prompt
    for role, text in map(get_role_and_text, required):
        if text and (role, text) not in existing_messages:
            raise DataError(
                f"field {column!r} is a complete conversation, but lacks the {role} message of the row's other columns, "
                f"{text!r:.200}; remove one of the two, or make them the same"
            )
    return messages


def get_role_and_text(message: Message) -> tuple[str, str]:
    """Return a message's role and its text without tags such as `<image>`."""
    return message["role"], MARK.sub("", join_text(message)).strip()


def flatten_openai_preference(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Convert OpenAI's preference rows (`input`, `preferred_output`, `non_preferred_output`) to `chosen` and `rejected`."""
    if not isinstance(row.get("input"), dict) or "preferred_output" not in row:
        return row
    rest = {
        key: value for key, value in row.items() if key not in ("input", "preferred_output", "non_preferred_output")
    }
    replies = {"chosen": row["preferred_output"], "rejected": row.get("non_preferred_output")}
    settings = {key: value for key, value in row["input"].items() if key in ("messages", "tools")}
    return {**rest, **settings, **replies}
