"""Pickle files of plain data, read without running any code in them: text embeddings and indexes that others have pickled.

A pickle says which functions of which modules to call. Here the names are known that numpy's arrays are made of, and what is
called under them is ours: it takes bytes, a type of plain numbers and a shape, and nothing else.
"""

from __future__ import annotations

import io
import json
import math
import pickle
import pickletools
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsreason.errors import DataError
from dsreason.files.atomic import draft_of, write_file

MAX_BYTES = 2 * 2**30
MAX_DEPTH = 64
MAX_BITS = 4096
"""Of a whole number."""
FREE_SIZE, MOST_PER_BYTE = 1_000_000, 16
"""Items, characters and bytes of arrays that a file may become: so many, and so many for each of its bytes. A list, text or
array that is used many times costs a pickle two bytes each time."""
ADVICE = (
    "make it anew with the program that wrote it, as plain lists, dicts, texts, numbers and numpy arrays; prompts need no "
    "embeddings, they are encoded when a run begins"
)


def read_plain_pickle(file: Path) -> Any:
    """Lists, tuples, dicts, texts, numbers and numpy arrays of numbers out of a pickle.

    Raises:
        DataError: it holds anything else, or is damaged; the text names the file.
    """
    size = file.stat().st_size
    if size > MAX_BYTES:
        raise DataError(f"{file}: has {size} bytes; at most {MAX_BYTES} are read")
    content = file.read_bytes()
    try:
        _check_sizes(content)
        return _Checker(FREE_SIZE + MOST_PER_BYTE * size).checked(_PlainUnpickler(io.BytesIO(content)).load())
    except DataError as error:
        raise DataError(f"{file}: {error}; {ADVICE}") from None
    except (pickle.UnpicklingError, ArithmeticError, LookupError, AttributeError, EOFError, MemoryError) as error:
        raise DataError(f"{file}: is not a usable pickle: {str(error) or type(error).__name__}") from None
    except (TypeError, ValueError, RecursionError, ImportError) as error:
        raise DataError(f"{file}: is not a usable pickle: {str(error) or type(error).__name__}") from None


def _check_sizes(content: bytes) -> None:
    """A place that a pickle counts up to, or a length that it says, takes memory at once, however short the file is.

    ValueError where the file is shorter than that: `genops` itself finds the lengths.
    """
    for opcode, argument, _ in pickletools.genops(content):
        if opcode.name in ("PUT", "BINPUT", "LONG_BINPUT") and (argument or 0) > len(content):
            raise ValueError(f"counts its objects up to {argument}, with {len(content)} bytes")


