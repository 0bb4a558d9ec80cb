"""Rows of a data set as the model will see them, for `dsreason data show`: as JSON, or as coloured text."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from rich.console import Group
from rich.panel import Panel
from rich.text import Text

from dsreason.data.chat import Encoder
from dsreason.data.formats.media_places import to_parts
from dsreason.data.messages import join_text, list_media_parts, prompt_messages
from dsreason.data.sources import DataSource
from dsreason.data.types import TOKEN_TYPES, Message, Sample
from dsreason.errors import DataError
from dsreason.media import images, videos
from dsreason.media.frames import describe_video_path, is_frame_list, read_frame_list
from dsreason.secrets import hide_payloads

Purpose = Literal["sft", "grpo", "dpo"]
ROLE_STYLES = {"system": "magenta", "user": "cyan", "assistant": "green", "tool": "yellow"}
TRAINED_STYLE = "bold green"
Split = tuple[list[Message], list[Message], list[Message]]
"""Messages of the conversation (or prompt), the chosen reply and the rejected reply."""


def split_for(sample: Sample, purpose: Purpose) -> Split:
    """Split a sample into the messages that a trainer uses.

    Raises:
        DataError: the trainer cannot use the sample.
    """
    if purpose == "grpo":
        return [{**message, "trained": False} for message in prompt_messages(sample)], [], []
    if purpose == "dpo":
        from dsreason.train.dpo.pairs import split_conversations

        prompt, better, worse = split_conversations(sample)
        start = len(prompt.messages)
        for name, reply in (("chosen", better), ("rejected", worse)):
            check_replies(reply.messages[start:], name)
        untrained_prompt = [{**message, "trained": False} for message in prompt.messages]
        return untrained_prompt, better.messages[start:], worse.messages[start:]
    check_replies(sample.messages, "messages")
    if not any(is_trained(message) for message in sample.messages):
        raise DataError(f"the sample has no reply to train on: {describe_untrained(sample)}")
    return sample.messages, [], []


def describe_untrained(sample: Sample) -> str:
    """Return the reason why a sample has no reply to train on."""
    if any(message["role"] == "assistant" for message in sample.messages):
        return 'every reply is in the prompt or has "loss": false'
    unread = f"; the row's other columns are {', '.join(sample.meta)}" if sample.meta else ""
    return (
        "the row has no reply, because columns such as answer, completion, response and output are missing or empty"
        + unread
    )


def check_replies(messages: list[Message], name: str) -> None:
    for number, message in enumerate(messages):
        if message["role"] == "assistant" and not join_text(message).strip() and not message.get("tool_calls"):
            raise DataError(f"{name}[{number}]: the assistant's reply is empty; add a text, or remove the row")


def check_conversation(messages: list[Message]) -> None:
    """Raise DataError if the conversation starts with a reply or a reply contains media; no trainer accepts either."""
    if messages and messages[0]["role"] == "assistant":
        raise DataError("the first message must be from the user or the system")
    for number, message in enumerate(messages):
        if message["role"] == "assistant" and list_media_parts([message]):
            raise DataError(
                f"message {number}: an assistant message may contain only text; remove its images and videos"
            )


def probe_medium(part: dict[str, Any]) -> None:
    """Raise DataError if an image cannot be decoded, or a video cannot be opened."""
    if part["type"] == "image":
        images.load_image(part["image"])
    else:
        videos.probe_video(part["video"])


def is_trained(message: Message) -> bool:
    return message["role"] == "assistant" and bool(message.get("trained", True))


def show_row(
    source: DataSource, index: int, purpose: Purpose, encoder: Encoder | None
) -> tuple[Sample, Split, dict[str, int]]:
    """Read a row, split it, and count its tokens if there is an encoder. Raise DataError if the row is unusable."""
    sample = source.sample(index)
    try:
        split = split_for(sample, purpose)
        for conversation in (sample.messages, sample.rejected or []):
            check_conversation(conversation)
        for part in list_media_parts([*sample.messages, *(sample.rejected or [])]):
            probe_medium(part)
        return sample, split, {} if encoder is None else count_tokens(encoder, sample, purpose)
    except DataError as error:
        name = f"sample {sample.id!r}"
        location = source.rows.describe_location(index) + f" ({name})" * bool(sample.id)
        raise DataError(f"{location}: {str(error).removeprefix(f'{name}: ')}") from error


def count_tokens(encoder: Encoder, sample: Sample, purpose: Purpose) -> dict[str, int]:
    """Count the tokens in a prompt (GRPO) or a conversation (for DPO, the one with the chosen reply): kind → count."""
    encoded = encoder.encode_prompt(sample).encoded if purpose == "grpo" else encoder.encode(sample)
    counts = {"text": int((encoded.mm_token_type_ids == 0).sum())}
    counts |= {kind: int((encoded.mm_token_type_ids == value).sum()) for kind, value in TOKEN_TYPES.items()}
    return counts | {"trained": int(encoded.loss_mask.sum())}


# ---------------------------------------------------------------- JSON


def iter_json(
    source: DataSource, rows: range, purpose: Purpose, encoder: Encoder | None = None
) -> Iterator[dict[str, Any]]:
    """Yield one object per row; an unusable row becomes `{"id": …, "error": reason}`."""
    for index in rows:
        try:
            sample, split, tokens = show_row(source, index, purpose, encoder)
        except DataError as error:
            yield {"id": read_id(source, index), "error": hide_payloads(str(error))}
            continue
        messages, chosen, rejected = ([to_json(message, source) for message in part] for part in split)
        answers = [] if sample.answer is None else [sample.answer, *sample.other_answers]
        yield {
            "id": hide_payloads(sample.id),
            "messages": messages,
            "answer": answers if len(answers) > 1 else sample.answer,
            "options": sample.options,
            "chosen": chosen or None,
            "rejected": rejected or None,
            "meta": {name: shorten_bytes(value) for name, value in sample.meta.items()},
            "tools": sample.tools,
        } | ({"tokens": tokens} if tokens else {})


def read_id(source: DataSource, index: int) -> str | None:
    try:
        row = source.rows[index]
    except DataError:
        return None
    return hide_payloads(str(row["id"])) if isinstance(row, dict) and row.get("id") is not None else None


def to_json(message: Message, source: DataSource) -> dict[str, Any]:
    parts = [to_json_part(part, source) for part in list_parts(message) if part.get("text") != ""]
    known: dict[str, Any] = {key: message[key] for key in ("name", "tool_calls", "tool_call_id") if key in message}
    return {"role": message["role"], "trained": is_trained(message), "parts": parts, **known}


def format_calls(message: Message) -> list[str]:
    """Return a message's tool calls as text; the chat template determines the exact form that the model sees."""
    functions = [call["function"] for call in message.get("tool_calls", ())]
    return [f"<tool_call>{function['name']}({function['arguments']})</tool_call>" for function in functions]


