"""Images that claim to be larger than they are, contain something other than they claim, or are not images."""

from __future__ import annotations

import io
import os
import random
import struct
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from dsreason.errors import DataError
from dsreason.media import images
from dsreason.media.images import load_image, probe_image
from tests.unit.hostile.guard import guarded, refused
from tests.unit.hostile.inputs import chunk, damaged, orientation, png, text_chunk, with_exif

NOISE = np.random.default_rng(0).integers(0, 255, (30, 40, 3), np.uint8)


def encoded(kind: str, mode: str = "RGB", **options: Any) -> bytes:
    """Encode 40x30 pixels of noise."""
    buffer = io.BytesIO()
    Image.fromarray(NOISE).convert(mode).save(buffer, kind, **options)
    return buffer.getvalue()


JPEG = encoded("JPEG")
TIFF = encoded("TIFF")


def tiff_entry(number: int, *values: int) -> bytes:
    """Return the TIFF with another entry (tag, type, count, value) at this index of its directory."""
    changed = bytearray(TIFF)
    start = struct.unpack_from("<I", changed, 4)[0]
    struct.pack_into("<HHII", changed, start + 2 + 12 * number, *values)
    return bytes(changed)


def endless_tiff() -> bytes:
    """Return a TIFF whose list of image directories is endless, because the directory refers to itself."""
    changed = bytearray(TIFF)
    start = struct.unpack_from("<I", changed, 4)[0]
    entries = struct.unpack_from("<H", changed, start)[0]
    struct.pack_into("<I", changed, start + 2 + 12 * entries, start)
    return bytes(changed)


def progressive(width: int, height: int, scans: int) -> bytes:
    """Return a black JPEG whose last scan, of a dozen bytes, is repeated `scans` more times."""
    buffer = io.BytesIO()
    Image.new("RGB", (width, height)).save(buffer, "JPEG", progressive=True)
    start, end = buffer.getvalue().rindex(b"\xff\xda"), len(buffer.getvalue()) - 2
    return buffer.getvalue()[:end] + buffer.getvalue()[start:end] * scans + b"\xff\xd9"


def large(kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (4000, 4000)).save(buffer, kind, **options)
    return buffer.getvalue()


def animation(frames: int) -> bytes:
    buffer = io.BytesIO()
    pictures = [Image.new("P", (8, 8), number % 250) for number in range(frames)]
    pictures[0].save(buffer, "GIF", save_all=True, append_images=pictures[1:])
    return buffer.getvalue()


REFUSED: dict[str, tuple[bytes, list[str]]] = {
    "60000x60000": (png(60000, 60000, b""), ["3600000000 pixels"]),
    "more pixels than a number holds": (png(2**31 - 1, 2**31 - 1, b""), ["pixels"]),
    "just above our limit": (png(12500, 12500, b""), ["12500x12500 = 156250000 pixels, but the maximum is 150000000"]),
    "no width": (png(0, 5, b""), ["cannot identify"]),
    "comments of 70 MB": (png(4, 4, None, *[text_chunk(900_000)] * 80), ["text chunks"]),
    "comment of 128 MB": (png(4, 4, None, text_chunk(1 << 27)), ["too large"]),
    "colour profile of 128 MB": (
        png(4, 4, None, chunk(b"iCCP", b"k\0\0" + zlib.compress(bytes(1 << 27)))),
        ["too large"],
    ),
    "SVG": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", ["cannot identify"]),
    "HTML": (b"<!doctype html><script>alert(1)</script>", ["cannot identify"]),
    "PostScript": (
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n(executed) (w) file closefile\n%%EOF\n",
        ["cannot identify"],
    ),
    "no bytes": (b"", ["empty (0 bytes)"]),
    "width that fills the file": (tiff_entry(0, 256, 4, 2**31, 8), ["cannot identify"]),
}
REFUSED_PIXELS: dict[str, tuple[bytes, list[str]]] = {
    "12000x12000 without pixels": (png(12000, 12000, b""), ["a.png: is not a usable image"]),
    "corrupt pixels": (png(40, 30, b"\x78\x9c" + bytes(50)), ["not a usable image"]),
    "truncated JPEG": (JPEG[:700], ["not a usable image"]),
    "JPEG of 1500 scans": (
        progressive(2000, 2000, 1500),
        ["more than 1250 scans of 2000x2000 pixels, but the maximum is 5.0e+09 pixels in total"],
    ),
    "JPEG of 20000 scans": (progressive(600, 600, 20000), ["more than 13888 scans of 600x600 pixels"]),
    "palette that is missing": (png(4, 4, None, colour=3), ["not a usable image: AssertionError"]),
}
USED: dict[str, bytes] = {
    "CMYK": encoded("JPEG", "CMYK"),
    "grey with transparency": encoded("PNG", "LA"),
    "animation of 3000 pictures": animation(3000),
    "endless TIFF": endless_tiff(),
    "colours beyond the palette": png(
        4, 4, zlib.compress(b"\0\xfa\xfa\xfa\xfa" * 4), chunk(b"PLTE", bytes(9)), colour=3
    ),
    "pixels for 1000 images": png(40, 30, zlib.compress(bytes(1 << 28))),
    "TIFF of 500 strips, each a JPEG": large("TIFF", compression="jpeg"),
    "JPEG with a video behind it": large("JPEG", progressive=True) + b"\xff\xda" * 500,
    "small JPEG of 1500 scans": progressive(40, 30, 1500),
    "EXIF of rubbish": with_exif(JPEG, b"rubbish" * 3),
    "EXIF that ends early": with_exif(JPEG, b"MM\0*\0\0\0\x08\0\x05"),
    "EXIF that begins beyond the file": with_exif(JPEG, b"II*\0\xff\xff\xff\xff"),
    "orientation 42": with_exif(JPEG, orientation(3, 1, b"\0*")),
    "orientation that is a text": with_exif(JPEG, orientation(2, 4, b"abc")),
    "2 billion orientations": with_exif(JPEG, orientation(3, 2**31 - 1, b"\0\6")),
}


