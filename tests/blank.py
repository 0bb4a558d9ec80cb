"""Grey in place of every picture: what answers owe to the media."""

from __future__ import annotations

from typing import Any

import numpy as np
from PIL import Image

from dsreason.data.chat import Encoder
from dsreason.data.media_plan import Medium

GREY = 128


class BlankEncoder(Encoder):
    """Encodes samples as if their files were grey: the same tokens and sizes."""

    def _load(self, *args: Any) -> list[Medium]:
        return [blank(medium) for medium in super()._load(*args)]


def blank(medium: Medium) -> Medium:
    if isinstance(medium, Image.Image):
        return Image.new("RGB", medium.size, (GREY, GREY, GREY))
    frames, metadata = medium
    return np.full_like(frames, GREY), metadata