def to_json_part(part: dict[str, Any], source: DataSource) -> dict[str, Any]:
    if part["type"] == "text":
        return part
    path = part[part["type"]]
    if not is_frame_list(path):
        return {"type": part["type"], "path": to_relative(path, source)}
    frames = read_frame_list(path)
    paths = [to_relative(frame, source) for frame in frames.paths]
    return {"type": part["type"], "frames": paths, "fps": frames.fps, **frames.times}


def to_relative(path: str, source: DataSource) -> str:
    """Return the path relative to the annotations' folder, or unchanged if it is outside that folder."""
    root = source.media_root
    if isinstance(root, Path) and Path(path).is_relative_to(root):
        return os.path.relpath(path, root)
    return path


def shorten_bytes(value: Any) -> Any:
    """Replace what JSON cannot represent (byte strings by their length, NaN by None), and leave out the content of URIs."""
    if isinstance(value, bytes):
        return f"{len(value)} bytes"
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, str):
        return hide_payloads(value)
    if isinstance(value, dict):
        return {name: shorten_bytes(item) for name, item in value.items()}
    return [shorten_bytes(item) for item in value] if isinstance(value, list) else value


# ---------------------------------------------------------------- text


def render_row(
    sample: Sample, split: Split, tokens: Mapping[str, int], title: str, describe: Callable[[dict[str, Any]], str]
) -> Panel:
    """Render a row for a terminal, with the text to train on in bold and green.

    `describe` returns the line to show for a media item.
    """
    lines: list[Text] = []
    for name, messages in zip(("", "chosen", "rejected"), split, strict=True):
        for message in messages:
            head = f"{name or message['role']}{' (trained)' if is_trained(message) else ''}"
            lines.append(Text(head, style=ROLE_STYLES[message["role"]]))
            lines += [render_part(part, is_trained(message), describe) for part in list_parts(message)]
    facts = {
        "answer": " | ".join(filter(None, [sample.answer, *sample.other_answers])),
        "options": sample.options,
        "meta": shorten_bytes(sample.meta),
    }
    lines += [Text(f"{name}: {str(value):.500}", style="dim") for name, value in facts.items() if value]
    if tokens:
        lines.append(Text("tokens: " + ", ".join(f"{count} {kind}" for kind, count in tokens.items()), style="dim"))
    return Panel(Group(*lines), title=Text(title), title_align="left")


def describe_medium(part: dict[str, Any], source: DataSource) -> str:
    """Describe an image or a video in one line: its path, its size, and the number and rate of its frames."""
    path = part[part["type"]]
    if part["type"] == "image":
        height, width = images.probe_image(path)
        return f"image {to_relative(path, source)} ({width}x{height})"
    info = videos.probe_video(path)
    name = to_relative(describe_video_path(path), source)
    spacing = f", from {info.timestamps[0]:g} to {info.timestamps[-1]:g} s" if info.timestamps else ""
    return f"video {name} ({info.width}x{info.height}, {info.num_frames} frames, {info.fps:g} per second{spacing})"


def list_parts(message: Message) -> list[dict[str, Any]]:
    """Return a message's parts, followed by its tool calls as text parts."""
    return [*to_parts(message), *({"type": "text", "text": text} for text in format_calls(message))]


def render_part(part: dict[str, Any], trained: bool, describe: Callable[[dict[str, Any]], str]) -> Text:
    if part["type"] != "text":
        return Text("  " + describe(part), style="blue")
    return Text("  " + part["text"].replace("\n", "\n  "), style=TRAINED_STYLE if trained else "")
