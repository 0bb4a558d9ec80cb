"""A row's messages in all common notations: roles, text, media parts, tool calls, and flags for trained replies."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from dsreason.data.formats.refused import check_loss_keys, check_message_keys
from dsreason.data.messages import join_text
from dsreason.data.types import Message
from dsreason.errors import DataError
from dsreason.problems import describe_parse_error, find_nearest

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "ai": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "tool_call": "assistant",
    "tool": "tool",
    "function": "tool",
    "tool_response": "tool",
    "observation": "tool",
    "ipython": "tool",
}
"""Lower-case role name in the format of OpenAI, ShareGPT, LLaMA-Factory or ms-swift → role."""
ROLE_KEYS, CONTENT_KEYS = ("role", "from"), ("content", "value")
"""Keys for a message's role, and for its text or parts."""
PAIR_KEYS = {
    "system": "system",
    "human": "user",
    "user": "user",
    "input": "user",
    "assistant": "assistant",
    "output": "assistant",
}
"""Key of an item that holds a question and its reply (ms-swift, XTuner) → role."""
CALL_ROLES = ("function_call", "tool_call")
"""Roles whose text is a tool call in JSON."""
TRAINED_KEYS = ("loss", "train", "trained", "is_trained", "training", "trainable", "loss_mask", "weight")
"""Keys that say whether to train on a reply."""
TAGGED_REASONING = re.compile(r"\s*<think>\s*(.*?)\s*</think>\s*", re.DOTALL)
PART_KINDS = {
    "image": "image",
    "image_url": "image",
    "input_image": "image",
    "video": "video",
    "video_url": "video",
    "input_video": "video",
}
"""Type of a media part → media kind."""
MEDIA_KEYS = ("image", "images", "video", "videos")
"""Keys for media that a message contains in addition to its text."""
SOURCE_KEYS = ("url", "path", "base64")
"""Additional keys under which a media part may contain its file."""


def parse_json(value: Any, column: str) -> Any:
    """Parse a value that is stored as JSON text; return other values unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise DataError(f"field {column!r}: not valid JSON: {describe_parse_error(error)}") from error


def read_messages(value: Any, column: str) -> list[Message]:
    """Read a list of messages, a single message, or the JSON text of either.

    A reply that must not be trained on gets `"trained": False`. Consecutive tool calls are merged into one message.
    """
    value = parse_json(value, column)
    turns = [value] if isinstance(value, dict) else value
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise DataError(f"field {column!r} must be a list of messages with role and content; got {value!r:.200}")
    messages: list[Message] = []
    for number, turn in split_pairs(turns):
        message = read_message(turn, f"{column}[{number}]")
        previous = messages[-1] if messages else None
        if previous is not None and is_call_only(message) and is_call_only(previous):
            if message.get("trained") != previous.get("trained"):
                raise DataError(
                    f"{column}[{number}]: either all or none of the consecutive tool calls must be trained on"
                )
            previous["tool_calls"] += message["tool_calls"]
        elif message["role"] != "system" or message["content"] != "":
            messages.append(message)
    return messages


def split_pairs(turns: list[dict[str, Any]]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield (index, message) for each turn; an item without a role may hold a question and its reply, and yields both."""
    for number, turn in enumerate(turns):
        if get_first_value(turn, *ROLE_KEYS) is not None or len(PAIR_KEYS.keys() & turn.keys()) < 2:
            yield number, turn
            continue
        settings = {key: value for key, value in turn.items() if key not in PAIR_KEYS}
        for key, role in PAIR_KEYS.items():
            if turn.get(key) is not None:
                yield number, {"role": role, "content": turn[key]} | (settings if role == "assistant" else {})


def is_call_only(message: Message) -> bool:
    return bool(message.get("tool_calls")) and not message["content"]


def read_message(turn: Mapping[str, Any], location: str) -> Message:
    check_message_keys(turn, location)
    raw_role = get_first_value(turn, *ROLE_KEYS)
    role = read_role(raw_role, location)
    raw_content = get_first_value(turn, *CONTENT_KEYS)
    if raw_role.lower() in CALL_ROLES:
        calls = read_calls(raw_content, location)
        content: str | list[dict[str, Any]] | None = ""
    else:
        calls = read_calls(get_first_value(turn, "tool_calls", "function_call"), f"{location}.tool_calls")
        content = "" if raw_content is None and calls else read_content(raw_content, location)
    if content is None:
        raise DataError(f"{location} has no content; add a string or a list of parts")
    if media := [part for column in MEDIA_KEYS for part in read_media(turn, column, location)]:
        content = [*media, *([{"type": "text", "text": content}] if isinstance(content, str) else content)]
    message: Message = {"role": role, "content": content}
    if role == "assistant":
        message["content"] = add_reasoning(turn, content, location)
        if not read_trained(turn, location):
            message["trained"] = False
    if calls:
        message["tool_calls"] = calls
    return message | {key: turn[key] for key in ("name", "tool_call_id") if turn.get(key) is not None}


def read_role(raw_role: Any, location: str) -> str:
    role = ROLES.get(raw_role.lower()) if isinstance(raw_role, str) else None
    if role is None:
        nearest = find_nearest(str(raw_role).lower(), ROLES)
        hint = f"; did you mean {nearest!r}?" if nearest else ""
        raise DataError(f"{location}: the role must be one of {', '.join(ROLES)}; got {raw_role!r:.100}{hint}")
    return role


def add_reasoning(
    turn: Mapping[str, Any], content: str | list[dict[str, Any]], location: str
) -> str | list[dict[str, Any]]:
    """Insert the reasoning from a separate key before the reply's text, in `<think>` tags."""
    reasoning = get_first_value(turn, "reasoning_content", "reasoning", "thinking")
    if not reasoning:
        return content
    return put_reasoning(reasoning, join_text({"content": content}), location)