def both(path: Path) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return height and width according to the header, and those of the pixels."""
    return probe_image(path), load_image(path).size[::-1]


@pytest.fixture(autouse=True)
def without_warnings() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.parametrize("use", [probe_image, load_image])
@pytest.mark.parametrize("name", REFUSED)
def test_image_with_bad_header_is_rejected(here: Path, name: str, use: Callable[[Path], Any]) -> None:
    content, words = REFUSED[name]
    (here / "a.png").write_bytes(content)
    refused(lambda: use(here / "a.png"), DataError, "a.png", *words)


@pytest.mark.parametrize("name", REFUSED_PIXELS)
def test_image_with_bad_pixels_is_rejected(here: Path, name: str) -> None:
    content, words = REFUSED_PIXELS[name]
    (here / "a.png").write_bytes(content)
    refused(lambda: load_image(here / "a.png"), DataError, "a.png", *words)


@pytest.mark.parametrize("name", USED)
def test_unusual_but_valid_image_is_accepted(here: Path, name: str) -> None:
    (here / "a.png").write_bytes(USED[name])
    probed, loaded = guarded(lambda: both(here / "a.png"))
    assert probed == loaded
    assert loaded in ((30, 40), (8, 8), (4, 4), (4000, 4000))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: os.mkfifo(path), "is not a file"),
        (lambda path: path.mkdir(), "is not a file"),
        (lambda path: path.symlink_to("nowhere"), "no such file"),
        (lambda path: path.symlink_to(path), "no such file"),
        (lambda path: path.symlink_to("/dev/zero"), "is not a file"),
    ],
    ids=["FIFO", "folder", "dangling link", "link to itself", "endless device"],
)
def test_path_without_regular_file_is_rejected(here: Path, make: Callable[[Path], Any], words: str) -> None:
    make(here / "a.png")
    refused(lambda: probe_image(here / "a.png"), DataError, "a.png", words)


@pytest.mark.parametrize("path", ["x" * 5000, "a\0b", "\ud800.png", "file://\0", "http://[", "file://host/etc/passwd"])
def test_malformed_path_is_rejected(path: str) -> None:
    refused(lambda: load_image(path), DataError)


KINDS = {
    "PNG": encoded("PNG"),
    "palette": encoded("PNG", "P"),
    "JPEG": with_exif(JPEG, orientation(3, 1, b"\0\6")),
    "GIF": encoded("GIF"),
    "WEBP": encoded("WEBP"),
    "BMP": encoded("BMP"),
    "TIFF": encoded("TIFF", compression="tiff_lzw"),
    "AVIF": encoded("AVIF"),
    "JPEG2000": encoded("JPEG2000"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_random_damage_is_an_error_or_harmless(here: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(images, "MAX_IMAGE_PIXELS", 10_000_000)  # decoding larger ones takes long
    chance = random.Random(0)

    def load_damaged() -> None:
        for _ in range(60):
            start = damaged(KINDS[kind][:300], chance, most=6)
            (here / "a.png").write_bytes(start + KINDS[kind][300:])
            try:
                assert len(both(here / "a.png")) == 2
            except DataError as error:
                assert "a.png" in str(error)

    guarded(load_damaged)
