"""The row formats: the columns that identify each format, and the function that reads its conversations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dsreason.data.formats import answers, choices, preferences
from dsreason.data.formats.turns import CONTENT_KEYS, ROLE_KEYS, read_messages
from dsreason.data.messages import join_text
from dsreason.data.options import option_lines
from dsreason.data.rows import get_optional_text
from dsreason.data.types import Message
from dsreason.errors import DataError

Row = Mapping[str, Any]
UNPAIRED = "field 'label' marks an unpaired preference, which is not supported; make pairs of chosen and rejected"
LISTS = ("messages", "conversations", "conversation")
"""Columns that contain a list of messages."""
QUESTIONS = ("question", "problem")
SYSTEMS = ("system", "system_prompt", "system_message")
COMPLETIONS = ("completion", "response", "output")


@dataclass
class Conversation:
    """A conversation read from a row, before media from other columns are inserted."""

    messages: list[Message]
    columns: set[str]
    """Columns that the format read; their content is now in `messages` or in the fields below."""
    rejected: list[Message] | None = None
    options: dict[str, str] | None = None
    labels: dict[str, str] = field(default_factory=dict)
    """Answer as written in the row → letter or text of the corresponding option."""


@dataclass(frozen=True)
class Format:
    """A row format."""

    name: str
    description: str
    """Description of the format's columns, for messages."""
    find_columns: Callable[[Row], list[str]]
    """Function that returns the row's columns that identify this format; [] if the row has a different format."""
    read: Callable[[Row], Conversation]


def has(row: Row, *columns: str) -> bool:
    """Return whether the row has a value in every one of the columns."""
    return all(row.get(column) is not None for column in columns)


def find_column(row: Row, columns: Sequence[str]) -> str | None:
    return next(iter(list_present(row, columns)), None)


def list_present(row: Row, columns: Sequence[str]) -> list[str]:
    """Return the columns in which the row has a value."""
    return [column for column in columns if has(row, column)]


# ---------------------------------------------------------------- formats


def read_conversation(row: Row) -> Conversation:
    """Read `messages` or `conversations`, with an optional column `rejected_response` or `rejected_messages`."""
    columns = list_present(row, LISTS)
    column = columns[0]
    for other in columns[1:]:
        if row[other] != row[column]:
            raise DataError(
                f"the columns {column!r} and {other!r} both hold a conversation; remove one of them, or choose one with "
                f'data.columns, such as {{messages = "{other}"}}'
            )
    messages = read_messages(row[column], column)
    if not messages:
        raise DataError(f"field {column!r} has no messages; add some, or remove the row")
    return Conversation(messages, set(columns))


def read_question(row: Row) -> Conversation:
    column = find_column(row, QUESTIONS)
    assert column is not None
    options, columns = choices.read_options(row)
    columns.add(column)
    options, labels = choices.assign_option_letters(options, row.get("answer"))
    if options:
        answers.check_option(row, options, labels)
    question = read_text(row, column)
    if not choices.has_listed_options(options, question):
        question = "\n".join([question, *option_lines(options)])
    messages: list[Message] = [{"role": "user", "content": question}]
    if not has(row, "answer") and (reply := find_column(row, COMPLETIONS)):
        messages.append({"role": "assistant", "content": read_reply(row, reply)})
        columns.add(reply)
    return Conversation(messages, columns, options=options, labels=labels)


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
                f"field 'history' must be a list of [question, reply] pairs, but one of its entries is {turn!r:.200}"
            )
        messages += [{"role": "user", "content": turn[0]}, {"role": "assistant", "content": turn[1]}]
    return messages


def read_prompt(row: Row) -> Conversation:
    """Read TRL's `prompt` and `completion` (or `response`), or verl's prompt without a reply.

    The model is trained only on the completion.
    """
    messages = [mark_untrained(message) for message in preferences.to_messages(row["prompt"], "prompt", "user")]
    columns = {"prompt"}
    if messages and messages[-1]["role"] not in ("user", "tool") and not find_preference_columns(row):
        raise DataError(
            f"the prompt ends with a message of the {messages[-1]['role']}; a reply cannot continue it, so it must end with one "
            "of the user, or of a tool"
        )
    if reply := find_column(row, COMPLETIONS):
        messages += preferences.to_messages(row[reply], reply, "assistant")
        columns.add(reply)
        if row.get("label") in (0, 1):
            raise DataError(UNPAIRED)
    return Conversation(messages, columns)


