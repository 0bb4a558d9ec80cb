"""Media files whose content is in the row itself: bytes, base64 text, and `data:` URIs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dsreason.errors import DataError
from dsreason.files.archives import write_embedded
from dsreason.media.files import is_image_content
from dsreason.media.images import probe_image
from dsreason.media.urls import decode_data_uri, is_data_uri

BASE64_STARTS = ("/9j/", "iVBOR", "R0lGOD", "UklGR")
"""First base64 characters of a JPEG, PNG, GIF or WebP file."""
SHORTEST_BASE64 = 40
"""Minimum length of base64 text that can be an image file."""


def is_base64_image(text: str) -> bool:
    """Return whether a text looks like a base64 image. Unlike a file name, base64 has no dot."""
    return text.startswith(BASE64_STARTS) and len(text) >= SHORTEST_BASE64 and "." not in text


def is_embedded(raw: Any) -> bool:
    """Return whether a value from a row is a media file's content instead of its path."""
    if isinstance(raw, dict):
        return bool(raw.get("bytes"))
    return isinstance(raw, bytes) or (isinstance(raw, str) and (is_data_uri(raw) or is_base64_image(raw)))


def unpack_embedded(raw: Any, kind: str) -> Path:
    """Write embedded content (see `is_embedded`) to the cache and return its path.

    Raises:
        DataError: the content is not valid base64, or, if an image is expected, not an image.
    """
    content, suffix = (raw["bytes"], Path(str(raw.get("path") or "")).suffix) if isinstance(raw, dict) else (raw, "")
    if isinstance(content, str):
        uri = content if is_data_uri(content) else f"data:{kind}/unknown;base64,{content}"
        try:
            content, type_suffix = decode_data_uri(uri)
        except DataError as error:
            raise DataError(f"{kind}: {error}") from None
        suffix = suffix or type_suffix
    path = write_embedded(content, suffix)
    if kind != "video" and not is_image_content(content):  # a rare format, or no image
        try:
            probe_image(path)
        except DataError as error:
            raise DataError(
                f"{kind}: the {len(content):,} embedded bytes, which start with {content[:12]!r}, are not a usable image; "
                "encode the file again"
            ) from error
    return path
