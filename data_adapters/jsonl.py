"""Adapter for plain rows, each with one question about images or videos and its answer.

    {"id": "7", "video": "clips/7.mp4", "question": "Which way does it move?", "options": {"A": "left", "B": "right"},
     "answer": "A", "system": "Answer with a letter."}

`image` and `video` contain a path or a list of paths; the prompt consists of the images, the videos and the question, in this
order. `id`, `options` and `system` are optional. `options` may also be a list, whose items get the letters A, B, C and so on. A
row whose `answer` is missing or blank can be used for GRPO with rewards that need no reference answer.

A preference row has the better answer in `chosen` and the worse one in `rejected`, and may have `ref_chosen_logprob` and
`ref_rejected_logprob`. The row's `answer` is the reference for grading generated answers, and also serves as the better answer
if `chosen` is missing.
"""

from __future__ import annotations

from typing import Any

from dsreason.data.formats.read import read_row
from dsreason.data.types import Sample


def to_sample(row: dict[str, Any]) -> Sample:
    return read_row(row, "preference" if row.get("rejected") is not None else "question")
