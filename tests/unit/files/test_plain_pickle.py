"""Pickles: plain data is read, and no other pickle gets to run code."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dsreason.errors import DataError
from dsreason.files.plain_pickle import PlainUnpickler, convert_pickle

EMBEDDING = np.arange(12, dtype=np.float32).reshape(3, 4)


def write(folder: Path, content: bytes) -> Path:
    file = folder / "x.pickle"
    file.write_bytes(content)
    return file


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize(
    "array", [EMBEDDING, EMBEDDING.T, EMBEDDING.astype(">f8"), EMBEDDING.astype(np.float16)[:0], np.array(True)]
)
def test_arrays_are_recovered_from_every_protocol(tmp_path: Path, array: np.ndarray, protocol: int) -> None:
    _, file = convert_pickle(write(tmp_path, pickle.dumps([array], protocol=protocol)), tmp_path)
    loaded = np.load(file, allow_pickle=False)
    assert loaded.dtype == array.dtype.newbyteorder("=")
    assert np.array_equal(loaded, array)


def test_index_and_embeddings_are_converted(tmp_path: Path) -> None:
    index = {"root": "s3://bucket/x", "data_list": ["000.tar", "001.tar"], "total_key_count": 2, "chunk_size": None}
    assert convert_pickle(write(tmp_path, pickle.dumps(index)), tmp_path) == [tmp_path / "x.json"]
    assert json.loads((tmp_path / "x.json").read_text()) == index
    windows = [{"long": EMBEDDING}, {"long": EMBEDDING + 1, "weight": 0.5}]
    convert_pickle(write(tmp_path, pickle.dumps(windows)), tmp_path)
    assert json.loads((tmp_path / "x.json").read_text()) == [
        {"long": {"npy": "x-0.npy"}},
        {"long": {"npy": "x-1.npy"}, "weight": 0.5},
    ]
    assert np.array_equal(np.load(tmp_path / "x-1.npy", allow_pickle=False), EMBEDDING + 1)


class Hostile:
    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("protocol", [0, 2, 5])
@pytest.mark.parametrize(
    "function", [os.system, subprocess.check_output, eval, __import__, getattr, np.load, torch.load, open, type]
)
def test_hostile_pickle_is_rejected_without_execution(tmp_path: Path, function: Any, protocol: int) -> None:
    mark = tmp_path / "ran"
    file = write(tmp_path, pickle.dumps([EMBEDDING, Hostile(function, f"touch {mark}")], protocol=protocol))
    with pytest.raises(
        DataError,
        match=rf"x.pickle: contains an object of type \w+.*{function.__name__}, which is not supported; regenerate it",
    ):
        convert_pickle(file, tmp_path)
    assert not mark.exists()


def hand_made(*parts: bytes) -> bytes:
    return b"\x80\x04" + b"".join(parts) + b"."


def name(module: str, attribute: str) -> bytes:
    return b"c" + f"{module}\n{attribute}\n".encode()


RECONSTRUCT = name("numpy._core.multiarray", "_reconstruct")


def objects_passed_off_as_numbers() -> bytes:
    """Pickle an array of objects whose dtype claims, through its state, to contain no objects."""
    hostile = Hostile(np.dtype, "O", False, True)
    hostile.call = (*hostile.call, (3, "|", None, None, None, -1, -1, 0))
    array = Hostile(np._core.multiarray._reconstruct, np.ndarray, (0,), b"b")
    array.call = (*array.call, (1, (1,), hostile, False, b"A" * 8))
    return pickle.dumps([array])


@pytest.mark.parametrize(
    "content",
    [
        hand_made(name("numpy", "ndarray.__class__")),
        hand_made(name("numpy.core.multiarray", "_reconstruct.__globals__")),
        hand_made(name("numpy", "ndarray"), b")\x81"),  # NEWOBJ
        hand_made(RECONSTRUCT, name("numpy", "ndarray"), b"K\x01\x85C\x01b\x87R"),  # an array without content
        hand_made(RECONSTRUCT, b"}X\x08\x00\x00\x00__code__K\x01sb"),  # BUILD on a named object
        hand_made(b"\x82\x01"),  # EXT1
        hand_made(b"X\x01\x00\x00\x00aQ"),  # BINPERSID
        hand_made(b"]q\x00h\x00a"),  # a list that contains itself
        b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7f",
        b"",
        b"PK\x03\x04" + bytes(64),
        objects_passed_off_as_numbers(),
        pickle.dumps({1, 2}),
        pickle.dumps({(1, 2): 3}),
        pickle.dumps({"n": 10**5000}),
        pickle.dumps(["\ud800"]),
        pickle.dumps([EMBEDDING, b"bytes"]),
        pickle.dumps(np.array([{"a": 1}], dtype=object)),
        pickle.dumps(np.zeros(2, dtype="U3")),
        pickle.dumps(np.zeros(2, dtype=[("a", "f4")])),
        pickle.dumps(torch.zeros(2)),
    ],
)
def test_unsupported_pickle_is_rejected_without_leftovers(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(DataError, match="x.pickle: "):
        convert_pickle(write(tmp_path, content), tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["x.pickle"]


def memo(opcode: bytes, index: int) -> bytes:
    return hand_made(b"]", opcode, b"%d\n" % index if opcode == b"p" else index.to_bytes(4, "little"))


@pytest.mark.parametrize(
    "content",
    [
        memo(b"r", 2**25),  # LONG_BINPUT
        memo(b"p", 2**25),  # PUT
        hand_made(b"\x96", (2**28).to_bytes(8, "little"), b"x"),  # BYTEARRAY8
    ],
)
def test_memory_bomb_is_rejected_before_loading(
    tmp_path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PlainUnpickler, "load", lambda self: pytest.fail("loaded"))
    with pytest.raises(DataError, match="x.pickle: "):
        convert_pickle(write(tmp_path, content), tmp_path)


def doubled(value: object, times: int) -> object:
    for _ in range(times):
        value = [value, value]
    return value


@pytest.mark.parametrize("value", [doubled([], 40), doubled("x" * 5000, 12), doubled(np.zeros(5000, np.uint8), 12)])
def test_small_pickle_that_expands_is_rejected(tmp_path: Path, value: object) -> None:
    """Check repeated objects: a pickle stores each list, string or array only once, but the result repeats it."""
    content = pickle.dumps(value)
    assert len(content) < 10_000
    with pytest.raises(DataError, match="repeats the same lists, strings or arrays so often"):
        convert_pickle(write(tmp_path, content), tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["x.pickle"]
