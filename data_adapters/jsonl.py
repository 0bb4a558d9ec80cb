"""Plain rows: one question about images or videos, and its answer.

    {"id": "7", "video": "clips/7.mp4", "question": "Which way does it move?", "options": {"A": "left", "B": "right"},
     "answer": "A", "system": "Answer with a letter."}

`image` and `video` are a path or a list of paths, shown in this order before the question; `id`, `options` and `system` may
be absent, and options may also be a list, which is lettered from A. Without `answer`, or with a blank one, a row can be asked,
which is enough for GRPO with rewards that compare with none.
"""

from __future__ import annotations

from typing import Any

from dsreason.data.rows import as_list, option_lines, optional_text, options_field, text_field
from dsreason.data.types import Message, Sample


def to_sample(row: dict[str, Any]) -> Sample:
    options = options_field(lettered(row.get("options")), "options")
    question = "\n".join([text_field(row, "question"), *option_lines(options)])
    answer = optional_text(row, "answer")
    media = [{"type": kind, kind: path} for kind in ("image", "video") for path in as_list(row.get(kind))]
    content = [*media, {"type": "text", "text": question}]
    messages: list[Message] = [{"role": "user", "content": content}]
    if answer is not None:
        messages.append({"role": "assistant", "content": answer})
    if row.get("system"):
        messages.insert(0, {"role": "system", "content": row["system"]})
    known = {"id", "image", "video", "question", "options", "answer", "system"}
    meta = {key: value for key, value in row.items() if key not in known}
    return Sample(id=str(row.get("id", "")), messages=messages, answer=answer, options=options, meta=meta)


def lettered(options: Any) -> Any:
    return {chr(ord("A") + i): text for i, text in enumerate(options)} if isinstance(options, list) else options
