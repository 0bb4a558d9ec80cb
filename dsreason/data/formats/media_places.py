"""Positions of media in messages: at tags, in parts without a file, or before the first question."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dsreason.data.types import TOKEN_TYPES, MediaKind, Message
from dsreason.errors import DataError
from dsreason.media.frames import TIMES
from dsreason.media.vision import PART_SETTINGS

TAG = re.compile(
    r"\n?(?:<\|?(?P<kind>image|video)(?:[ _]?(?P<number>\d+))?\|?>|<(?P<name>img|vid)>(?P<file>[^<>\n]+)</(?P=name)>)\n?"
)
"""Pattern for media tags: `<image>`, `<image 2>`, `<|image_2|>` or `<img>a.png</img>`, including adjacent line breaks."""
PLACEHOLDER = re.compile(
    r"<\s*/?(?:image|img|im|video|vid)(?:[ _-]?(?:placeholder|here|context|token|soft[ _-]?token|pad|patch|start|\d+))?\s*/?>"
    r"|<start_of_image>|<(?:image|video|img)[^<>\n]{0,3}>|\[(?:image|img|video)(?:[ _-]?\d+)?\]|\{(?:image|video)\}",
    re.IGNORECASE,
)
"""Pattern for other models' image and video tags, such as `<ImageHere>`, `<IMG_CONTEXT>`, `[IMG]` or `{image}`."""
UNFILLED_TAGS = {"<ref-object>": "</ref-object>", "<bbox>": "</bbox>", "<audio>": "</audio>"}
"""Tags that ms-swift fills from columns unknown to dsreason → end tag, whose presence shows that the tag is ordinary markup."""
NAMES: dict[str, MediaKind] = {"image": "image", "video": "video", "img": "image", "vid": "video"}


@dataclass
class RowMedia:
    """The media from a row's columns that no message uses yet, and the names of the columns."""

    waiting: dict[MediaKind, list[dict[str, Any]]]
    columns: set[str] = field(default_factory=set)
    labels: list[str] = field(default_factory=list)
    """Camera names, one per media item, images first; empty if the columns name no cameras."""

    has_system_tags: bool = True
    """Whether tags in a system message stand for media; they are ordinary text if the row has no media."""

    def take(self, kind: MediaKind) -> dict[str, Any]:
        return self.waiting[kind].pop(0)


def check_parts(messages: Sequence[Message]) -> None:
    """Raise DataError if a media part lacks a file but has unknown keys, one of which may name the file."""
    for number, message in enumerate(messages):
        for part in list_parts(message):
            unknown = part.keys() - PART_SETTINGS - {*TIMES, "type", "index"}
            if is_empty(part) and unknown:
                kind = part["type"]
                raise DataError(
                    f"{describe_message(messages, number)}: a part of type {kind!r} has the unknown keys "
                    f"{', '.join(sorted(unknown))} and no file; the file is read from the keys {kind}, {kind}_url, url, path "
                    "and base64"
                )


def describe_message(messages: Sequence[Message], number: int) -> str:
    """Name a message by its role, such as "user message 2": indices are unreliable because a `system` column shifts them."""
    role = messages[number]["role"]
    return f"{role} message {sum(message['role'] == role for message in messages[: number + 1])}"


def check_replies(messages: Sequence[Message]) -> None:
    """Raise DataError if a reply contains a media tag, or if any message contains an unfilled ms-swift tag."""
    for number, message in enumerate(messages):
        texts = [part["text"] for part in to_parts(message) if part["type"] == "text"]
        tag = next((tag for text in texts for tag in TAG.finditer(text) if tag["kind"]), None)
        if message["role"] == "assistant" and tag is not None:
            raise DataError(
                f"{describe_message(messages, number)}: the reply has the tag {tag[0].strip()}, but replies cannot have media; "
                "remove the tag, or move it to a user message"
            )
        for tag_text, end in UNFILLED_TAGS.items():
            if any(tag_text in text and end not in text for text in texts):
                raise DataError(
                    f"{describe_message(messages, number)}: the text has the tag {tag_text}, which ms-swift replaces by the "
                    f"content of a column; write that content in its place"
                )


