"""The digest of rows, which depends on the rows but not on their folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from dsreason.config.schema_data import DataConfig
from dsreason.data.sources import open_datasets
from dsreason.train.common.digest import MOST_ROWS, compute_rows_digest, compute_samples_digest

ROWS = [
    {
        "id": str(i),
        "image": f"images/{i}.png",
        "question": f"what is {i}?",
        "answer": "a",
        "options": {"A": "a", "B": "b"},
    }
    for i in range(8)
]


def digest_of(rows: list[dict[str, Any]], folder: Path) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return compute_samples_digest(open_datasets(DataConfig(adapter="jsonl", path=str(folder / "rows.jsonl")))[0])


@pytest.mark.parametrize(
    "changed",
    [
        ROWS[::-1],
        ROWS[:7],
        [*ROWS, ROWS[0]],
        [*ROWS[:7], ROWS[7] | {"answer": "b"}],
        [*ROWS[:7], ROWS[7] | {"question": "what else?"}],
        [*ROWS[:7], ROWS[7] | {"image": "images/8.png"}],
        [*ROWS[:7], ROWS[7] | {"options": {"A": "b", "B": "a"}}],
    ],
    ids=["reversed", "fewer", "more", "answer", "question", "image", "options"],
)
def test_changed_rows_change_the_digest(changed: list[dict[str, Any]], tmp_path: Path) -> None:
    assert digest_of(changed, tmp_path) != digest_of(ROWS, tmp_path)


def test_digest_does_not_depend_on_folder(tmp_path: Path) -> None:
    before = digest_of(ROWS, tmp_path / "here")
    assert before["count"] == 8
    shutil.move(tmp_path / "here", tmp_path / "there")
    assert digest_of(ROWS, tmp_path / "there") == before


def test_unusable_row_is_counted(tmp_path: Path) -> None:
    assert digest_of([*ROWS, {"id": "8"}], tmp_path)["count"] == 9


@pytest.mark.parametrize("part", [{"text": "x"}, {"type": "image"}, {"type": "text"}, 3], ids=repr)
def test_digest_accepts_malformed_parts(part: Any, tmp_path: Path) -> None:
    """Check that the digest accepts any part, because bad rows are reported or skipped only when they are used."""
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    row = {"chosen": messages, "rejected": [messages[0], {"role": "assistant", "content": [part]}]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    config = DataConfig(adapter="preferences", path=str(tmp_path / "rows.jsonl"))
    assert compute_samples_digest(open_datasets(config)[0])["count"] == 1


def test_evenly_spaced_rows_are_digested() -> None:
    read: list[int] = []
    compute_rows_digest(10 * MOST_ROWS, read.append)
    assert read == list(range(0, 10 * MOST_ROWS, 10))
