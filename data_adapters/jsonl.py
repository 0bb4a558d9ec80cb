"""Adapter for plain rows: one question about images or videos, and its answer.

    {"id": "7", "video": "clips/7.mp4", "question": "Which way does it move?", "options": {"A": "left", "B": "right"},
     "answer": "A", "system": "Answer with a letter."}

`image` and `video` are a path or a list of paths; images and then videos are shown before the question. `id`, `options` and
`system` are optional. `options` may also be a list; its items get letters, starting with A. A row whose `answer` is missing or
blank can be used for GRPO with rewards that need no reference answer.

A preference row has `chosen`, the better answer, and `rejected`, the worse one, and may have `ref_chosen_logprob` and
`ref_rejected_logprob`. Generated answers are compared with its `answer`. If `chosen` is missing, `answer` is also used as the
better answer.
"""

from __future__ import annotations

from typing import Any

from dsreason.data.options import format_options, options_field
from dsreason.data.rows import get_optional_text, text_field, to_list
from dsreason.data.types import Message, Sample


def to_sample(row: dict[str, Any]) -> Sample:
    options = options_field(add_letters(row.get("options")), "options")
    question = "\n".join([text_field(row, "question"), *format_options(options)])
    preferred, rejected = read_preference(row)
    answer = get_optional_text(row, "answer") or preferred
    media = [{"type": kind, kind: path} for kind in ("image", "video") for path in to_list(row.get(kind))]
    content = [*media, {"type": "text", "text": question}]
    prompt: list[Message] = [{"role": "user", "content": content}]
    if row.get("system"):
        prompt.insert(0, {"role": "system", "content": row["system"]})
    fields = {"id", "image", "video", "question", "options", "answer", "system", "chosen", "rejected"}
    return Sample(
        id=str(row.get("id", "")),
        messages=prompt if answer is None else append_answer(prompt, preferred or answer),
        answer=answer,
        options=options,
        meta={key: value for key, value in row.items() if key not in fields},
        rejected=None if rejected is None else append_answer(prompt, rejected),
    )


def read_preference(row: dict[str, Any]) -> tuple[str, str] | tuple[None, None]:
    """Return the better and the worse answer, or None for both. Raise KeyError if the row has only a worse answer."""
    if row.get("rejected") is None:
        return None, None
    preferred = get_optional_text(row, "chosen") or get_optional_text(row, "answer") or text_field(row, "chosen")
    return preferred, text_field(row, "rejected")


def append_answer(prompt: list[Message], answer: str) -> list[Message]:
    return [*prompt, {"role": "assistant", "content": answer}]


def add_letters(options: Any) -> Any:
    return {chr(ord("A") + i): text for i, text in enumerate(options)} if isinstance(options, list) else options
