"""The report that lists used, kept and ignored columns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dsreason.config.schema_data import SourceConfig
from dsreason.data.formats.column_use import find_column_use
from dsreason.data.formats.row_formats import describe_detection
from dsreason.data.sources import open_source

ADAPTER = """
from dsreason.data.types import Sample

def to_sample(row):
    return Sample(row["id"], [{"role": "user", "content": row["question"]}], meta={"site": row["site"]})
"""


def test_columns_are_reported_by_use(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "Up?", "time": 3}, {"role": "assistant", "content": "Yes.", "loss": True}]
    rows = [{"messages": turns, "site": "north"}, {"question": "Up?", "answer": "yes"}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    use = find_column_use(open_source(SourceConfig(path=str(tmp_path / "rows.jsonl"))))
    assert use.formats == {
        "format conversation (recognised by messages)": 1,
        "format question (recognised by question)": 1,
    }
    assert use.kept == {"site"}
    assert use.ignored == {"messages[].time"}
    assert {"messages", "messages[].loss", "question", "answer"} <= use.used
    assert use.describe().endswith("uses answer, messages, question; keeps site for rewards; ignores messages[].time")


def test_columns_ignored_by_user_adapter_are_reported(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(ADAPTER)
    (tmp_path / "rows.jsonl").write_text(
        json.dumps({"id": "1", "question": "q", "site": "n", "weight": 0, "extra": None})
    )
    use = find_column_use(
        open_source(SourceConfig(adapter=str(tmp_path / "own.py"), path=str(tmp_path / "rows.jsonl")))
    )
    assert (use.used, use.kept, use.ignored) == ({"id", "question"}, {"site"}, {"weight"})


@pytest.mark.parametrize(
    ("row", "description"),
    [
        ({"query": "Up?", "response": "Yes."}, "format instruction (recognised by query)"),
        ({"input": "Up?", "output": "Yes."}, "format instruction (recognised by input, output)"),
        (
            {"messages": [], "rejected_response": "No.", "question": "Up?"},
            "format preference (recognised by rejected_response; to read conversation or question instead, "
            'set data.adapter = "auto:conversation")',
        ),
    ],
)
def test_detection_names_columns_and_alternatives(row: dict[str, Any], description: str) -> None:
    assert describe_detection(row) == description


def test_report_says_how_many_rows_were_read(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"question": "Up?", "answer": "yes"}\n' * 3)
    source = open_source(SourceConfig(path=str(tmp_path / "rows.jsonl")))
    assert find_column_use(source, limit=2).describe().endswith("; read 2 of 3 rows for this list")
    assert "read" not in find_column_use(source, limit=3).describe()
