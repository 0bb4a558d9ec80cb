"""Every test here runs in a folder `here`, beside a folder `outside` that it must leave alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "flag").write_text("untouched")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("COSMOS_CACHE", str(tmp_path / "here" / "cache"))
    yield tmp_path / "here"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here", "outside"]
    assert [path.name for path in (tmp_path / "outside").iterdir()] == ["flag"]
    assert (tmp_path / "outside" / "flag").read_text() == "untouched"


@pytest.fixture
def executed(here: Path) -> Iterator[Path]:
    """A file that planted code would write."""
    yield here / "executed"
    assert not (here / "executed").exists()