def check_placeholders(messages: Sequence[Message]) -> None:
    """Raise DataError if a message contains another model's media placeholder. Call it for rows whose media have no tags."""
    for number, message in enumerate(messages):
        texts = [
            part["text"] for part in to_parts(message) if part["type"] == "text" and message["role"] != "assistant"
        ]
        tag = next((tag for text in texts for tag in PLACEHOLDER.finditer(text)), None)
        if tag is not None:
            raise DataError(
                f"{describe_message(messages, number)}: the text has {tag[0]}, but media are only shown at the tags <image> and "
                f"<video>; replace it, or, if it is text, write one tag per image or video where it is to be shown"
            )


def describe_tags(kind: MediaKind, num_media: int) -> str:
    """Describe how many tags a row may have."""
    if num_media == 0:
        return f"add a column {kind!r} with the files, or, if the tag is text, such as HTML, write it with a space: <{kind} >"
    return f"use one tag per {kind}, or no tag at all to show all media first"


def is_repeated(messages: Sequence[Message], media: RowMedia) -> bool:
    """Return whether the messages already name the columns' files; if so, add the columns' settings to their parts.

    Raises:
        DataError: the messages lack some of the columns' files, or a setting has two different values.
    """
    media_parts = list_media(messages)
    if not media_parts:
        return False
    if media.labels:
        raise DataError(
            f"the messages list their media, so the camera names ({', '.join(media.labels):.100}) have no place; write them "
            "into the messages"
        )
    for kind, parts in media.waiting.items():
        for part in parts:
            places = [place for place in media_parts if place.get(kind) == part[kind]]
            if not places:
                raise DataError(
                    f"the messages list media, but some media from the columns {', '.join(sorted(media.columns))} are missing "
                    f"from them (for example, {part[kind]!r:.200}); add a part for each, or remove the columns"
                )
            for place in places:
                if conflict := next((key for key in part if place.get(key, part[key]) != part[key]), None):
                    raise DataError(
                        f"{conflict!r} is {part[conflict]!r:.100} in the columns, but {place[conflict]!r:.100} in the messages"
                    )
                place |= part
    return True


def list_media(messages: Sequence[Message]) -> list[dict[str, Any]]:
    return [part for message in messages for part in list_parts(message) if part["type"] in TOKEN_TYPES]


def list_parts(message: Message) -> list[dict[str, Any]]:
    return message["content"] if isinstance(message["content"], list) else []


def count_slots(messages: Sequence[Message], media: RowMedia) -> dict[MediaKind, int]:
    """Count, by kind, the media items to which tags and empty parts refer; equal numbers refer to the same item."""
    counts: dict[MediaKind, int] = dict.fromkeys(TOKEN_TYPES, 0)
    numbers: dict[MediaKind, set[int]] = {kind: set() for kind in TOKEN_TYPES}
    for message in messages:
        for part in list_parts(message):
            if is_empty(part) and "index" in part:
                numbers[part["type"]].add(read_index(part) + 1)
            elif is_empty(part):
                counts[part["type"]] += 1
        for tag in iter_tags(message, media):
            if tag["number"]:
                numbers[NAMES[tag["kind"]]].add(int(tag["number"]))
            elif tag["kind"]:
                counts[NAMES[tag["kind"]]] += 1
    for kind, tag_numbers in numbers.items():
        if tag_numbers and (counts[kind] or tag_numbers != set(range(1, len(tag_numbers) + 1))):
            raise DataError(
                f"the <{kind}> tags must either all have numbers, from 1 on, or none; got {sorted(tag_numbers)}"
                + " (a part's index is one less)" * any("index" in part for part in iter_empty(messages))
            )
        counts[kind] += len(tag_numbers)
    return counts


def iter_empty(messages: Sequence[Message]) -> Iterator[dict[str, Any]]:
    yield from (part for message in messages for part in list_parts(message) if is_empty(part))


