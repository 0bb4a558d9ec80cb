"""Functions that detect the format of rows from their columns and convert the rows to `Sample`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dsreason.data.formats import answers, choices, media_columns, preferences, refused
from dsreason.data.formats.row_formats import (
    FORMATS,
    LISTS,
    QUESTIONS,
    SYSTEMS,
    UNPAIRED,
    Conversation,
    Row,
    add_system,
    find_format,
)
from dsreason.data.formats.turns import put_reasoning, read_messages, read_tools
from dsreason.data.messages import join_text
from dsreason.data.types import Message, Sample
from dsreason.errors import DataError

REASONING_COLUMNS = ("reasoning_content", "reasoning", "thinking", "think", "cot")
"""Columns that may contain the reasoning that precedes the reply to a question, an instruction or a prompt."""
CONVERSATION_COLUMNS = {
    *LISTS,
    *QUESTIONS,
    *preferences.COLUMNS,
    "prompt",
    "completion",
    "instruction",
    "input",
    "output",
    "query",
    "response",
    "history",
    "choices",
    "options",
    "context",
    "passage",
    "paragraph",
    "background",
    "article",
    "hint",
    "dialog",
    "dialogue",
    "turns",
    *SYSTEMS,
    *media_columns.COLUMNS,
}
"""Columns that contain a part of the conversation in at least one format."""


def read_row(row: Any, name: str | None = None) -> Sample:
    """Convert a row in any format to a sample.

    `name` selects the format, and columns of other formats are then kept in `sample.meta`. If `name` is None, the format is
    detected, and an unused column that another format would read is an error.

    Raises:
        DataError: the row has no known format, is contradictory, or is incomplete.
    """
    if not isinstance(row, dict):
        raise DataError(f"each row must be an object with fields; got {row!r:.100}")
    row = preferences.flatten_openai_preference(row)
    refused.check_columns(row)
    media_columns.check_rejected(row)
    if name is None:
        refused.check_case(row, {*CONVERSATION_COLUMNS, *answers.COLUMNS, *refused.COLUMNS, "tools"})
    form = find_format(row) if name is None else next(form for form in FORMATS if form.name == name)
    if not form.find_columns(row):
        raise DataError(
            f"the columns {', '.join(map(str, row))} do not match the format {form.name} ({form.description}); rename "
            'them with data.columns, or set data.adapter = "auto"'
        )
    if form.name == "conversation" and isinstance(row.get("label"), bool):
        raise DataError(UNPAIRED)
    conversation = form.read(row)
    add_system(conversation, row)
    if conversation.options is None:
        conversation.options, columns = choices.read_options_of_prompt(row, conversation.messages)
        conversation.columns |= columns
    messages, columns = media_columns.place_media(conversation.messages, row)
    rejected = None
    if conversation.rejected is not None:
        rejected, _ = media_columns.place_media(conversation.rejected, row)
    accepted, answer_column = answers.read_answers(row)
    accepted = [conversation.labels.get(text, text) for text in accepted]
    if accepted and messages and messages[-1]["role"] != "assistant":
        messages = [*messages, {"role": "assistant", "content": accepted[0]}]
    check_questions(messages)
    answer = accepted[0] if accepted else get_last_reply(messages)
    if form.name in ("question", "instruction", "prompt"):
        columns |= add_reasoning(messages, row)
    used_columns = (
        conversation.columns
        | columns
        | {"id", "tools", "functions"}
        | ({answer_column} if answer_column == "answer" else set())
    )
    unused_fields = {column: value for column, value in row.items() if column not in used_columns}
    meta = {column: value for column, value in unused_fields.items() if value or column not in CONVERSATION_COLUMNS}
    if name is None:
        check_unused(meta, conversation)
        media_columns.check_no_unused_media(meta, messages)
    return Sample(
        id="" if row.get("id") is None else str(row["id"]),
        messages=messages,
        answer=answer,
        other_answers=tuple(accepted[1:]),
        has_text_prompt=isinstance(row.get("prompt"), str),
        options=conversation.options,
        meta=meta,
        rejected=rejected,
        tools=read_tools(row.get("tools") or row.get("functions")),
    )


def add_reasoning(messages: list[Message], row: Row) -> set[str]:
    """Insert the reasoning from one of the row's columns before the reply; return a set with that column, empty without one."""
    column = next((column for column in REASONING_COLUMNS if not refused.is_blank(row.get(column))), None)
    if column is None and str(row.get("process")).lstrip().startswith("<think>"):  # Video-R1
        column = "process"
    if column is None or not messages or messages[-1]["role"] != "assistant":
        return set()
    reply = put_reasoning(row[column], join_text(messages[-1]), f"field {column!r}")
    messages[-1] = {**messages[-1], "content": reply}
    return {column}


def check_questions(messages: Sequence[Message]) -> None:
    """Raise DataError if a user message has neither text nor media."""
    for number, message in enumerate(messages):
        content = message["content"]
        if message["role"] == "user" and (not content or (isinstance(content, str) and not content.strip())):
            raise DataError(f"message {number}: the user's message is empty; add a text or a media item")


def check_unused(meta: Mapping[str, Any], conversation: Conversation) -> None:
    """Raise DataError if an unused column that other formats would read has content that is not in the conversation."""
    texts = {join_text(message).strip() for message in conversation.messages + (conversation.rejected or [])}
    for column in CONVERSATION_COLUMNS & meta.keys():
        value = meta[column]
        if not value or (isinstance(value, str) and value.strip() in texts):
            continue
        if not isinstance(value, str) and is_repeated(value, column, texts):
            continue
        raise DataError(
            f"the column {column!r} also holds a part of a conversation; remove it, or set data.adapter to auto:FORMAT, with one "
            f"of {', '.join(form.name for form in FORMATS)}, to keep it only for rewards"
        )


def is_repeated(value: Any, column: str, texts: set[str]) -> bool:
    try:
        messages = read_messages(value, column)
    except DataError:
        return False
    return all(join_text(message).strip() in texts for message in messages)


def get_last_reply(messages: Sequence[Message]) -> str | None:
    """Return the last message's text as the reference answer; None if it is not an assistant message."""
    last = messages[-1] if messages else None
    return join_text(last) if last is not None and last["role"] == "assistant" else None
