"""The report of used, kept and ignored columns."""

from __future__ import annotations

import json
from pathlib import Path

from dsreason.config.schema_data import SourceConfig
from dsreason.data.formats.column_use import find_column_use
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
    assert use.formats == {"conversation": 1, "question": 1}
    assert use.kept == {"site"}
    assert use.ignored == {"messages[].time"}
    assert {"messages", "messages[].loss", "question", "answer"} <= use.used
    assert use.describe().endswith("uses answer, messages, question; keeps site for rewards; ignores messages[].time")


def test_columns_ignored_by_own_adapter_are_reported(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(ADAPTER)
    (tmp_path / "rows.jsonl").write_text(
        json.dumps({"id": "1", "question": "q", "site": "n", "weight": 0, "extra": None})
    )
    use = find_column_use(
        open_source(SourceConfig(adapter=str(tmp_path / "own.py"), path=str(tmp_path / "rows.jsonl")))
    )
    assert (use.used, use.kept, use.ignored) == ({"id", "question"}, {"site"}, {"weight"})
