"""The comparison of a resumed run's rows with its original rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dsreason.train.common.run_folder import compare_rows

BEFORE = {"training": {"count": 8, "digest": "aa"}, "held-out": {"count": 2, "digest": "bb"}}


def warned(now: dict[str, Any], folder: Path, caplog: pytest.LogCaptureFixture, **record: Any) -> list[str]:
    (folder / "config.json").write_text(json.dumps({"config": {}, **record}))
    caplog.clear()
    compare_rows(folder / "checkpoints" / "step_3", now)
    return [
        message.partition(" rows differ from those that this run started with ")[2][:40] for message in caplog.messages
    ]


def test_only_changed_rows_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert warned(BEFORE, tmp_path, caplog, rows=BEFORE) == []
    fewer = BEFORE | {"training": {"count": 5, "digest": "cc"}}
    assert warned(fewer, tmp_path, caplog, rows=BEFORE) == ["(8 then, but 5 now), so its results will"]
    other = BEFORE | {"held-out": {"count": 2, "digest": "cc"}}
    assert warned(other, tmp_path, caplog, rows=BEFORE) == ["(the same number, but different content)"]


@pytest.mark.parametrize("record", [{}, {"rows": None}, {"rows": [1]}, {"rows": {}}], ids=str)
def test_missing_row_record_gives_no_warning(
    record: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert warned(BEFORE, tmp_path, caplog, **record) == []


def test_new_run_has_no_earlier_rows(caplog: pytest.LogCaptureFixture) -> None:
    assert compare_rows(None, BEFORE) == BEFORE
    assert caplog.messages == []


def test_row_record_of_first_start_is_kept(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"config": {}, "rows": BEFORE}))
    other = {"training": {"count": 5, "digest": "cc"}, "held-out": {"count": 0, "digest": "dd"}}
    assert compare_rows(tmp_path / "checkpoints" / "step_3", other) == BEFORE
