"""Untrusted arrays: anything but an array of plain numbers raises ValueError, whatever its header contains."""

from __future__ import annotations

import io

import numpy as np
import pytest

from dsreason.files.npy import read_npy


def with_header(header: str, content: bytes = b"") -> bytes:
    text = header.encode("latin1")
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + content


def described(shape: str) -> str:
    return f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}}}\n"


@pytest.mark.parametrize("fortran", [False, True])
def test_array_from_numpy_is_read_unchanged(fortran: bool) -> None:
    array = np.arange(24, dtype=">i2").reshape(2, 3, 4)
    file = io.BytesIO()
    np.save(file, np.asfortranarray(array) if fortran else array)
    assert np.array_equal(read_npy(file.getvalue()), array)


@pytest.mark.parametrize(
    "content",
    [
        with_header("{'descr': ("),
        with_header("{'descr': " + "[" * 900 + "\n"),
        with_header("{'descr': " + "-" * 9000 + "1}\n"),
        with_header("{" + " {" * 200),
        with_header("\x00"),
        with_header(described("(True,)"), bytes(4)),
        with_header(described(f"({2**70}, 0)")),
        with_header(described("(" + "1, " * 100 + ")"), bytes(4)),
        with_header(described("(-1, -1)"), bytes(4)),
        with_header(described("(2,)"), bytes(4)),
        with_header("{'descr': '|O', 'fortran_order': False, 'shape': (1,)}\n", bytes(8)),
        b"",
        b"\x93NUMPY\x03\x00",
    ],
)
def test_malformed_array_is_rejected(content: bytes) -> None:
    with pytest.raises(ValueError, match="array"):
        read_npy(content)
