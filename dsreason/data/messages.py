"""Functions that check a sample's messages and return their text and media."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from dsreason.data.types import TOKEN_TYPES, Message, Sample
from dsreason.errors import DataError
from dsreason.families import list_control_tokens
from dsreason.media.embedded import is_embedded
from dsreason.media.frames import is_frame_list, list_files, read_frame_list, write_frame_list
from dsreason.media.urls import fetch_url, is_url, mask_url

ROLES = ("system", "user", "assistant", "tool")
SURROGATE = re.compile("[\\ud800-\\udfff]")
"""Pattern of a lone surrogate (half a character): JSON allows lone surrogates, but tokenizers reject them."""


def check_characters(text: str) -> None:
    if SURROGATE.search(text):
        raise DataError(f"the text contains a lone surrogate (half a character): {text!r:.200}")


def check_messages(messages: Sequence[Message], name: str = "messages") -> None:
    """Raise DataError if the messages do not form a conversation. Media files are not opened."""
    if not messages:
        raise DataError(f"{name}: the list is empty, but a conversation needs at least one message")
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise DataError(f"{name}[{i}]: role must be one of {', '.join(ROLES)}; got {message!r:.200}")
        if not isinstance(message.get("content"), str | list):
            raise DataError(
                f"{name}[{i}].content must be a string or a list of parts; got {message.get('content')!r:.200}"
            )
        if message["role"] == "system" and i > 0:
            raise DataError(f"{name}[{i}]: only the first message may be a system message")
        for part in message["content"] if isinstance(message["content"], list) else ():
            check_part(part)


def check_part(part: Any) -> None:
    """Raise DataError if a message part is not valid text, an image or a video."""
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in ("text", *TOKEN_TYPES):
        raise DataError(f"the type of a part must be text, image or video; got {kind!r} in {part!r:.200}")
    if kind == "text":
        check_text(part.get("text"))


def check_text(text: Any) -> None:
    """Raise DataError if a text part cannot be tokenized or contains one of the model's control tokens."""
    if not isinstance(text, str):
        raise DataError(f"the text of a part must be a string; got {text!r:.200}")
    check_characters(text)
    for token in list_control_tokens():
        if token in text:
            raise DataError(
                f"the text contains the model's special token {token}, which is reserved for media parts and turns; "
                f"remove it from {text!r:.200}"
            )


def get_text(message: Message) -> str:
    """Return the message's text; several text parts are joined with line breaks."""
    content = message["content"]
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content if part["type"] == "text")


def join_text(message: Message) -> str:
    """Return the message's text as chat templates write it: several text parts are joined without a separator."""
    content = message["content"]
    if isinstance(content, str):
        return content
    return "".join(part["text"] for part in content if part["type"] == "text")


def list_media_parts(messages: Iterable[Message]) -> list[dict[str, Any]]:
    """Return the image and video parts of the messages, in order."""
    contents = [message["content"] for message in messages if not isinstance(message["content"], str)]
    return [part for content in contents for part in content if part["type"] in TOKEN_TYPES]


def list_media_paths(messages: Iterable[Message]) -> list[str]:
    return [str(part[part["type"]]) for part in list_media_parts(messages)]


def get_first_path(messages: Sequence[Message]) -> str:
    """Return the path of the first media file as written in the row; "" if the row has no media or embeds the file.

    Credentials and the query are removed from a URL.
    """
    files = [part[part["type"]] for part in list_media_parts(messages)]
    paths = files[0] if files and isinstance(files[0], list) else files
    if not paths or not isinstance(paths[0], str) or is_embedded(paths[0]):
        return ""
    return mask_url(paths[0]) if is_url(paths[0]) else paths[0]


def fetch_urls(message: Message, *, allow_private: bool) -> Message:
    """Download the media that the message references by URL; return the message with the paths of the local copies."""
    content = message["content"]
    if isinstance(content, str):
        return message
    parts = [
        part
        if part["type"] == "text"
        else {**part, part["type"]: fetch_medium(part[part["type"]], allow_private=allow_private)}
        for part in content
    ]
    return {**message, "content": parts}


def fetch_medium(path: str, *, allow_private: bool) -> str:
    """Download a media item or a video's frames if they are at URLs; return the path of the local file or of the frame list."""
    files = list_files(path)
    if not any(map(is_url, files)):
        return path
    copies = [str(fetch_url(file, allow_private=allow_private)) if is_url(file) else file for file in files]
    return str(write_frame_list(copies, read_frame_list(path).times)) if is_frame_list(path) else copies[0]


def format_shown_seconds(part: dict[str, Any]) -> str:
    """Format the clip of a video that a part selects, in seconds, such as `2.5-4`; "" if the part selects the whole video."""
    start, end = part.get("video_start") or 0, part.get("video_end")
    return f"{start}-{'' if end is None else end}" if start or end is not None else ""


def prompt_messages(sample: Sample) -> list[Message]:
    """Return the messages that form the prompt: all messages except a final assistant message."""
    last = sample.messages[-1] if sample.messages else {}
    return sample.messages[:-1] if last.get("role") == "assistant" else sample.messages
