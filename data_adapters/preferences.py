"""Preferences as Hugging Face data sets have them: `prompt`, `chosen` and `rejected`, with `images` and `videos` beside.

    {"id": "7", "prompt": "Which way does it move?", "chosen": "left", "rejected": "right", "videos": ["clips/7.mp4"]}

Each is a text or messages (a list, or JSON text of one); `chosen` and `rejected` may also be whole conversations with a common
beginning, which need no `prompt`, and hold it if there is one. `images` and `videos` (`image`, `video`) hold one
medium or a list: paths, relative ones below `data.media_path`, or Hugging Face images (their bytes). A part
`{"type": "image"}` of the prompt shows the next of them; where the prompt has no such parts, all of them stand before the
first text of the user. A question may be called `question`, and have `system` beside it. Reference log-probabilities may be
there as `ref_chosen_logprob` and `ref_rejected_logprob`.
"""

from __future__ import annotations

import json
import re
from typing import Any

from data_adapters.conversations import dict_parts, media_in_columns, parse, text_of, with_media
from dsreason.data.rows import optional_text, text_field
from dsreason.data.types import Message, Sample
from dsreason.errors import DataError

KINDS = ("image", "video")
MARK = re.compile("<(image|video)>")
OF_MESSAGES = {"role", "content", "from", "value"}
"""Keys of messages, in the forms that data sets have."""
COLUMNS = {"id", "prompt", "question", "system", "chosen", "rejected", "answer", "image", "images", "video", "videos"}


def to_sample(row: dict[str, Any]) -> Sample:
    prompt = prompt_of(row)
    chosen, rejected = (conversation(row, field, prompt) for field in ("chosen", "rejected"))
    answer = optional_text(row, "answer") or text_of(chosen[-1].get("content"))
    return Sample(
        id=str(row.get("id", "")),
        messages=shown(chosen, row, "chosen"),
        answer=answer,
        meta={name: value for name, value in row.items() if name not in COLUMNS},
        rejected=shown(rejected, row, "rejected"),
    )


def prompt_of(row: dict[str, Any]) -> list[Message]:
    """Of the column `prompt` or `question`; empty if the row has neither."""
    field = "prompt" if row.get("prompt") is not None else "question"
    given = as_messages(row.get(field), field)
    messages: list[Message] = [{"role": "user", "content": given}] if isinstance(given, str) else given
    system = optional_text(row, "system")
    return messages if system is None else [{"role": "system", "content": system}, *messages]


def as_messages(given: Any, field: str) -> str | list[Message]:
    """A text as it is, messages without the columns that Arrow fills in; JSON text of messages counts as messages."""
    if isinstance(given, str):
        listed = listed_messages(given)
        if listed is None:
            return given
        given = listed
    messages = parse([] if given is None else given, field)
    return [{key: value for key, value in message.items() if value is not None} for message in messages]


def listed_messages(text: str) -> list[Message] | None:
    """The messages that a JSON text lists; None of one that lists other things, as an answer may list boxes.

    DataError if they look like messages and have no role.
    """
    if not text.lstrip().startswith("["):
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not found or not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        return None
    if all("role" in one for one in found):
        return found
    if odd := next((one for one in found if OF_MESSAGES & {str(key).lower() for key in one}), None):
        raise DataError(
            f"a JSON text lists messages, and not all have a role: {odd!r:.200}; give each role and content"
        )
    return None


def conversation(row: dict[str, Any], field: str, prompt: list[Message]) -> list[Message]:
    """The prompt with the answer in this column, or the whole conversation that the column has."""
    if row[field] is None:
        raise DataError(f"field {field!r} is null; it must be a text or messages")
    given = as_messages(row[field], field)
    if isinstance(given, str):
        given = [{"role": "assistant", "content": text_field(row, field)}]
    if not given:
        raise DataError(f"field {field!r}: the list is empty; it must have an answer")
    if given[0].get("role") != "assistant":
        return whole_conversation(given, field, prompt)
    if not prompt:
        raise DataError(
            f"field {field!r} has an answer only, and the row has no prompt; add the column 'prompt', or give whole "
            "conversations in 'chosen' and 'rejected'"
        )
    return [*prompt, *given]


def whole_conversation(given: list[Message], field: str, prompt: list[Message]) -> list[Message]:
    """With the system message that stands beside. DataError if the row's prompt is another one."""
    if given[0].get("role") not in ("system", "user"):
        return given  # its role is refused with those of all messages
    if prompt and prompt[0].get("role") == "system" and given[0]["role"] != "system":
        given = [prompt[0], *given]
    there = [plain(message) for message in given]
    for asked in map(plain, prompt):
        if asked[1] and asked not in there:
            raise DataError(
                f"field {field!r} is a whole conversation without the {asked[0]} message beside it, {asked[1]!r:.200}; give "
                "one of the two, or make them the same"
            )
    return given


def plain(message: Message) -> tuple[Any, str]:
    """Role and text, without marks such as `<image>`."""
    return message.get("role"), MARK.sub("", text_of(message.get("content") or "")).strip()


def shown(messages: list[Message], row: dict[str, Any], field: str) -> list[Message]:
    """With the media of the row's columns, which all must be shown."""
    waiting = {kind: media_in_columns(row, kind) for kind in KINDS}
    has_places = any(part.get("type") in KINDS for message in messages for part in dict_parts(message))
    messages = [with_media(message, waiting) for message in messages]
    if not has_places:
        return with_media_first(messages, [{"type": kind, kind: medium} for kind in KINDS for medium in waiting[kind]])
    for kind, left in waiting.items():
        if left:
            raise DataError(
                f"field {field!r}: {len(left)} of the row's {kind}s are not shown; give each a part of type {kind!r} in the "
                "prompt, or none at all"
            )
    return messages


def with_media_first(messages: list[Message], media: list[dict[str, Any]]) -> list[Message]:
    """With the media before the text of the first user message."""
    first = next((i for i, message in enumerate(messages) if message.get("role") == "user"), None)
    if not media or first is None:
        return messages
    content = messages[first].get("content")
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else list(content or ())
    return [*messages[:first], {**messages[first], "content": [*media, *parts]}, *messages[first + 1 :]]
