"""Adapter for preference rows in Hugging Face data sets: `prompt`, `chosen`, `rejected`, and optionally `images` and `videos`.

    {"id": "7", "prompt": "Which way does it move?", "chosen": "left", "rejected": "right", "videos": ["clips/7.mp4"]}

`prompt`, `chosen` and `rejected` each contain a text or messages (a list, or a list as JSON text). `chosen` and `rejected` may
also be complete conversations that start with the same messages. Such a row needs no `prompt`; if it has one, both conversations
must contain it.

`images` and `videos` (or `image` and `video`) contain one media item or a list. Media are Hugging Face images (as bytes) or
paths; relative paths are resolved against `data.media_path`. Each part `{"type": "image"}` in the prompt uses the next item. If
the prompt has no such parts, all media precede the first user text.

The prompt may also be called `question`, and the optional column `system` contains the system message. The optional columns
`ref_chosen_logprob` and `ref_rejected_logprob` contain the reference model's log-probabilities.
"""

from __future__ import annotations

from typing import Any

from dsreason.data.formats.read import read_row
from dsreason.data.types import Sample


def to_sample(row: dict[str, Any]) -> Sample:
    return read_row(row, "preference")
