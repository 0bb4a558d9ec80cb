"""Pickles of plain data are read; of anything else, nothing is run."""

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
from dsreason.files import plain_pickle
from dsreason.files.plain_pickle import convert_pickle, read_plain_pickle

EMBEDDING = np.arange(12, dtype=np.float32).reshape(3, 4)


def written(folder: Path, content: bytes) -> Path:
    file = folder / "x.pickle"
    file.write_bytes(content)
    return file


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize(
    "array", [EMBEDDING, EMBEDDING.T, EMBEDDING.astype(">f8"), EMBEDDING.astype(np.float16)[:0], np.array(True)]
)
def test_arrays_come_back_whatever_the_protocol(tmp_path: Path, array: np.ndarray, protocol: int) -> None:
    (found,) = read_plain_pickle(written(tmp_path, pickle.dumps([array], protocol=protocol)))
    assert found.dtype == array.dtype.newbyteorder("=")
    assert np.array_equal(found, array)


def test_an_index_and_embeddings_are_converted(tmp_path: Path) -> None:
    index = {"root": "s3://bucket/x", "data_list": ["000.tar", "001.tar"], "total_key_count": 2, "chunk_size": None}
    assert convert_pickle(written(tmp_path, pickle.dumps(index)), tmp_path) == [tmp_path / "x.json"]
    assert json.loads((tmp_path / "x.json").read_text()) == index
    windows = [{"long": EMBEDDING}, {"long": EMBEDDING + 1, "weight": 0.5}]
    convert_pickle(written(tmp_path, pickle.dumps(windows)), tmp_path)
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


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize(
    "function",
    [
        os.system,
        subprocess.check_output,
        eval,
        exec,
        __import__,
        getattr,
        np.load,
        np.fromfile,
        torch.load,
        open,
        type,
        object,
    ],
)
def test_a_hostile_pickle_runs_nothing_and_is_named(tmp_path: Path, function: Any, protocol: int) -> None:
    mark = tmp_path / "ran"
    file = written(tmp_path, pickle.dumps([EMBEDDING, Hostile(function, f"touch {mark}")], protocol=protocol))
    with pytest.raises(
        DataError, match=rf"x.pickle: holds an object of \w+.*{function.__name__}, which is not read; make it anew"
    ):
        read_plain_pickle(file)
    assert not mark.exists()


def hand_made(*parts: bytes) -> bytes:
    return b"\x80\x04" + b"".join(parts) + b"."


def name(module: str, attribute: str) -> bytes:
    return b"c" + f"{module}\n{attribute}\n".encode()


RECONSTRUCT = name("numpy._core.multiarray", "_reconstruct")


