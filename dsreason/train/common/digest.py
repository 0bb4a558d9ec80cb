"""What tells the rows of a data set from others, without reading all of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import PurePosixPath
from typing import Any

from dsreason.data.messages import media_paths, text_of
from dsreason.data.order import evenly
from dsreason.data.sources import SampleDataset
from dsreason.data.types import Message

MOST_ROWS = 256


def rows_digest(count: int, content: Callable[[int], Any]) -> dict[str, Any]:
    """`{"count": 2560, "digest": "…"}`: of the number of rows and what up to 256 of them, evenly spaced, say."""
    contents = [content(row) for row in evenly(count, MOST_ROWS)]
    text = json.dumps(contents, sort_keys=True, default=str)
    return {"count": count, "digest": hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]}


def samples_digest(samples: SampleDataset) -> dict[str, Any]:
    """Of texts and the names of media files: the folders may be moved."""

    def content(row: int) -> Any:
        try:
            sample = samples.without_media(row)
            return [sample.answer, sample.options, *map(said, sample.messages), *map(said, sample.rejected or [])]
        except Exception:  # noqa: BLE001  a row of any shape; what is wrong is told where it is used
            return None

    return rows_digest(len(samples), content)


def said(message: Message) -> list[str]:
    return [message["role"], text_of(message), *(PurePosixPath(path).name for path in media_paths([message]))]
