"""Functions that make hostile and broken files."""

from __future__ import annotations

import io
import json
import os
import random
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


def damaged(content: bytes, chance: random.Random, most: int = 20) -> bytes:
    """Return the content with up to `most` bytes changed at random."""
    changed = bytearray(content)
    for _ in range(chance.randint(1, most)):
        changed[chance.randrange(len(changed))] = chance.randrange(256)
    return bytes(changed)


# ---------------------------------------------------------------- archives


def member(
    name: str, content: bytes = b"", kind: bytes = tarfile.REGTYPE, **fields: Any
) -> tuple[tarfile.TarInfo, bytes]:
    """Make an entry of a tar file; `fields` are attributes of its header (`linkname`, `pax_headers`)."""
    info = tarfile.TarInfo(name)
    info.type, info.size = kind, len(content)
    for field, value in fields.items():
        setattr(info, field, value)
    return info, content


def tar_of(*members: tuple[tarfile.TarInfo, bytes], mode: str = "w") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as tar:
        for info, content in members:
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def zip_of(*members: tuple[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in members:
            file.writestr(name, content)
    return buffer.getvalue()


def header(name: str, size: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    """Make a tar header that claims a size, without any content after it."""
    info = tarfile.TarInfo(name)
    info.type, info.size = kind, size
    return info.tobuf(tarfile.GNU_FORMAT)


def escape_by_links() -> bytes:
    """Make an archive as in CVE-2025-4517: links whose real path is too long for the check of tarfile's `data` filter, a
    hard link to `outside/flag`, and a file that is written through this link."""
    folder, letters = "d" * 247, "abcdefghijklmnop"
    members, path = [], ""
    for letter in letters:
        members.append(member(os.path.join(path, folder), kind=tarfile.DIRTYPE, mode=0o755))
        members.append(member(os.path.join(path, letter), kind=tarfile.SYMTYPE, linkname=folder))
        path = os.path.join(path, folder)
    deepest = os.path.join("/".join(letters), "l" * 254)
    members.append(member(deepest, kind=tarfile.SYMTYPE, linkname="../" * len(letters)))
    members.append(member("escape", kind=tarfile.SYMTYPE, linkname=deepest + "/../../../outside"))
    members.append(member("hard", kind=tarfile.LNKTYPE, linkname="escape/flag"))
    members.append(member("hard", b"overwritten"))
    return tar_of(*members)


# ---------------------------------------------------------------- images


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png(width: int, height: int, pixels: bytes | None = None, *chunks: bytes, colour: int = 2) -> bytes:
    """Make a PNG that claims a size. `pixels` are the compressed lines (None: black), which follow the `chunks`."""
    if pixels is None:
        pixels = zlib.compress(bytes(height * (1 + width * (3 if colour == 2 else 1))))
    start = struct.pack(">IIBBBBB", width, height, 8, colour, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", start) + b"".join(chunks) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")
    )


def text_chunk(count: int) -> bytes:
    """Make a compressed comment of `count` zeros."""
    return chunk(b"zTXt", b"Comment\0\0" + zlib.compress(bytes(count)))


def with_exif(jpeg: bytes, exif: bytes) -> bytes:
    return jpeg[:2] + b"\xff\xe1" + struct.pack(">H", len(exif) + 8) + b"Exif\0\0" + exif + jpeg[2:]


def orientation(kind: int, count: int, value: bytes) -> bytes:
    """Make an EXIF block that contains only the orientation, with this type, count and value."""
    return b"MM\0*\0\0\0\x08\0\x01\x01\x12" + struct.pack(">HI", kind, count) + value.ljust(4, b"\0") + bytes(4)


# ---------------------------------------------------------------- videos

SAMPLE_TABLE = (b"moov", b"trak", b"mdia", b"minf", b"stbl")


def box_start(mp4: bytes, path: Sequence[bytes]) -> int:
    """Return the offset of the box at `path`; a box begins with its size, followed by its name."""
    position = 0
    for name in path:
        while mp4[position + 4 : position + 8] != name:
            position += struct.unpack_from(">I", mp4, position)[0]
        start, position = position, position + (16 if name == b"stsd" else 8)
    return start


def edited(mp4: bytes, path: Sequence[bytes], offset: int, layout: str, *values: int) -> bytes:
    """Return the file with the box at `path` overwritten by numbers, `offset` bytes from its beginning."""
    changed = bytearray(mp4)
    struct.pack_into(layout, changed, box_start(mp4, path) + offset, *values)
    return bytes(changed)


# ---------------------------------------------------------------- models and configurations


def safetensors(described: object, content: bytes = b"") -> bytes:
    """Make a safetensors file with this header (a JSON value, or raw bytes in its place)."""
    text = described if isinstance(described, bytes) else json.dumps(described).encode()
    return struct.pack("<Q", len(text)) + text + content


def tensor(dtype: str = "F32", shape: Sequence[int] = (1,), offsets: Sequence[int] = (0, 4)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def change_json(file: Path, change: Callable[[dict[str, Any]], None]) -> None:
    document = json.loads(file.read_text())
    change(document)
    file.write_text(json.dumps(document))


def laughs(template: str, bottom: str) -> str:
    """Make YAML with nine levels, each with nine aliases of the previous one: 9^9 values in a few lines."""
    lines = [f"a: &a {bottom}"]
    for before, name in zip("abcdefgh", "bcdefghi", strict=True):
        lines.append(f"{name}: &{name} " + template.format(",".join([f"*{before}"] * 9)))
    return "\n".join(lines)
