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

from dsreason.data.formats.read import read_row
from dsreason.data.types import Sample


def to_sample(row: dict[str, Any]) -> Sample:
    return read_row(row, "preference" if row.get("rejected") is not None else "question")
