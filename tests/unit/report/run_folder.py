"""A small folder like those that runs write."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
PROMPT = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


def make_completion(text: str, reward: float | None, *, prompt: str = "2 + 2?", **changes: Any) -> Row:
    row = {
        "id": prompt,
        "prompt": PROMPT.format(prompt),
        "completion": text,
        "length": len(text.split()),
        "finish_reason": "stop",
        "reference": "4",
        "reward": reward,
        "rewards": {"exact_match": reward},
        "advantage": 0.0 if reward is None else reward - 0.5,
        "trained": True,
        "media": [],
    }
    return row | changes


def make_answer(row: int, text: str, *, correct: bool | None, **changes: Any) -> Row:
    answer = {
        "row": row,
        "id": f"row-{row}",
        "prompt": PROMPT.format("2 + 2?"),
        "completion": text,
        "reference": "4",
        "correct": correct,
        "finish_reason": "stop",
        "media": [],
        "rewards": {"": float(bool(correct)), "exact_match": float(bool(correct))},
    }
    return answer | changes


def write_run(
    folder: Path,
    *,
    metrics: Sequence[Row] = (),
    rollouts: dict[int, Sequence[Row]] | None = None,
    answers: dict[int, Sequence[Row]] | None = None,
    log: str = "",
    **config: Any,
) -> Path:
    """Write a run with these files; `config` replaces sections of its configuration."""
    sections = {"model": {"path": "tiny:qwen3", "freeze": []}, "data": {"path": "rows.jsonl"}, "lora": {"rank": 0}}
    record = {
        "config": sections | config,
        "command": ["grpo", "--config=run.toml", "--output-dir=run"],
        "world_size": 2,
        "versions": {"torch": "2.13.0"},
        "rows": {"training": {"count": 2560, "digest": "0"}},
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(record))
    write_lines(folder / "metrics.jsonl", metrics)
    for kind, files in (("rollouts", rollouts), ("validation", answers)):
        for step, rows in (files or {}).items():
            write_lines(folder / kind / f"step_{step}.jsonl", rows)
    if log:
        (folder / "logs").mkdir(exist_ok=True)
        (folder / "logs" / "rank_0.log").write_text(log)
    return folder


def write_lines(file: Path, rows: Sequence[Row]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
