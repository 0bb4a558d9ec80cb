"""Local media files and the accepted formats, which exclude any format that can make a decoder open another file or program."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import unquote

from dsreason.errors import DataError
from dsreason.files.address import is_s3
from dsreason.files.remote import fetch_file

IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "JPEG2000", "PPM", "ICO")
"""Accepted image formats, whatever the suffix. Pillow supports more, but runs Ghostscript for EPS."""
VIDEO_FORMATS = (
    *("mp4", "mov", "matroska", "webm", "avi", "mpegts", "mpeg", "flv", "asf", "ogg", "mxf", "dv", "gif", "apng"),
    *("h264", "hevc", "m4v", "mpegvideo", "mjpeg", "ivf", "obu"),
)
"""Accepted video containers. FFmpeg supports more, including playlists, which would make it open other files."""
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")
"""Lower-case suffixes by which image files are recognised."""
IMAGE_STARTS = (b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"BM", b"II*\0", b"MM\0*")
"""First bytes of image files. WebP is not listed, because it is recognised by two separate byte sequences."""
OTHER_FORMATS = (
    *("image2", "png_pipe", "jpeg_pipe", "webp_pipe", "bmp_pipe", "tiff_pipe", "gif_pipe", "j2k_pipe"),
    *("wav", "mp3", "aac", "flac"),
)
"""Formats without video, which are opened only for a better error message."""


def is_image_content(content: bytes) -> bool:
    """Return whether a file's content starts like an image."""
    return content.startswith(IMAGE_STARTS) or (content[:4] == b"RIFF" and content[8:12] == b"WEBP")


def find_local_file(path: str | Path) -> Path:
    """Return the local file for a path, a `file://` URI, or an `s3://` URI, which is downloaded first.

    Raises:
        DataError: the path is not a readable, non-empty file.
        StorageError: S3 cannot be reached or refuses the request.
    """
    text = str(path)
    if is_s3(text):
        text = str(fetch_file(text))
    elif "://" in text:
        if not text.startswith(("file:///", "file://localhost/")):
            raise DataError(f"{text}: media must be local files or s3:// URIs; download the file and use its path")
        text = unquote(text.removeprefix("file://").removeprefix("localhost"))
    file = Path(text)
    if not os.path.exists(file):  # Path.exists raises if the path is too long
        raise DataError(f"{text:.300}: no such file")
    if not file.is_file():
        raise DataError(f"{file}: is not a file")
    if not os.access(file, os.R_OK):
        raise DataError(f"{file}: cannot be read: permission denied")
    if file.stat().st_size == 0:
        raise DataError(f"{file}: the file is empty (0 bytes)")
    return file
