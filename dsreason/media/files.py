"""The files that are opened as media: local ones and local copies, in formats that never open another file or program."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import unquote

from dsreason.errors import DataError
from dsreason.files.address import is_s3
from dsreason.files.remote import fetch_file

IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "JPEG2000", "PPM", "ICO")
"""Image formats that are opened, whatever the suffix. Pillow supports more, and runs Ghostscript for one of them (EPS)."""
VIDEO_FORMATS = (
    *("mp4", "mov", "matroska", "webm", "avi", "mpegts", "mpeg", "flv", "asf", "ogg", "mxf", "dv", "gif", "apng"),
    *("h264", "hevc", "m4v", "mpegvideo", "mjpeg", "ivf", "obu"),
)
"""Video containers that are opened. FFmpeg supports more, including playlists, which would make it open other files."""
OTHER_FORMATS = (
    *("image2", "png_pipe", "jpeg_pipe", "webp_pipe", "bmp_pipe", "tiff_pipe", "gif_pipe", "j2k_pipe"),
    *("wav", "mp3", "aac", "flac"),
)
"""Containers that hold no video but are opened for a better message."""


def find_local_file(path: str | Path) -> Path:
    """Return the local file of a path, `file://` or `s3://` URI; for S3 that is a local copy.

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
    if not os.path.exists(file):  # Path.exists would raise if the path is too long
        raise DataError(f"{text:.300}: no such file")
    if not file.is_file():
        raise DataError(f"{file}: is not a file")
    if not os.access(file, os.R_OK):
        raise DataError(f"{file}: no permission to read it")
    if file.stat().st_size == 0:
        raise DataError(f"{file}: the file is empty (0 bytes)")
    return file
