"""Digests that identify the rows of a data set without reading all of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import PurePosixPath
from typing import Any

from dsreason.data.messages import get_text, list_media_paths
from dsreason.data.order import pick_evenly
from dsreason.data.sources import SampleDataset
from dsreason.data.types import Message

MOST_ROWS = 256


def compute_rows_digest(count: int, content: Callable[[int], Any]) -> dict[str, Any]:
    """Return the row count and a hash of up to 256 evenly spaced rows: `{"count": 2560, "digest": "…"}`."""
    contents = [content(row) for row in pick_evenly(count, MOST_ROWS)]
    text = json.dumps(contents, sort_keys=True, default=str)
    return {"count": count, "digest": hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]}


def compute_samples_digest(samples: SampleDataset) -> dict[str, Any]:
    """Return the row count and a digest of texts and media file names. Folder names are ignored, so the data may be moved."""

    def read_content(row: int) -> Any:
        try:
            sample = samples.read_without_media(row)
            return [
                sample.answer,
                sample.options,
                *map(list_message_content, sample.messages),
                *map(list_message_content, sample.rejected or []),
            ]
        except Exception:  # noqa: BLE001  rows may be malformed in any way; a bad row is reported when it is used
            return None

    return compute_rows_digest(len(samples), read_content)


def list_message_content(message: Message) -> list[str]:
    return [message["role"], get_text(message), *(PurePosixPath(path).name for path in list_media_paths([message]))]
