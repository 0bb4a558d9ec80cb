"""Reading of a row: find its format by its columns, and convert it to a `Sample`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dsreason.data.formats import answers, choices, media_columns, preferences
from dsreason.data.formats.turns import read_messages, read_tools
from dsreason.data.messages import join_text
from dsreason.data.options import option_lines
from dsreason.data.rows import get_optional_text
from dsreason.data.types import Message, Sample
from dsreason.errors import DataError

Row = Mapping[str, Any]
UNPAIRED = "field 'label' marks an unpaired preference, which is not supported; make pairs of chosen and rejected"
LISTS = ("messages", "conversations", "conversation")
"""Columns with a list of messages."""
QUESTIONS = ("question", "problem")
SYSTEMS = ("system", "system_prompt", "system_message")
COMPLETIONS = ("completion", "response", "output")
REFUSED = {
    "audio": "audio is not supported",
    "audios": "audio is not supported",
    "objects": "boxes of objects are not inserted into the text; write them into the messages",
    "kto_tag": "unpaired preferences are not supported; make pairs with chosen and rejected",
    "t2w_windows": "captions of clips train a world model's generator; use `dsreason world`",
    "chat_template_kwargs": "settings of the chat template per row are not supported; remove them",
    "loss_scale": "weights of the loss per row are not supported; remove the column",
    "sample_weight": "weights of the loss per row are not supported; remove the column",
    "completion_mask": 'masks are not supported; mark replies with "loss": false',
    "train_on_turn": 'masks are not supported; mark replies with "loss": false',
    "mask_history": 'masks are not supported; mark replies with "loss": false',
    "rejected_images": "both replies of a preference must have the same images",
    "rejected_videos": "both replies of a preference must have the same videos",
}
"""Columns that change the meaning of a row for other tools and that no format reads, with the reason."""


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
    "hint",
    "dialog",
    "dialogue",
    "turns",
    *SYSTEMS,
    *media_columns.COLUMNS,
}
"""Columns with a part of the conversation in some format."""


@dataclass
class Conversation:
    """What a format reads from a row, before the media of other columns are inserted."""

    messages: list[Message]
    columns: set[str]
    """Columns that the format used; their content is now in `messages` or in the fields below."""
    rejected: list[Message] | None = None
    options: dict[str, str] | None = None


@dataclass(frozen=True)
class Format:
    """A row format."""

    name: str
    description: str
    """Columns by which it is recognised, for messages."""
    fits: Callable[[Row], bool]
    read: Callable[[Row], Conversation]


def has(row: Row, *columns: str) -> bool:
    """Return whether all columns have a value."""
    return all(row.get(column) is not None for column in columns)


def find_column(row: Row, columns: Sequence[str]) -> str | None:
    return next((column for column in columns if has(row, column)), None)


# ---------------------------------------------------------------- formats


def read_conversation(row: Row) -> Conversation:
    """Read `messages` or `conversations`, with an optional column `rejected_response` or `rejected_messages`."""
    present = [column for column in LISTS if has(row, column)]
    column = present[0]
    for other in present[1:]:
        if row[other] != row[column]:
            raise DataError(
                f"the columns {column!r} and {other!r} both hold a conversation; remove one of them, or choose one with "
                f'data.columns, such as {{messages = "{other}"}}'
            )
    messages = read_messages(row[column], column)
    if not messages:
        raise DataError(f"field {column!r} has no messages; add some, or remove the row")
    return Conversation(messages, set(present))


def read_question(row: Row) -> Conversation:
    column = find_column(row, QUESTIONS)
    assert column is not None
    options, columns = choices.read_options(row)
    columns.add(column)
    answers.check_option(row.get("answer"), options)
    question = read_text(row, column)
    if not choices.are_listed(options, question):
        question = "\n".join([question, *option_lines(options)])
    messages: list[Message] = [{"role": "user", "content": question}]
    if not has(row, "answer") and (reply := find_column(row, COMPLETIONS)):
        messages.append({"role": "assistant", "content": read_reply(row, reply)})
        columns.add(reply)
    return Conversation(messages, columns, options=options)


def read_instruction(row: Row) -> Conversation:
    """Read `instruction`, `input` and `output` (alpaca), or `query` and `response` (ms-swift), after the turns of `history`."""
    requests = ("instruction", "query", "context", "input")
    names = [name for name in requests if get_optional_text(row, name) is not None]
    if not names:
        raise DataError(f"the fields {', '.join(requests)} are all empty; one must have the question")
    request: Message = {"role": "user", "content": "\n".join(read_text(row, name) for name in names)}
    messages = [*read_history(row.get("history")), request]
    columns = {*requests, "history"}
    reply = find_column(row, COMPLETIONS[1:])
    if reply is not None:
        messages.append({"role": "assistant", "content": read_reply(row, reply)})
        columns.add(reply)
    return Conversation(messages, columns)


def read_history(history: Any) -> list[Message]:
    messages: list[Message] = []
    for turn in answers.parse_json_text(history) or []:
        if not isinstance(turn, list) or len(turn) != 2 or not all(isinstance(text, str) for text in turn):
            raise DataError(
                f"field 'history' must be a list of pairs of a question and its reply, but has {turn!r:.200}"
            )
        messages += [{"role": "user", "content": turn[0]}, {"role": "assistant", "content": turn[1]}]
    return messages


def read_prompt(row: Row) -> Conversation:
    """Read `prompt` and `completion` (or `response`) of TRL, or verl's prompt without a reply. Only the completion is trained."""
    messages = [mark_untrained(message) for message in preferences.to_messages(row["prompt"], "prompt", "user")]
    columns = {"prompt"}
    if reply := find_column(row, COMPLETIONS):
        messages += preferences.to_messages(row[reply], reply, "assistant")
        columns.add(reply)
        if row.get("label") in (0, 1):
            raise DataError(UNPAIRED)
    return Conversation(messages, columns)


