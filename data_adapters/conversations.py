"""Adapter for Hugging Face data sets with OpenAI-style messages in the column `conversations` or `messages`.

    {"id": "7", "conversations": [
        {"role": "user", "content": [{"type": "video", "video": "clips/7.mp4"}, {"type": "text", "text": "Which way?"}]},
        {"role": "assistant", "content": "left"}]}

The column holds a list or its JSON text. Media are paths, resolved below `data.media_path` if relative, or Hugging Face images
(as bytes). A part may also omit its media item, as in `{"type": "image"}`; it then shows the next item of the row's column
`image` or `images` (for videos, `video` or `videos`).
"""

from __future__ import annotations

from typing import Any

from dsreason.data.formats.read import read_row
from dsreason.data.types import Sample


def to_sample(row: dict[str, Any]) -> Sample:
    return read_row(row, "conversation")
