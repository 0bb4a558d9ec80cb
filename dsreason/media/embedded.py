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
"""First characters of a JPEG, PNG, GIF or WebP file in base64."""
SHORTEST_BASE64 = 40
"""Minimum length of base64 text: no image file is shorter."""


def is_base64_image(text: str) -> bool:
    """Return whether a text is a base64 image, judging by its first characters; a file name has a dot, unlike base64."""
    return text.startswith(BASE64_STARTS) and len(text) >= SHORTEST_BASE64 and "." not in text


def is_embedded(raw: Any) -> bool:
    """Return whether a row has the content of a media file in place of its path."""
    if isinstance(raw, dict):
        return bool(raw.get("bytes"))
    return isinstance(raw, bytes) or (isinstance(raw, str) and (is_data_uri(raw) or is_base64_image(raw)))


def unpack_embedded(raw: Any, kind: str) -> Path:
    """Write the content for which `is_embedded` is true to the cache, and return the path.

    Raises:
        DataError: the content is not valid base64, or, for images, not that of an image.
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