class _PlainUnpickler(pickle.Unpickler):
    """Each has objects of its own under the known names, so that no file can leave anything behind for the next."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        make_array, array_type, make_dtype, encode, from_buffer, no_bytes = _names()
        self.known: dict[tuple[str, str], Any] = {
            ("numpy", "ndarray"): array_type,
            ("numpy", "dtype"): make_dtype,
            ("_codecs", "encode"): encode,
            ("__builtin__", "bytes"): no_bytes,
            **{(f"numpy.{core}.multiarray", "_reconstruct"): make_array for core in ("core", "_core")},
            **{(f"numpy.{core}.numeric", "_frombuffer"): from_buffer for core in ("core", "_core")},
        }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.known:
            raise DataError(f"holds an object of {module}.{name}, which is not read".replace("\n", " ")[:300])
        return self.known[module, name]

    def persistent_load(self, pid: Any) -> Any:
        raise DataError("refers to data outside of the file")


class _Dtype:
    """A type of plain numbers in the making: `numpy.dtype("f4", False, True)`, then its state with the byte order."""

    def __init__(self, code: Any) -> None:
        self.code, self.order = code, "="

    def __setstate__(self, state: Any) -> None:
        if not (isinstance(state, tuple) and len(state) >= 2 and state[1] in ("<", ">", "|", "=")):
            raise DataError("holds a damaged type of an array")
        self.order = state[1]

    def made(self) -> np.dtype[Any]:
        if not isinstance(self.code, str) or self.code not in PLAIN_TYPES:
            raise DataError(f"holds an array of type {self.code!r:.80}, which is not one of plain numbers")
        return np.dtype(self.code).newbyteorder(self.order)  # type: ignore[arg-type]  # checked above


class _Array:
    """An array in the making: made empty, then filled by its state (version, shape, type, order of the axes, bytes)."""

    array: NDArray[Any] | None = None

    def __setstate__(self, state: Any) -> None:
        match state:
            case (int(), tuple(shape), _Dtype() as dtype, bool(fortran), bytes(content)):
                pass
            case (tuple(shape), _Dtype() as dtype, bool(fortran), bytes(content)):
                pass
            case _:
                raise DataError("holds a damaged array")
        made = dtype.made()
        if not all(type(size) is int and size >= 0 for size in shape) or len(shape) > 32:
            raise DataError("holds an array with a damaged shape")
        if math.prod(shape) * made.itemsize != len(content):
            raise DataError(f"holds an array of shape {list(shape)} with {len(content)} bytes")
        array = np.frombuffer(content, made).reshape(shape, order="F" if fortran else "C")
        self.array = array.astype(made.newbyteorder("="))


PLAIN_TYPES = frozenset(
    f"{kind}{size}" for kind, sizes in {"f": "248", "i": "1248", "u": "1248"}.items() for size in sizes
) | {"b1"}


def _names() -> tuple[Any, ...]:
    """What stands for numpy's `_reconstruct`, `ndarray` and `dtype`, `_codecs.encode`, numpy's `_frombuffer`, and `bytes`."""
    array_type = object()

    def make_array(kind: Any, shape: Any, code: Any) -> _Array:
        if kind is not array_type:
            raise DataError("holds an array of an unknown kind")
        return _Array()

    def make_dtype(code: Any, align: Any = False, copy: Any = False) -> _Dtype:
        return _Dtype(code)

    def encode(text: Any, encoding: Any) -> bytes:
        if not isinstance(text, str) or encoding != "latin1":
            raise DataError("holds bytes in an unknown encoding")
        return text.encode("latin1")

    def from_buffer(content: Any, dtype: Any, shape: Any, order: Any) -> _Array:
        array = _Array()
        array.__setstate__((shape, dtype, order == "F", bytes(content) if type(content) is bytearray else content))
        return array

    def no_bytes() -> bytes:
        return b""

    return make_array, array_type, make_dtype, encode, from_buffer, no_bytes


@dataclass
class _Checker:
    """Goes through what a pickle held, once for each use of it."""

    left: int
    """Items, characters and bytes of arrays that there may still be."""

    def checked(self, value: Any, depth: int = 0) -> Any:
        """The same with arrays in place of those in the making. DataError for anything that is not plain data."""
        if depth > MAX_DEPTH:
            raise DataError(f"is nested more than {MAX_DEPTH} times, or holds itself")
        if isinstance(value, _Array) and value.array is not None:
            self._count(value.array.nbytes)
            return value.array
        if type(value) in (list, tuple):
            self._count(len(value))
            return [self.checked(item, depth + 1) for item in value]
        if type(value) is dict:
            _check_keys(value)
            self._count(sum(len(key) if type(key) is str else 1 for key in value))
            return {key: self.checked(item, depth + 1) for key, item in value.items()}
        if type(value) in (str, int):
            _check_plain(value)
            self._count(len(value) if type(value) is str else 0)
        if value is None or type(value) in (str, bool, int, float):
            return value
        raise DataError(f"holds a value of type {type(value).__name__.strip('_')}, which is not read")

    def _count(self, size: int) -> None:
        self.left -= size
        if self.left < 0:
            raise DataError("uses the same lists, texts or arrays so often that it would become too large")


def _check_plain(value: str | int) -> None:
    """DataError for a text or a number that JSON cannot hold."""
    if isinstance(value, int):
        if value.bit_length() > MAX_BITS:
            raise DataError(f"holds a whole number of {value.bit_length()} bits; at most {MAX_BITS} are read")
        return
    try:
        value.encode()
    except UnicodeEncodeError:
        raise DataError("holds half a character (a lone surrogate), which no file of text can hold") from None


def _check_keys(keys: Iterable[Any]) -> None:
    names = set()
    for key in keys:
        if type(key) not in (str, int):
            raise DataError("holds a dict whose keys are neither texts nor whole numbers")
        _check_plain(key)
        if str(key) in names:
            raise DataError(f"holds the key {key!s:.80} twice, as a number and as a text, in one dict")
        names.add(str(key))


def convert_pickle(file: Path, folder: Path) -> list[Path]:
    """Write `<stem>.json`, with `{"npy": "<stem>-0.npy"}` in place of each array, and these; returns all of them."""
    written: list[Path] = []

    def plain(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            target = folder / f"{file.stem}-{len(written)}.npy"
            with draft_of(target) as draft, draft.open("wb") as output:
                np.save(output, value, allow_pickle=False)
            written.append(target)
            return {"npy": target.name}
        if isinstance(value, list):
            return [plain(item) for item in value]
        return {key: plain(item) for key, item in value.items()} if isinstance(value, dict) else value

    document = plain(read_plain_pickle(file))
    target = folder / f"{file.stem}.json"
    write_file(target, json.dumps(document, indent=1, ensure_ascii=False))
    return [target, *written]
