"""`dsreason data unpickle`, and the options of `reward-serve` that are checked before the server starts."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from dsreason.cli.main import app
from dsreason.cli.reward.serve import find_device, read_token
from dsreason.errors import ConfigError, DataError
from dsreason.files.lock import hold_folder


def run(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_pickle_folder_is_converted_to_plain_files(tmp_path: Path) -> None:
    (tmp_path / "in" / "t5_xxl").mkdir(parents=True)
    (tmp_path / "in" / "t5_xxl" / "0001.pickle").write_bytes(pickle.dumps([np.ones((2, 3), np.float32)]))
    (tmp_path / "in" / "wdinfo.pkl").write_bytes(pickle.dumps({"data_list": ["0.tar"]}))
    message = run("data", "unpickle", tmp_path / "in", "--output", tmp_path / "out")
    assert "0001.json and 1 arrays" in message
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == ["0001-0.npy", "0001.json", "wdinfo.json"]
    assert np.load(tmp_path / "out" / "0001-0.npy", allow_pickle=False).tolist() == [[1, 1, 1]] * 2
    assert json.loads((tmp_path / "out" / "wdinfo.json").read_text()) == {"data_list": ["0.tar"]}


def test_two_conversions_into_a_folder_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.pkl").write_bytes(pickle.dumps([1]))
    with hold_folder(tmp_path / "out"), pytest.raises(ConfigError, match="out: is in use by process"):
        run("data", "unpickle", tmp_path / "a.pkl", "--output", tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


class Hostile:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.mark),)


def test_hostile_pickle_is_rejected_without_running(tmp_path: Path) -> None:
    (tmp_path / "x.pickle").write_bytes(pickle.dumps(Hostile(tmp_path / "mark")))
    with pytest.raises(
        DataError, match=r"x.pickle: contains an object of type posix.mkdir, which is not supported"
    ) as error:
        run("data", "unpickle", tmp_path / "x.pickle", "--output", tmp_path / "out")
    assert error.value.exit_code == 2
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize(
    ("names", "said"), [((), "contains no .pickle or .pkl"), (("a/x.pkl", "b/x.pkl"), "two files are named x")]
)
def test_unconvertible_pickle_folder_is_rejected(tmp_path: Path, names: tuple[str, ...], said: str) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_bytes(pickle.dumps(1))
    with pytest.raises(DataError, match=said):
        run("data", "unpickle", tmp_path, "--output", tmp_path / "out")


def test_token_is_read_from_named_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", " abc\n")
    monkeypatch.setenv("EMPTY", " ")
    assert read_token(None) is None
    assert read_token("MY_TOKEN") == "abc"
    for name in ("EMPTY", "NO_SUCH"):
        with pytest.raises(ConfigError, match=f"--token-env {name}: the environment variable is unset or empty"):
            read_token(name)


@pytest.mark.parametrize("name", ["foo", "", "cuda:x", "cuda:99", "cpu,cuda", "meta"])
def test_unusable_device_is_rejected_before_loading(name: str) -> None:
    with pytest.raises(ConfigError, match=f"reward-serve: --device {name!r} cannot be used: .*; use cpu, cuda or"):
        find_device(name)
    assert find_device("cpu").type == "cpu"