def put_reasoning(reasoning: Any, reply: str, location: str) -> str:
    """Return the reply preceded by its reasoning in `<think>` tags, which the reasoning may already contain."""
    if not isinstance(reasoning, str):
        raise DataError(f"{location}: the reasoning must be text; got {reasoning!r:.100}")
    if "<think>" in reply:
        raise DataError(f"{location} has reasoning both in its content and in a separate key; remove one of them")
    tagged = TAGGED_REASONING.fullmatch(reasoning)
    return f"<think>\n{tagged[1] if tagged else reasoning}\n</think>\n\n{reply}"


def get_first_value(turn: Mapping[str, Any], *keys: str) -> Any:
    """Return the value of the first key whose value is not None. Arrow adds keys with null values to all messages in a table."""
    return next((value for key in keys if (value := turn.get(key)) is not None), None)


def read_media(turn: Mapping[str, Any], column: str, location: str) -> list[dict[str, Any]]:
    """Convert the media in a separate key of a message (Ollama's format) to parts."""
    value = turn.get(column)
    kind = column.removesuffix("s")
    items = value if isinstance(value, list) else [value] if value else []
    return [read_part({"type": kind, kind: item}, location) for item in items]


def read_trained(turn: Mapping[str, Any], location: str) -> bool:
    """Return whether to train on the reply. Raise DataError for weights other than 0 and 1, and for masks within the reply."""
    check_loss_keys(turn, location, TRAINED_KEYS)
    for key in TRAINED_KEYS:
        value = turn.get(key)
        if value is None:
            continue
        if value not in (0, 1):  # False == 0, True == 1
            raise DataError(f"{location}: {key!r} must be true, false, 0 or 1; got {value!r:.100}")
        if not value:
            return False
    return True


# ---------------------------------------------------------------- content


def read_content(content: Any, location: str) -> str | list[dict[str, Any]] | None:
    if content is None or isinstance(content, str):
        return content
    if isinstance(content, dict):
        content = [content]
    if not isinstance(content, list):
        raise DataError(f"{location}: the content must be a string or a list of parts; got {content!r:.200}")
    return [read_part(part, location) for part in content]


def read_part(part: Any, location: str) -> dict[str, Any]:
    """Return a part as `{"type": "text", "text": …}` or `{"type": kind, kind: file, …}`, without the key `kind` if no file."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, dict):
        raise DataError(f"{location}: each part must be an object with a type; got {part!r:.200}")
    part = {key: value for key, value in part.items() if value is not None}  # Arrow gives all parts the same keys
    raw_kind = part.pop("type", next((key for key in ("text", *PART_KINDS) if key in part), None))
    if "text" in part and part.keys() & PART_KINDS.keys():
        raise DataError(
            f"{location}: each part must have either a text or a media item; got one with {', '.join(part)}; split it"
        )
    if raw_kind in ("text", "input_text", "output_text"):
        if not isinstance(part.get("text"), str):
            raise DataError(f"{location}: each text part must have a text; got {part!r:.200}")
        check_loss_keys(part, location)
        return {"type": "text", "text": part["text"]}
    kind = PART_KINDS.get(raw_kind) if isinstance(raw_kind, str) else None
    if kind is None:
        raise DataError(f"{location}: the type of a part must be text, image or video; got {raw_kind!r:.100}")
    file = part.pop(raw_kind, part.pop(f"{kind}_url", None))
    if isinstance(file, dict) and "url" in file:
        part |= {key: value for key, value in file.items() if key != "url" and value is not None}
        file = file["url"]
    part.pop("detail", None)  # a setting for OpenAI's models
    for key in SOURCE_KEYS:
        if file is None and key in part:
            file = f"data:{kind}/unknown;base64,{part[key]}" if key == "base64" else part[key]
    if kind != raw_kind:
        part.pop(kind, None)
    if isinstance(file, list) and "sample_fps" in part:  # the key's name in qwen-vl-utils
        part.setdefault("fps", part.pop("sample_fps"))
    settings = {key: value for key, value in part.items() if key not in SOURCE_KEYS and key != "text"}
    return {"type": kind, **settings} | ({} if file is None else {kind: file})


# ---------------------------------------------------------------- tool calls


def read_calls(value: Any, location: str) -> list[dict[str, Any]]:
    """Read one or more tool calls, as objects or JSON text, with the name at the top level or in `function`."""
    if value is None or value == []:
        return []
    calls = parse_json(value, location)
    return [read_call(call, location) for call in (calls if isinstance(calls, list) else [calls])]


def read_call(call: Any, location: str) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, str):
        raise DataError(f"{location}: each tool call must have a name and arguments; got {call!r:.200}")
    arguments = function.get("arguments", function.get("parameters"))
    arguments = drop_nulls(parse_json(arguments, f"{location}: arguments of {name}")) if arguments else {}
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def read_tools(value: Any) -> list[dict[str, Any]] | None:
    """Read the column `tools`: a list of function descriptions or its JSON text; None if it is empty."""
    if not value:
        return None
    tools = parse_json(value, "tools")
    tools = [parse_json(tool, "tools") for tool in tools] if isinstance(tools, list) else tools
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise DataError(f"field 'tools' must be a list of functions; got {value!r:.200}")
    return [
        tool if "function" in tool else {"type": "function", "function": tool} for tool in drop_nulls(tools)
    ] or None


def drop_nulls(value: Any) -> Any:
    """Remove keys whose value is None. Arrow adds them to all objects in a column."""
    if isinstance(value, dict):
        return {key: drop_nulls(item) for key, item in value.items() if item is not None}
    return [drop_nulls(item) for item in value] if isinstance(value, list) else value
