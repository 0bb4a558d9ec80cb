"""An image that exceeds its time limit makes only its row unusable, whichever command reads it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from tests.integration.command import dsreason, metrics

pytestmark = [pytest.mark.integration, pytest.mark.long]

CONFIG = """
[model]
path = "{model}"
gradient_checkpointing = false
[data]
adapter = "jsonl"
path = "rows.jsonl"
workers = 1
[train]
max_steps = 1
global_batch_size = 4
precision = "fp32"
"""
TOLD = "wide.webp: reading it took "


def test_slow_image_is_reported_or_skipped(
    tmp_path: Path, tiny_qwen2_5_vl: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Image.new("RGB", (4000, 3000)).save(tmp_path / "wide.webp", lossless=True)  # 12 million pixels in 526 bytes
    monkeypatch.setenv("DSREASON_MEDIA_SECONDS", "0")  # only the time limit that depends on the file size remains
    rows = [{"id": str(i), "question": "What colour?", "answer": "red"} for i in range(4)]
    rows[2]["image"] = "wide.webp"
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "run.toml").write_text(CONFIG.format(model=tiny_qwen2_5_vl))

    validated = dsreason("data", "validate", "--config", "run.toml", cwd=tmp_path)
    assert validated.returncode == 1
    assert "rows.jsonl, row 3: " in validated.stdout and TOLD in validated.stdout

    sft = ("sft", "--config", "run.toml", "--nproc", 1, "--output-dir")
    stopped = dsreason(*sft, "stopped", cwd=tmp_path)
    assert stopped.returncode == 2
    assert "rows.jsonl, row 3: " in stopped.stderr and TOLD in stopped.stderr and "Traceback" not in stopped.stderr
    skipped = dsreason(*sft, "skipped", "--set", "data.on_bad_row=skip", cwd=tmp_path)
    assert skipped.returncode == 0, skipped.stderr
    assert [line["train/skipped_rows"] for line in metrics(tmp_path / "skipped")] == [1]

    names = (
        "--model",
        tiny_qwen2_5_vl,
        "--data",
        "rows.jsonl",
        "--adapter",
        "jsonl",
        "--set",
        "model.engine=transformers",
    )
    evaluated = dsreason("eval", *names, "--results-dir", "results", cwd=tmp_path)
    assert evaluated.returncode == 0, evaluated.stderr
    assert "unanswered questions: 1, for example, rows/2/" in evaluated.stdout + evaluated.stderr
    assert TOLD in evaluated.stdout + evaluated.stderr
