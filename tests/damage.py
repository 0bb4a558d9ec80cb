"""Damage to files, as disks, interrupted copies and people cause it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path


def flip_bit(file: Path, position: int | None = None, bit: int = 0) -> None:
    """Flip one bit of the byte at `position`; None: in the middle of the file."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2 if position is None else position] ^= 1 << bit
    file.write_bytes(content)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def empty(file: Path) -> None:
    file.write_bytes(b"")


def remove(file: Path) -> None:
    file.unlink()


DAMAGE: dict[str, Callable[[Path], None]] = {"flipped": flip_bit, "cut": cut, "emptied": empty, "removed": remove}
