"""Imports of user code and libraries: only user code finds modules in its own folder and in the current folder."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dsreason.errors import ConfigError
from dsreason.user_code import FINDER, import_file, import_module

Write = Callable[..., Path]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, which is not on the import path; modules that a test imports are removed afterwards."""
    before = set(sys.modules)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    monkeypatch.setattr(sys, "meta_path", [finder for finder in sys.meta_path if finder is not FINDER])
    monkeypatch.setattr(FINDER, "folders", {})
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    yield tmp_path / "here"
    for name in set(sys.modules) - before:
        del sys.modules[name]


@pytest.fixture
def write(here: Path) -> Write:
    def write(name: str, text: str) -> Path:
        file = here / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return file

    return write


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed library that looks for an optional package when it is imported, and again later."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "a_library.py").write_text(
        "import importlib, importlib.util\n"
        "def optional(name='optional_package'):\n"
        "    try:\n"
        "        importlib.import_module(name)\n"
        "    except ModuleNotFoundError:\n"
        "        return importlib.util.find_spec(name) is not None\n"
        "    return True\n"
        "try:\n"
        "    import optional_package\n"
        "    FOUND = True\n"
        "except ModuleNotFoundError:\n"
        "    FOUND = optional()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path / "site"))


def value(path: Path) -> object:
    return import_file(path, "reward").value()


def test_file_can_import_neighbours_at_any_time(write: Write) -> None:
    write("helper.py", "ONE = 1")
    write("late.py", "TWO = 2")
    file = write("own.py", "import helper\ndef value():\n    from late import TWO\n    return helper.ONE + TWO\n")
    assert value(file) == 3


def test_own_folder_precedes_current_folder_in_imports(write: Write, tmp_path: Path) -> None:
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "beside.py").write_text("PLACE = 'beside'")
    write("beside.py", "PLACE = 'here'")
    write("only_here.py", "PLACE = 'here'")
    (folder / "own.py").write_text("import beside, only_here\ndef value():\n    return beside.PLACE, only_here.PLACE\n")
    assert value(folder / "own.py") == ("beside", "here")


@pytest.mark.parametrize("init", [True, False], ids=["package", "namespace"])
def test_imported_file_can_import_other_files(write: Write, init: bool) -> None:
    if init:
        write("parts/__init__.py", "")
    write("parts/deep.py", "from parts.deeper import ONE\nimport helper\nSUM = ONE + helper.ONE\n")
    write("parts/deeper.py", "from . import third\nONE = third.ONE\n")
    write("parts/third.py", "ONE = 1")
    write("helper.py", "ONE = 1")
    file = write("own.py", "from parts import deep\ndef value():\n    return deep.SUM\n")
    assert value(file) == 2


def test_module_is_importable_by_name(write: Write) -> None:
    write("helper.py", "ONE = 1")
    file = write("own.py", "import importlib\ndef value():\n    return importlib.import_module('helper').ONE\n")
    assert value(file) == 1


@pytest.mark.usefixtures("library")
def test_libraries_never_find_modules_of_the_folder(write: Write) -> None:
    write("optional_package.py", "raise RuntimeError('planted')")
    write("helper.py", "import a_library")
    file = write(
        "own.py",
        "import helper, a_library\n"
        "WHILE = a_library.FOUND or a_library.optional()\n"
        "def value():\n    return WHILE, a_library.optional()\n",
    )
    assert value(file) == (False, False)
    assert sys.modules["a_library"].optional() is False
    assert importlib.util.find_spec("optional_package") is None


def test_local_files_never_hide_installed_modules(write: Write, library: None) -> None:
    for name in ("json", "a_library", "colorsys", "numpy"):
        write(f"{name}.py", "raise RuntimeError('planted')")
    file = write(
        "own.py",
        "import json, colorsys, a_library, numpy\ndef value():\n    return json.dumps([int(numpy.ones(1)[0])])\n",
    )
    assert value(file) == "[1]"


def test_import_path_is_unchanged(write: Write) -> None:
    before = list(sys.path)
    write("named/inner.py", "import helper\nONE = helper.ONE")
    write("helper.py", "ONE = 1")
    assert value(write("own.py", "def value():\n    return 1\n")) == 1
    assert import_module("named.inner", "reward", [], "").ONE == 1
    assert sys.path == before


def test_missing_module_is_reported_as_usual(write: Write) -> None:
    file = write("own.py", "import nothing_of_the_kind")
    with pytest.raises(
        ConfigError, match="cannot be imported: ModuleNotFoundError: No module named 'nothing_of_the_kind'"
    ):
        import_file(file, "reward")


def test_installed_module_precedes_current_folder_module(write: Write) -> None:
    write("colorsys.py", "raise RuntimeError('planted')")
    write("own_package.py", "ONE = 1")
    assert import_module("colorsys", "reward", [], "").rgb_to_hsv(0, 0, 0) == (0, 0, 0)
    assert import_module("own_package", "reward", [], "").ONE == 1


def test_module_not_in_config_is_not_importable(write: Write) -> None:
    write("own.py", "ONE = 1")
    write("other.py", "ONE = 1")
    assert import_module("own", "reward", [], "").ONE == 1
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("other")


def test_files_with_dotted_names_are_separate_modules(write: Write, tmp_path: Path) -> None:
    for folder in ("a", "b"):
        write(f"{folder}/helper_{folder}.py", "")
    first = write("a/own.first.py", "import helper_a\ndef value():\n    return 1\n")
    second = write("b/own.second.py", "import helper_b\ndef value():\n    return 2\n")
    assert (value(first), value(second)) == (1, 2)


def test_exit_during_import_is_reported(write: Write) -> None:
    file = write("script.py", "import sys; sys.exit(0)")
    for load in (lambda: import_file(file, "reward"), lambda: import_module("script", "reward", [], "")):
        with pytest.raises(ConfigError, match=r"reward: \S* cannot be imported: SystemExit: 0"):
            load()
