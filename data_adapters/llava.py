"""Adapter for LLaVA annotations: a JSON list (or JSON lines) of conversations about media files below `data.media_path`.

    {"id": "7", "video": "clips/7.mp4", "conversations": [
        {"from": "human", "value": "<video>\\nWhich way does it move?"}, {"from": "gpt", "value": "left"},
        {"from": "human", "value": "And its colour?"}, {"from": "gpt", "value": "red"}]}

Media keys are `image`, `images`, `video` and `videos`; each contains a path or a list of paths. Each `<image>` or `<video>` tag
in a human turn is replaced with the next image or video, so the number of tags must equal the number of media items.
"""

from __future__ import annotations

from typing import Any

from dsreason.data.formats.read import read_row
from dsreason.data.types import Sample


def to_sample(row: dict[str, Any]) -> Sample:
    return read_row(row, "conversation")
