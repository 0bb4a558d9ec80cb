"""A safe reader for numpy's `.npy` format: it accepts only plain numbers, never unpickles, and limits memory use."""

from __future__ import annotations

import io
import math
import tokenize
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_HEADER_BYTES = 16 * 1024
MALFORMED = (ValueError, TypeError, SyntaxError, ArithmeticError, RecursionError, MemoryError, tokenize.TokenError)
"""Errors that numpy raises for an invalid header or an impossible shape."""


def read_npy(content: bytes | bytearray | memoryview) -> NDArray[Any]:
    """Return the array in `content`, sharing its memory; raise ValueError if the format or the length is wrong."""
    content = memoryview(content)
    file = io.BytesIO(content[:MAX_HEADER_BYTES])
    try:
        version = np.lib.format.read_magic(file)  # type: ignore[no-untyped-call]
        if version not in ((1, 0), (2, 0)):
            raise ValueError(f"unsupported format version {version}")
        read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read_header(file)  # type: ignore[no-untyped-call]
    except MALFORMED as error:
        raise ValueError(f"not a .npy array: {(str(error) or type(error).__name__):.200}") from None
    if dtype.kind not in "uif":
        raise ValueError(f"the array must have an integer or floating-point dtype; got {dtype}")
    if any(length < 0 for length in shape):
        raise ValueError(f"the array has an invalid shape: {list(shape)}")
    size, sent = math.prod(shape) * dtype.itemsize, len(content) - file.tell()
    if size != sent:
        raise ValueError(f"the array of shape {list(shape)} and type {dtype} needs {size} bytes, but {sent} were sent")
    try:
        array = np.frombuffer(content, dtype, offset=file.tell()).reshape(shape, order="F" if fortran else "C")
    except MALFORMED as error:
        raise ValueError(f"the array has an invalid shape: {str(error):.200}") from None
    return array.astype(dtype.newbyteorder("="), copy=False)
