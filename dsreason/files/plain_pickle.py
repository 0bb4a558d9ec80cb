"""A reader for plain data, such as text embeddings and indexes, in untrusted pickle files; it never runs code from the files.

It follows "Restricting globals" in Python's documentation. The replacements for numpy's classes accept only plain numeric
types. With numpy's own `dtype`, a pickle could have arbitrary memory addresses interpreted as objects.
"""

from __future__ import annotations

import io
import json
import pickle
import pickletools
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsreason.errors import DataError
from dsreason.files.atomic import open_draft, write_file

MAX_BYTES = 2 * 2**30
FREE_SIZE, MAX_RATIO = 2**20, 64
"""Limit on the number of characters and bytes to which a pickle may expand: a fixed allowance plus a multiple of its size.
A limit is needed because a pickle can repeat a list or an array at a cost of two bytes per repetition."""
ADVICE = "regenerate it from lists, dicts, strings, numbers and numpy arrays of numbers only"


class Dtype:
    """A replacement for `numpy.dtype` that stores only the type code and, from the pickled state, the byte order."""

    def __init__(self, code: str, *flags: Any) -> None:
        self.code, self.order = code, "="

    def __setstate__(self, state: Any) -> None:
        self.order = state[1]


class Array:
    """A replacement for `numpy.ndarray`, built from the pickled state: (version, shape, dtype, is_fortran, bytes)."""

    content: NDArray[Any]

    def __init__(self, *state: Any) -> None:
        if state:
            self.__setstate__(state)

    def __setstate__(self, state: Any) -> None:
        shape, dtype, is_fortran, content = state[-4:]
        if dtype.code not in {f"{kind}{size}" for kind in "fiub" for size in (1, 2, 4, 8)}:
            raise DataError(f"contains an array of type {dtype.code!r:.80}, which is not a plain numeric type")
        array = np.frombuffer(content, np.dtype(dtype.code).newbyteorder(dtype.order))
        self.content = array.reshape(shape, order="F" if is_fortran else "C")


class PlainUnpickler(pickle.Unpickler):
    """An unpickler that resolves only the names used by numpy arrays. Each lookup returns a new object, so that a pickle
    cannot modify what the next pickle gets."""

    def find_class(self, module: str, name: str) -> Any:
        known_classes = {
            "numpy.ndarray": None,
            "numpy.dtype": lambda *state: Dtype(*state),
            "numpy._core.multiarray._reconstruct": lambda *empty: Array(),
            "numpy._core.numeric._frombuffer": lambda content, dtype, shape, order: Array(
                shape, dtype, order == "F", content
            ),
            "_codecs.encode": lambda text, encoding: text.encode("latin1"),
            "__builtin__.bytes": lambda: b"",
        }
        full_name = f"{module}.{name}".replace("numpy.core.", "numpy._core.")
        if full_name not in known_classes:
            raise DataError(
                f"contains an object of type {module}.{name}, which is not supported".replace("\n", " ")[:300]
            )
        return known_classes[full_name]


def convert_pickle(file: Path, folder: Path) -> list[Path]:
    """Convert a pickle to `<stem>.json` and one `.npy` file per array; return the paths of these files.

    In the JSON, an array is represented as `{"npy": "<stem>-0.npy"}`.

    Raises:
        DataError: the pickle is damaged, or contains anything other than plain data; nothing is written.
    """
    if (size := file.stat().st_size) > MAX_BYTES:
        raise DataError(f"{file}: has {size} bytes, but the maximum is {MAX_BYTES}")
    pickled, document = file.read_bytes(), io.StringIO()
    arrays: list[tuple[Path, NDArray[Any]]] = []
    remaining = FREE_SIZE + MAX_RATIO * size

    def spend(count: int) -> None:
        nonlocal remaining
        remaining -= count
        if remaining < 0:
            raise DataError("repeats the same lists, strings or arrays so often that it would become too large")

    def replace_array(value: Any) -> dict[str, str]:
        if not hasattr(value, "content"):
            raise DataError(f"contains a value of type {type(value).__name__}, which is not supported")
        spend(value.content.nbytes)
        arrays.append((folder / f"{file.stem}-{len(arrays)}.npy", value.content))
        return {"npy": arrays[-1][0].name}

    try:
        # `genops` raises an error if a length goes beyond the end of the file.
        for opcode, argument, _ in pickletools.genops(pickled):
            if opcode.name in ("PUT", "BINPUT", "LONG_BINPUT") and (argument or 0) > len(pickled):
                raise ValueError(f"numbers its objects up to {argument}, but has only {len(pickled)} bytes")
        plain = PlainUnpickler(io.BytesIO(pickled)).load()
        for part in json.JSONEncoder(indent=1, ensure_ascii=False, default=replace_array).iterencode(plain):
            spend(len(part))
            document.write(part)
        content = document.getvalue().encode()
    except DataError as error:
        raise DataError(f"{file}: {error}; {ADVICE}") from None
    except Exception as error:  # noqa: BLE001  a damaged pickle may raise anything
        raise DataError(f"{file}: cannot be read as a pickle: {str(error) or type(error).__name__}") from None
    for target, array in arrays:
        with open_draft(target) as draft, draft.open("wb") as output:
            np.save(output, array.astype(array.dtype.newbyteorder("=")), allow_pickle=False)
    write_file(folder / f"{file.stem}.json", content)
    return [folder / f"{file.stem}.json", *(target for target, _ in arrays)]
