"""Fixtures that run every test of this folder in a folder `here`, beside a folder `outside` that it must not touch.

| target of the attack | tests |
|---|---|
| 1 code in the current folder | test_surroundings, test_rows, test_weights, integration/test_current_folder |
| 2 local data that refer to other files | test_own_files, test_rows, test_archives |
| 3 servers and stores | test_servers, test_stores, test_reward_server |
| 4 media that take excessive time or memory | test_media_time, test_images, test_videos |
| 5 limits of the machine | test_machine_limits, test_small_files, unit/data/test_loader |
| 6 signals | test_surroundings, unit/job, integration/test_stopping |
| 7 locks, markers and states that are not regular files | test_small_files |
| 8 the terminal and the logs | test_terminal, test_machine_limits, test_surroundings |
| 9 user mistakes | test_configurations, test_model_folders, test_surroundings, test_small_files |
| 10 files of a run | test_checkpoints, test_links, test_clock |
| 10 processes | unit/rewards/test_scoring, unit/job, integration/test_kills |
| 10 regular expressions | test_long_texts, test_regular_expressions |
"""

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
    """A file that only planted code would write."""
    yield here / "executed"
    assert not (here / "executed").exists()