@pytest.mark.parametrize(
    "content",
    [
        hand_made(name("numpy", "ndarray.__class__")),
        hand_made(name("numpy", "ndarray.tofile")),
        hand_made(name("numpy.core.multiarray", "_reconstruct.__globals__")),
        hand_made(name("builtins", "getattr"), name("numpy", "ndarray"), b"X\x07\x00\x00\x00__dict__", b"\x86R"),
        hand_made(name("numpy", "ndarray"), b")\x81"),  # NEWOBJ
        hand_made(name("numpy", "dtype"), b")R"),  # without its type
        hand_made(name("_codecs", "encode"), b"X\x01\x00\x00\x00aX\x06\x00\x00\x00rot_13\x86R"),
        hand_made(RECONSTRUCT, b"K\x01K\x01K\x01\x87R"),  # no ndarray
        hand_made(RECONSTRUCT, name("numpy", "ndarray"), b"K\x01\x85C\x01b\x87R"),  # an array that is never filled
        hand_made(RECONSTRUCT, b"}X\x08\x00\x00\x00__code__K\x01sb"),  # BUILD on what a name stands for
        hand_made(RECONSTRUCT, b"N}X\x08\x00\x00\x00__code__K\x01s\x86b"),
        hand_made(b"\x82\x01"),  # EXT1
        hand_made(b"X\x01\x00\x00\x00aQ"),  # BINPERSID
        hand_made(b"]q\x00h\x00a"),  # a list that holds itself
        hand_made(b"(" * 1, b"C\x01b", b"0"),
        b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7f",
        b"\x80\x04r\xff\xff\xff\x7f.",
        b"",
        b"PK\x03\x04" + bytes(64),
        pickle.dumps({1, 2}),
        pickle.dumps({(1, 2): 3}),
        pickle.dumps(np.array([{"a": 1}], dtype=object)),
        pickle.dumps(np.zeros(2, dtype="U3")),
        pickle.dumps(np.zeros(2, dtype=[("a", "f4")])),
        pickle.dumps(torch.zeros(2)),
        pickle.dumps(b"bytes"),
    ],
)
def test_whatever_else_is_in_a_pickle_is_a_data_error(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(DataError, match="x.pickle: "):
        read_plain_pickle(written(tmp_path, content))


def test_nothing_of_one_file_is_left_for_the_next(tmp_path: Path) -> None:
    """A pickle can write into the objects that its names stand for: those must be its own."""
    text = b"X\x0c\x00\x00\x00__defaults__"
    spoiling = hand_made(RECONSTRUCT, b"N}", text, b"K\x01\x85s\x86b0]")
    assert read_plain_pickle(written(tmp_path, spoiling)) == []
    (found,) = read_plain_pickle(written(tmp_path, pickle.dumps([EMBEDDING])))
    assert np.array_equal(found, EMBEDDING)


@pytest.mark.parametrize(
    ("shape", "content"),
    [((3, 4), bytes(47)), ((2**62, 4), b""), ((-1, 4), bytes(48)), ((True,), bytes(4)), ((1.0,), bytes(4))],
)
def test_an_array_must_have_the_bytes_of_its_shape(tmp_path: Path, shape: tuple[int, ...], content: bytes) -> None:
    array = Hostile(np._core.multiarray._reconstruct, np.ndarray, (0,), b"b")
    state = (1, shape, np.dtype("f4"), False, content)
    array.call = (*array.call, state)
    with pytest.raises(DataError, match="holds an array"):
        read_plain_pickle(written(tmp_path, pickle.dumps([array])))


def memo(opcode: bytes, index: int) -> bytes:
    return hand_made(b"]", opcode, b"%d\n" % index if opcode == b"p" else index.to_bytes(4, "little"))


@pytest.mark.parametrize(
    "content",
    [
        memo(b"r", 2**25),  # LONG_BINPUT
        memo(b"p", 2**25),  # PUT
        hand_made(b"\x96", (2**28).to_bytes(8, "little"), b"x"),  # BYTEARRAY8
        hand_made(b"\x8e", (2**28).to_bytes(8, "little"), b"x"),  # BINBYTES8
    ],
)
def test_a_small_file_takes_no_memory_while_it_is_read(
    tmp_path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plain_pickle._PlainUnpickler, "load", lambda self: pytest.fail("loaded"))
    with pytest.raises(DataError, match="x.pickle: "):
        read_plain_pickle(written(tmp_path, content))


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"n": 10**5000}, "a whole number of 16610 bits; at most 4096 are read"),
        ({-(2**5000): 1}, "a whole number of 5001 bits"),
        (["\ud800"], "half a character"),
        ({"a\udfff": 1}, "half a character"),
        ({1: "x", "1": "y"}, r"the key 1 twice, as a number and as a text"),
    ],
)
def test_what_json_cannot_hold_is_refused(tmp_path: Path, value: object, said: str) -> None:
    with pytest.raises(DataError, match=f"x.pickle: holds {said}"):
        convert_pickle(written(tmp_path, pickle.dumps(value)), tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["x.pickle"]


def doubled(value: object, times: int) -> object:
    for _ in range(times):
        value = [value, value]
    return value


@pytest.mark.parametrize(
    "value",
    [doubled([], 40), doubled("x" * 5000, 12), doubled(np.zeros(5000, np.uint8), 12), doubled({"k" * 5000: 1}, 12)],
)
def test_a_small_file_does_not_become_a_large_one(tmp_path: Path, value: object) -> None:
    """A pickle holds a list, text or array once, however often it is used."""
    content = pickle.dumps(value)
    assert len(content) < 10_000
    with pytest.raises(DataError, match="uses the same lists, texts or arrays so often"):
        read_plain_pickle(written(tmp_path, content))


def test_what_is_used_a_few_times_is_read(tmp_path: Path) -> None:
    assert read_plain_pickle(written(tmp_path, pickle.dumps(doubled("x" * 5000, 6)))) == doubled("x" * 5000, 6)