def read_index(part: Mapping[str, Any]) -> int:
    """Return the index of the media item to which an empty part refers."""
    index = part["index"]
    if type(index) is not int or index < 0:
        raise DataError(
            f"the index of a part of type {part['type']!r} must be a number, 0 or greater; got {index!r:.100}"
        )
    return index


def has_tags(message: Message, media: RowMedia) -> bool:
    """Return whether tags in this message stand for media; in replies, they are ordinary text."""
    return message["role"] in ("user", "tool") or (message["role"] == "system" and media.has_system_tags)


def to_video_tags(message: Message) -> Message:
    """Replace `<image>` with `<video>`, except in the assistant's messages."""
    if message["role"] == "assistant":
        return message
    parts = [
        {**part, "text": TAG.sub(lambda tag: tag[0].replace("image", "video"), part["text"])}
        if part["type"] == "text"
        else part
        for part in to_parts(message)
    ]
    return {**message, "content": parts}


def iter_tags(message: Message, media: RowMedia) -> Iterator[re.Match[str]]:
    """Yield the tags in a message's text that stand for media."""
    if has_tags(message, media):
        for part in to_parts(message):
            if part["type"] == "text":
                yield from TAG.finditer(part["text"])


def to_parts(message: Message) -> list[dict[str, Any]]:
    content = message["content"]
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def fill_message(message: Message, media: RowMedia, numbered: dict[MediaKind, list[dict[str, Any]]]) -> Message:
    """Replace a message's tags and empty parts with media; numbered tags and parts take theirs from `numbered`."""
    if not any(is_empty(part) for part in list_parts(message)) and not any(iter_tags(message, media)):
        return message
    filled: list[dict[str, Any]] = []
    for part in to_parts(message):
        if is_empty(part):
            kind = part["type"]
            file = numbered[kind][read_index(part)] if "index" in part else media.take(kind)
            filled.append({**{key: value for key, value in part.items() if key != "index"}, **file})
        elif part["type"] != "text" or not has_tags(message, media):
            filled.append(part)
        else:
            filled += split_at_tags(part["text"], media, numbered)
    return {**message, "content": filled}


def is_empty(part: Mapping[str, Any]) -> bool:
    return part["type"] in TOKEN_TYPES and part["type"] not in part


def split_at_tags(text: str, media: RowMedia, numbered: dict[MediaKind, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Split a text at its tags, and replace each tag with its media item."""
    parts: list[dict[str, Any]] = []
    start = 0
    for tag in TAG.finditer(text):
        parts.append({"type": "text", "text": text[start : tag.start()]})
        start = tag.end()
        kind = NAMES[tag["kind"] or tag["name"]]
        if tag["file"]:
            parts.append({"type": kind, kind: tag["file"]})
        else:
            parts.append({**(numbered[kind][int(tag["number"]) - 1] if tag["number"] else media.take(kind))})
    parts.append({"type": "text", "text": text[start:]})
    return [part for part in parts if part.get("text") != ""]


def label_parts(media: RowMedia) -> list[dict[str, Any]]:
    """Return the media as parts, each preceded by the name of its camera if the columns have names."""
    parts = [part for kind in TOKEN_TYPES for part in media.waiting[kind]]
    if not media.labels:
        return parts
    labelled: list[dict[str, Any]] = []
    for label, part in zip(media.labels, parts, strict=True):
        labelled += [{"type": "text", "text": f"{label}: "}, part, {"type": "text", "text": "\n"}]
    return labelled


def put_first(messages: list[Message], media: list[dict[str, Any]]) -> list[Message]:
    """Insert the media before the text of the first user message."""
    if not media:
        return messages
    first = next((i for i, message in enumerate(messages) if message["role"] == "user"), None)
    if first is None:
        raise DataError("the row has media, but no user message that could show them; add one")
    parts = [part for part in to_parts(messages[first]) if part.get("text") != ""]
    return [*messages[:first], {**messages[first], "content": [*media, *parts]}, *messages[first + 1 :]]
