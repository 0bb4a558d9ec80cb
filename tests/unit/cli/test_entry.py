"""The start of the command: neither the command nor its child processes import from the current folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dsreason.__main__ import remove_empty_entries

ROOT = Path(__file__).parents[3]
SHOW = "import json, os, sys, dsreason.__main__; print(json.dumps([sys.path, dict(os.environ)]))"


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    """A folder of files with the names of modules that typer, pydantic and the standard library import."""
    folder = tmp_path / "rows"
    folder.mkdir()
    for name in ("typing", "pathlib", "json", "token", "inspect", "typer", "pydantic", "dataclasses", "data_adapters"):
        (folder / f"{name}.py").write_text(
            f"open({str(tmp_path / 'ran')!r}, 'a').write('{name} ')\nraise SystemExit(9)"
        )
    return folder


def start(folder: Path, *arguments: str, **environment: str) -> str:
    remaining = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    command = [sys.executable, *arguments]
    ended = subprocess.run(
        command, cwd=folder, env=remaining | environment, capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, ""), ended
    return ended.stdout


def shown(folder: Path, **environment: str) -> tuple[list[str], dict[str, str]]:
    """Start `dsreason` with the current folder on its path; return its import path and environment."""
    path, variables = json.loads(start(folder, "-c", SHOW, **environment))
    return path, variables


def python_path(*entries: Any) -> str:
    return os.pathsep.join([*map(str, entries), str(ROOT)])


@pytest.mark.parametrize("options", [["-m"], ["-u", "-m"]], ids=["python", "torchrun"])
def test_command_imports_nothing_from_current_folder(planted: Path, tmp_path: Path, options: list[str]) -> None:
    assert start(planted, *options, "dsreason", "--version").startswith("dsreason ")
    assert not (tmp_path / "ran").exists()


def test_empty_pythonpath_entry_is_removed(tmp_path: Path) -> None:
    path, environment = shown(tmp_path, PYTHONPATH=f"{python_path('/somewhere')}:")
    assert str(tmp_path) not in path
    assert "/somewhere" in path
    assert environment["PYTHONPATH"] == f"/somewhere:{ROOT}"


@pytest.mark.parametrize("name", ["PATH", "LD_LIBRARY_PATH", "LIBRARY_PATH", "COMPILER_PATH", "CPATH"])
@pytest.mark.parametrize(
    ("given", "left"), [("/x:", "/x"), (":/x", "/x"), ("/x::/y", "/x:/y"), ("", None), (":", None)]
)
def test_empty_entries_of_search_paths_are_removed(
    name: str, given: str, left: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, given)
    monkeypatch.setenv("LD_LIBRARY_PATH", given)
    remove_empty_entries()
    assert os.environ.get("LD_LIBRARY_PATH") == (left or str(ROOT / "dsreason"))
    assert name == "LD_LIBRARY_PATH" or os.environ.get(name) == left


def test_opencv_library_path_excludes_current_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    remove_empty_entries()
    entries = ("/cv2/../../lib64:" + os.environ.get("LD_LIBRARY_PATH", "")).split(":")  # as cv2's __init__.py sets it
    assert "" not in entries
    assert not list((ROOT / "dsreason").glob("*.so*"))


@pytest.mark.parametrize("named", [".", "here"])
def test_folder_named_in_pythonpath_is_kept(tmp_path: Path, named: str) -> None:
    value = python_path(tmp_path if named == "here" else named)
    path, environment = shown(tmp_path, PYTHONPATH=value)
    assert str(tmp_path) in path
    assert environment["PYTHONPATH"] == value


@pytest.mark.parametrize(("hosts", "stays"), [("1", True), ("2", False)])
def test_folder_from_multi_host_deepspeed_is_removed(tmp_path: Path, hosts: str, stays: bool) -> None:
    path, environment = shown(tmp_path, PYTHONPATH=python_path(tmp_path), CROSS_SIZE=hosts)
    assert (str(tmp_path) in path) is stays
    assert (environment["PYTHONPATH"] == str(ROOT)) is not stays


def test_packages_in_current_folder_stay_importable(tmp_path: Path) -> None:
    libraries = next(path for path in map(Path, sys.path) if path.name == "site-packages")
    path, _ = shown(libraries)
    assert str(libraries) in path


def test_subprocesses_ignore_the_current_folder(planted: Path, tmp_path: Path) -> None:
    _, environment = shown(tmp_path)
    started = subprocess.run(
        [sys.executable, "-c", "import typing, json, token"],
        cwd=planted,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert (started.returncode, started.stderr) == (0, "")
    assert not (tmp_path / "ran").exists()


def test_pythonsafepath_set_by_user_is_kept(tmp_path: Path) -> None:
    _, environment = shown(tmp_path, PYTHONSAFEPATH="1")
    assert environment["PYTHONSAFEPATH"] == "1"


def test_uninstalled_checkout_runs_from_its_folder(tmp_path: Path) -> None:
    (tmp_path / "dsreason").symlink_to(ROOT / "dsreason")
    code = f"import sys; sys.path[1:1] = []; {SHOW}"
    remaining = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONSAFEPATH")}
    ended = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=remaining, capture_output=True, text=True)
    path, environment = json.loads(ended.stdout)
    assert path[0] in ("", str(tmp_path))
    assert "PYTHONSAFEPATH" not in environment
