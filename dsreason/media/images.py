"""Image files: sizes from their headers, pixels as 8-bit RGB. A file that cannot be used is a `DataError`."""

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
from dsreason.media.files import IMAGE_FORMATS, local_path
from dsreason.media.time_limit import MOST_OF_AN_IMAGE, check_time, time_limit
from dsreason.media.vision import MAX_IMAGE_PIXELS

MAX_SCANNED_PIXELS = 5_000_000_000
"""Pixels of a JPEG times its scans, each of which may pass over all of them: 33 scans of the largest image; usual are ten.
A scan of a few bytes costs as much, so neither the file's size nor the picture's says how long it takes."""
JPEG_MARKER = re.compile(rb"\xff([^\x00\x01\xd0-\xd8\xff])")
"""Begins a segment; compressed pixels hold none but those left out here."""
JPEG_SCAN, JPEG_END = b"\xda", b"\xd9"
EXIF_ORIENTATION = 0x0112


def probe_image(path: str | Path) -> tuple[int, int]:
    """(height, width) after EXIF rotation, from the header alone."""
    with _opened_image(local_path(path)) as image:
        width, height = image.size
        return (width, height) if _orientation(image) in (5, 6, 7, 8) else (height, width)


def load_image(path: str | Path) -> Image.Image:
    """The image as 8-bit RGB, EXIF rotation applied, transparency laid over white."""
    file = local_path(path)
    with _opened_image(file) as image:
        rotated = _orientation(image) != 1
        _check_scans(file, image)
        image.load()
        return _to_rgb(ImageOps.exif_transpose(image) if rotated else image)


def _orientation(image: Image.Image) -> int:
    """Return what is left to rotate; Pillow does it by itself for TIFF. Asked of the base class, because
    `PngImageFile.getexif` would decode the picture, to look for more behind the pixels."""
    return 1 if image.format == "TIFF" else Image.Image.getexif(image).get(EXIF_ORIENTATION, 1)


class TimedFile(io.BufferedReader):
    """Pillow comes here for every chunk of a header or of pixels, so that this is where it can be ended."""

    reads = 0

    def __init__(self, file: Path) -> None:
        super().__init__(io.FileIO(file))
        self.file = file

    def __repr__(self) -> str:  # in Pillow's errors
        return repr(str(self.file))

    def read(self, size: int | None = -1, /) -> bytes:
        self.reads += 1
        if self.reads % 16 == 0:
            check_time()
        return super().read(size)


@contextmanager
def _opened_image(file: Path) -> Iterator[Image.Image]:
    try:
        with (
            time_limit(file, most=MOST_OF_AN_IMAGE),
            TimedFile(file) as opened,
            Image.open(opened, formats=IMAGE_FORMATS) as image,
        ):
            image.filename = str(file)  # so that raw pixels are mapped
            if (pixels := image.width * image.height) > MAX_IMAGE_PIXELS:
                raise DataError(f"{file}: {image.width}x{image.height} = {pixels} pixels, more than {MAX_IMAGE_PIXELS}")
            yield image
    except DsReasonError:
        raise
    except Exception as error:  # damaged bytes lead Pillow's decoders to any of them
        raise DataError(f"{file}: not a usable image: {str(error) or type(error).__name__}") from error


def _check_scans(file: Path, image: Image.Image) -> None:
    if image.info.get("progressive"):
        for scans in _scans(file):
            if scans * image.width * image.height > MAX_SCANNED_PIXELS:
                raise DataError(
                    f"{file}: more than {scans - 1} scans of {image.width}x{image.height} pixels, which make the "
                    f"{MAX_SCANNED_PIXELS:.1e} that are read; save it as an ordinary JPEG"
                )


def _scans(file: Path) -> Iterator[int]:
    """Counts the scans of a JPEG up to its end, behind which phones put a video; what its segments hold is no scan."""
    scans, place = 0, 0
    with file.open("rb") as opened, mmap(opened.fileno(), 0, access=ACCESS_READ) as content:
        while (marker := JPEG_MARKER.search(content, place)) and marker[1] != JPEG_END:
            check_time()
            place = marker.end() + int.from_bytes(content[marker.end() : marker.end() + 2], "big")
            if marker[1] == JPEG_SCAN:
                yield (scans := scans + 1)


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):  # 16 bits a sample: Pillow's own conversion would clip at 255
        return Image.fromarray((np.asarray(image).astype(np.int64).clip(0, 65535) >> 8).astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, image).convert("RGB")
    return image.convert("RGB")
