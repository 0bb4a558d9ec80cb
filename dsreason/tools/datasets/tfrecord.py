"""Reader for TFRecord files of `tf.train.Example`, without TensorFlow.

A record consists of its length (8 bytes), a checksum (4), the content, and a checksum (4). The content is a protocol buffer:
`Example {features = 1: {feature = 1: map of name = 1 to Feature = 2 {bytes_list = 1 | float_list = 2 | int64_list = 3}}}`, see
tensorflow/core/example/example.proto. Checksums are not verified; if damage changes a feature's
name, the feature is missing.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

from dsreason.errors import DataError

MAX_RECORD = 4 * 1024**3
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
"""Wire types of protocol buffers."""

Feature = list[bytes] | list[int]


def read_examples(file: Path, names: Sequence[str]) -> Iterator[dict[str, Feature]]:
    """Yield the named features of each record, as lists of bytes or integers; missing features are omitted.

    Raises:
        DataError: the file is not a TFRecord file, or is damaged.
    """
    name_of_key = {name.encode(): name for name in names}
    with file.open("rb") as records:
        number = 0
        while header := records.read(12):
            number += 1
            try:
                (length,) = struct.unpack("<Q", header[:8])
                if length > MAX_RECORD:
                    raise ValueError(f"its header claims {length} bytes; at most {MAX_RECORD} are allowed")
                content = records.read(length)
                if len(content) < length or len(records.read(4)) < 4:
                    raise ValueError("the file ends within the record")
                yield {name_of_key[name]: values for name, values in iter_features(content) if name in name_of_key}
            except (ValueError, IndexError, struct.error) as error:
                raise DataError(f"{file}, record {number}: is not a TFRecord of tf.train.Example ({error})") from error


def iter_features(example: bytes) -> Iterator[tuple[bytes, Feature]]:
    for number, content in iter_fields(example):
        for inner, entry in iter_fields(content) if number == 1 and isinstance(content, bytes) else ():
            if inner == 1 and isinstance(entry, bytes):
                pair = dict(iter_fields(entry))
                name, feature = pair.get(1), pair.get(2, b"")
                if isinstance(name, bytes) and isinstance(feature, bytes):
                    yield name, read_values(feature)


def read_values(feature: bytes) -> Feature:
    for kind, values in iter_fields(feature):
        if kind == 1 and isinstance(values, bytes):
            return [value for _, value in iter_fields(values) if isinstance(value, bytes)]
        if kind == 3 and isinstance(values, bytes):
            return read_integers(values)
    return []


def read_integers(values: bytes) -> list[int]:
    found: list[int] = []
    for _, value in iter_fields(values):
        packed = value if isinstance(value, bytes) else None
        if packed is None:
            found.append(int(value))
            continue
        place = 0
        while place < len(packed):
            number, place = read_varint(packed, place)
            found.append(number)
    return found


def iter_fields(message: bytes) -> Iterator[tuple[int, bytes | int]]:
    """Yield the number and content of each field; the content of a fixed-size field is its bytes."""
    place = 0
    while place < len(message):
        key, place = read_varint(message, place)
        kind = key & 7
        if kind == VARINT:
            value, place = read_varint(message, place)
            yield key >> 3, value
            continue
        if kind == BYTES:
            size, place = read_varint(message, place)
        elif kind in (FIXED64, FIXED32):
            size = 8 if kind == FIXED64 else 4
        else:
            raise ValueError(f"a field has the unknown wire type {kind}")
        if place + size > len(message):
            raise ValueError("a field is longer than its message")
        yield key >> 3, message[place : place + size]
        place += size


def read_varint(message: bytes, position: int) -> tuple[int, int]:
    """Return the number encoded at `position`, and the position after it."""
    number = shift = 0
    while True:
        byte = message[position]
        position += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, position
        shift += 7
        if shift > 63:
            raise ValueError("a number has more than 64 bits")
