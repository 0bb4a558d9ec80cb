"""Image files: sizes from the headers, and pixels as 8-bit RGB. Unusable files raise a `DataError`."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from mmap import ACCESS_READ, mmap
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from dsreason.errors import DataError, DsReasonError
from dsreason.media.files import IMAGE_FORMATS, find_local_file
from dsreason.media.time_limit import MOST_OF_AN_IMAGE, check_time, time_limit
from dsreason.media.vision import MAX_IMAGE_PIXELS

MAX_SCANNED_PIXELS = 5_000_000_000
"""Maximum product of a JPEG's pixels and scans, because each scan may process all pixels. It allows 33 scans of the largest
image; 10 scans are usual. A scan of a few bytes takes as long as any other, so neither the file size nor the image size limits
the decoding time."""
JPEG_MARKER = re.compile(rb"\xff([^\x00\x01\xd0-\xd8\xff])")
"""Pattern for a marker that starts a segment; markers within compressed pixel data do not match."""
JPEG_SCAN, JPEG_END = b"\xda", b"\xd9"
EXIF_ORIENTATION = 0x0112


def probe_image(path: str | Path) -> tuple[int, int]:
    """Return (height, width) after EXIF rotation, reading only the header."""
    with _open_image(find_local_file(path)) as image:
        width, height = image.size
        return (width, height) if _read_orientation(image) in (5, 6, 7, 8) else (height, width)


def load_image(path: str | Path) -> Image.Image:
    """Load an image as 8-bit RGB, with EXIF rotation applied and transparent pixels blended with white."""
    file = find_local_file(path)
    with _open_image(file) as image:
        rotated = _read_orientation(image) != 1
        _check_scans(file, image)
        image.load()
        return _to_rgb(ImageOps.exif_transpose(image) if rotated else image)


def _read_orientation(image: Image.Image) -> int:
    """Return the EXIF orientation that still has to be applied; for TIFF files, Pillow applies it itself.

    The base class's `getexif` is called, because `PngImageFile.getexif` would decode the image to find data after the pixels.
    """
    return 1 if image.format == "TIFF" else Image.Image.getexif(image).get(EXIF_ORIENTATION, 1)


class TimedFile(io.BufferedReader):
    """A file that checks the time limit at regular intervals while Pillow reads it."""

    reads = 0

    def __init__(self, file: Path) -> None:
        super().__init__(io.FileIO(file))
        self.file = file

    def __repr__(self) -> str:  # Pillow quotes this in its errors
        return repr(str(self.file))

    def read(self, size: int | None = -1, /) -> bytes:
        self.reads += 1
        if self.reads % 16 == 0:
            check_time()
        return super().read(size)


@contextmanager
def _open_image(file: Path) -> Iterator[Image.Image]:
    try:
        with (
            time_limit(file, most=MOST_OF_AN_IMAGE),
            TimedFile(file) as opened,
            Image.open(opened, formats=IMAGE_FORMATS) as image,
        ):
            image.filename = str(file)  # lets Pillow memory-map raw pixels
            if (pixels := image.width * image.height) > MAX_IMAGE_PIXELS:
                raise DataError(
                    f"{file}: has {image.width}x{image.height} = {pixels} pixels, but the maximum is {MAX_IMAGE_PIXELS}"
                )
            yield image
    except DsReasonError:
        raise
    except Exception as error:  # Pillow's decoders may raise any error for damaged bytes
        reason = str(error).replace(f" {str(file)!r}", "") or type(error).__name__
        raise DataError(f"{file}: is not a usable image: {reason}") from error


def _check_scans(file: Path, image: Image.Image) -> None:
    if image.info.get("progressive"):
        for scans in _count_scans(file):
            if scans * image.width * image.height > MAX_SCANNED_PIXELS:
                raise DataError(
                    f"{file}: has more than {scans - 1} scans of {image.width}x{image.height} pixels, but the maximum "
                    f"is {MAX_SCANNED_PIXELS:.1e} pixels in total; save it as a non-progressive JPEG"
                )


def _count_scans(file: Path) -> Iterator[int]:
    """Yield the running count of a JPEG's scans, skipping the content of segments.

    Counting stops at the end marker, because some phones append a video after it.
    """
    scans, position = 0, 0
    with file.open("rb") as opened, mmap(opened.fileno(), 0, access=ACCESS_READ) as content:
        while (marker := JPEG_MARKER.search(content, position)) and marker[1] != JPEG_END:
            check_time()
            position = marker.end() + int.from_bytes(content[marker.end() : marker.end() + 2], "big")
            if marker[1] == JPEG_SCAN:
                yield (scans := scans + 1)


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):  # 16 bits per sample: Pillow's conversion would clip at 255
        return Image.fromarray((np.asarray(image).astype(np.int64).clip(0, 65535) >> 8).astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, image).convert("RGB")
    return image.convert("RGB")