def read_preference(row: Row) -> Conversation:
    """Read `chosen` and `rejected`, each a reply or a complete conversation, after the prompt that the other columns give."""
    base = Conversation([], set())
    if prompt_format := next((form for form in FORMATS[1:] if form.fits(row)), None):
        base = prompt_format.read(row)
    add_system(base, row)
    answer_column = None
    if not has(row, "chosen") and base.messages and base.messages[-1]["role"] != "assistant":
        accepted, answer_column = answers.read_answers(row)
        base.messages += [{"role": "assistant", "content": text} for text in accepted[:1]]
    preferred, rejected, columns = preferences.read_pair(row, base.messages)
    if not preferred[-1].get("trained", True) or not rejected[-1].get("trained", True):
        raise DataError('the last reply of a preference is always trained; remove "loss": false')
    columns |= base.columns | ({answer_column} if answer_column else set())
    return Conversation(preferred, columns, rejected, base.options)


def mark_untrained(message: Message) -> Message:
    return {**message, "trained": False} if message["role"] == "assistant" else message


def read_text(row: Row, column: str) -> str:
    text = row[column]
    if not isinstance(text, str):
        raise DataError(f"field {column!r} must be a string; got {text!r:.100}")
    return text


def read_reply(row: Row, column: str) -> str:
    """Read a reply, which may be a number."""
    is_number = isinstance(row[column], int | float) and not isinstance(row[column], bool)
    return answers.to_text(row[column]) if is_number else read_text(row, column)


FORMATS = (
    Format(
        "preference",
        "chosen and rejected, or a conversation and rejected_response",
        lambda row: any(row.get(column) not in (None, "", []) for column in preferences.COLUMNS),
        read_preference,
    ),
    Format(
        "conversation", "messages or conversations", lambda row: find_column(row, LISTS) is not None, read_conversation
    ),
    Format("prompt", "prompt, with completion for SFT", lambda row: has(row, "prompt"), read_prompt),
    Format(
        "instruction",
        "instruction, input and output, or query and response",
        lambda row: has(row, "instruction") or has(row, "query") or has(row, "input", "output"),
        read_instruction,
    ),
    Format("question", "question and answer", lambda row: find_column(row, QUESTIONS) is not None, read_question),
)


# ---------------------------------------------------------------- rows


def find_format(row: Row) -> Format:
    """Find the format that the row's columns have.

    Raises:
        DataError: no format has these columns.
    """
    form = next((form for form in FORMATS if form.fits(row)), None)
    if form is None:
        known = "; ".join(form.description for form in FORMATS)
        raise DataError(
            f"the columns {', '.join(map(str, row))} match no row format ({known}); rename them with data.columns, or set "
            "data.adapter to your own adapter"
        )
    return form