def read_preference(row: Row) -> Conversation:
    """Read `chosen` and `rejected`. Each is a complete conversation, or a reply to the prompt in the other columns."""
    base = Conversation([], set())
    if prompt_format := next((form for form in FORMATS[1:] if form.find_columns(row)), None):
        base = prompt_format.read(row)
    add_system(base, row)
    answer_column = None
    if not find_column(row, preferences.CHOSEN) and base.messages and base.messages[-1]["role"] != "assistant":
        accepted, answer_column = answers.read_answers(row)
        accepted = [base.labels.get(text, text) for text in accepted[:1]]
        base.messages += [{"role": "assistant", "content": text} for text in accepted]
    preferred, rejected, columns = preferences.read_pair(row, base.messages)
    if not preferred[-1].get("trained", True) or not rejected[-1].get("trained", True):
        raise DataError('the last reply of a preference is always trained on; remove "loss": false')
    columns |= base.columns | ({answer_column} if answer_column else set())
    return Conversation(preferred, columns, rejected, base.options, base.labels)


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


def find_preference_columns(row: Row) -> list[str]:
    return [column for column in preferences.COLUMNS if row.get(column) not in (None, "", [])]


def find_instruction_columns(row: Row) -> list[str]:
    if has(row, "instruction") or has(row, "query"):
        return list_present(row, ("instruction", "query"))
    return ["input", "output"] if has(row, "input", "output") else []


FORMATS = (
    Format(
        "preference",
        "chosen and rejected, or a conversation and rejected_response",
        find_preference_columns,
        read_preference,
    ),
    Format("conversation", "messages or conversations", lambda row: list_present(row, LISTS), read_conversation),
    Format("prompt", "prompt, with completion for SFT", lambda row: list_present(row, ("prompt",)), read_prompt),
    Format(
        "instruction",
        "instruction, input and output, or query and response",
        find_instruction_columns,
        read_instruction,
    ),
    Format("question", "question and answer", lambda row: list_present(row, QUESTIONS), read_question),
)


# ---------------------------------------------------------------- detection


def find_format(row: Row) -> Format:
    """Find the format that the row's columns match.

    Raises:
        DataError: the columns match no format.
    """
    form = next((form for form in FORMATS if form.find_columns(row)), None)
    if form is None:
        if find_column(row, ROLE_KEYS) and find_column(row, CONTENT_KEYS):
            raise DataError(
                "the row is a message; write each conversation as an object with a list of its messages, "
                '{"messages": [{"role": …, "content": …}, …]}'
            )
        known = "; ".join(form.description for form in FORMATS)
        raise DataError(
            f"the columns {', '.join(map(str, row))} match no row format ({known}); rename them with data.columns, or set "
            "data.adapter to your own adapter"
        )
    return form


def names_conversation_file(row: Row) -> bool:
    """Return whether the row's conversation is in a JSON file named in the column `conversation` (Cosmos 3)."""
    conversation = row.get("conversation")
    return isinstance(conversation, str) and conversation.endswith(".json")


def describe_detection(row: Row) -> str:
    """Describe a row's format, the columns that identify it, and how to select another format that also matches."""
    if names_conversation_file(row):
        return "format conversation file (recognised by conversation, which names a .json file)"
    row = preferences.flatten_openai_preference(row)
    form, *others = [form for form in FORMATS if form.find_columns(row)]
    text = f"format {form.name} (recognised by {', '.join(form.find_columns(row))}"
    if others:
        text += f'; to read {" or ".join(other.name for other in others)} instead, set data.adapter = "auto:{others[0].name}"'
    return f"{text})"


def add_system(conversation: Conversation, row: Row) -> None:
    """Insert the column `system` (or `system_prompt`) as the first message, unless the conversation already starts with it.

    Raises:
        DataError: the conversation starts with a different system message.
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
