"""Adapter for Hugging Face data sets with OpenAI-style messages in the column `conversations` or `messages`.

    {"id": "7", "conversations": [
        {"role": "user", "content": [{"type": "video", "video": "clips/7.mp4"}, {"type": "text", "text": "Which way?"}]},
        {"role": "assistant", "content": "left"}]}

The column contains a list, or a list as JSON text. Media are Hugging Face images (as bytes) or paths; relative paths are resolved
against `data.media_path`. A part without a media item, such as `{"type": "image"}`, uses the next item in the row's column
`image` or `images` (for videos, `video` or `videos`).
"""

from __future__ import annotations

from typing import Any

from dsreason.data.formats.read import read_row
from dsreason.data.types import Sample


def to_sample(row: dict[str, Any]) -> Sample:
    return read_row(row, "conversation")