def read_row(row: Any, name: str | None = None) -> Sample:
    """Convert a row of any format to a sample; `name` selects the format, and None detects it.

    With `name`, columns of other formats are kept in `sample.meta`; otherwise, a column that no format would ignore is an error.

    Raises:
        DataError: the row has no known format, contradicts itself, or lacks something.
    """
    if not isinstance(row, dict):
        raise DataError(f"a row must be an object with fields, but is {row!r:.100}")
    row = flatten_openai_preference(row)
    check_refused(row)
    form = find_format(row) if name is None else next(form for form in FORMATS if form.name == name)
    if not form.fits(row):
        raise DataError(
            f"the columns {', '.join(map(str, row))} do not match the format {form.name} ({form.description}); rename "
            'them with data.columns, or set data.adapter = "auto"'
        )
    check_row_weights(row, form)
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
    if accepted and messages and messages[-1]["role"] != "assistant":
        messages = [*messages, {"role": "assistant", "content": accepted[0]}]
    check_questions(messages)
    used = (
        conversation.columns
        | columns
        | {"id", "tools", "functions"}
        | ({answer_column} if answer_column == "answer" else set())
    )
    unused = {column: value for column, value in row.items() if column not in used}
    meta = {column: value for column, value in unused.items() if value or column not in CONVERSATION_COLUMNS}
    if name is None:
        check_unused(meta, conversation)
        media_columns.check_shown(meta, messages)
    return Sample(
        id="" if row.get("id") is None else str(row["id"]),
        messages=messages,
        answer=accepted[0] if accepted else get_last_reply(messages),
        other_answers=tuple(accepted[1:]),
        has_text_prompt=isinstance(row.get("prompt"), str),
        options=conversation.options,
        meta=meta,
        rejected=rejected,
        tools=read_tools(row.get("tools") or row.get("functions")),
    )


def check_refused(row: Row) -> None:
    """Raise DataError if the row has a column that changes its meaning for other tools and that no format reads."""
    for column, reason in REFUSED.items():
        value = row.get(column)
        if value not in (None, "", [], {}) and not (column == "mask_history" and not value):
            raise DataError(f"field {column!r}: {reason}")


def check_row_weights(row: Row, form: Format) -> None:
    """Raise DataError if a column gives the row a weight, or marks its reply as good or bad."""
    for column in ("loss", "train", "weight"):
        if form.name != "question" and row.get(column) not in (None, 1):
            raise DataError(
                f"field {column!r} is {row[column]!r:.100}, but weights per row are not supported; remove the row or the column"
            )
    if form.name == "conversation" and isinstance(row.get("label"), bool):
        raise DataError(UNPAIRED)


def flatten_openai_preference(row: dict[str, Any]) -> dict[str, Any]:
    """Convert OpenAI's preference rows (`input`, `preferred_output`, `non_preferred_output`) to the usual columns."""
    if not isinstance(row.get("input"), dict) or "preferred_output" not in row:
        return row
    rest = {
        key: value for key, value in row.items() if key not in ("input", "preferred_output", "non_preferred_output")
    }
    replies = {"chosen": row["preferred_output"], "rejected": row.get("non_preferred_output")}
    settings = {key: value for key, value in row["input"].items() if key in ("messages", "tools")}
    return {**rest, **settings, **replies}


def check_questions(messages: Sequence[Message]) -> None:
    """Raise DataError if a user message shows nothing."""
    for number, message in enumerate(messages):
        content = message["content"]
        if message["role"] == "user" and (not content or (isinstance(content, str) and not content.strip())):
            raise DataError(f"message {number}: the user's message is empty; add a text or a media item")


def add_system(conversation: Conversation, row: Row) -> None:
    """Insert the column `system` (or `system_prompt`) as the first message, unless the conversation starts with the same one.

    Raises:
        DataError: the conversation starts with another system message.
    """
    column = next((column for column in SYSTEMS if get_optional_text(row, column) is not None), None)
    if column is None:
        return
    text = read_text(row, column)
    conversation.columns.add(column)
    for messages in (conversation.messages, conversation.rejected):
        if messages is None:
            continue
        if not messages or messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": text})
        elif join_text(messages[0]).strip() != text.strip():
            raise DataError(
                f"the column {column!r} ({text!r:.100}) and the system message of the conversation differ; remove one of them"
            )


def check_unused(meta: Mapping[str, Any], conversation: Conversation) -> None:
    """Raise DataError if a column that other formats would read is unused and says something that the conversation does not."""
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
    """Return the text of the last message, which is the reference answer; None if the last message is not the assistant's."""
    last = messages[-1] if messages else None
    return join_text(last) if last is not None and last["role"] == "assistant" else None
