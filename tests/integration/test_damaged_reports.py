"""Runs that resume beside damaged reports of their own: each ends with the weights of the undisturbed run."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.integration.command import dsreason, metrics
from tests.integration.rows import write_mixed_rows
from tests.integration.test_kills import COMMON, EXPORTS, OF_COMMAND, REWARD, with_marks
from tests.integration.test_world import RUN as WORLD

pytestmark = pytest.mark.integration

STEPS = 2
VALIDATED = "[validation]\nevery = 1\nmax_samples = 4\nmax_completion_length = 4\n"


def write_config(command: str, model: Path, folder: Path) -> None:
    if command == "world":
        text = WORLD.replace("max_steps = 4", f"max_steps = {STEPS}").replace("every = 2", "every = 1")
        text = text.replace("[validation]\n", "[validation]\nevery = 1\n")
    else:
        rows = write_mixed_rows(folder / "data")
        text = COMMON.format(model=model, rows=rows, steps=STEPS) + OF_COMMAND[command]
        text = text.replace('export = "all"\n', "").replace("[grpo]", "[grpo]\noptimizer_steps_per_rollout = 1")
        if command == "sft":
            text = re.sub(r"(?s)\[validation\].*?(?=\[)", VALIDATED, text).replace(
                'adapter = "jsonl"', 'adapter = "jsonl"\nvalidation = 4'
            )
    (folder / "run.toml").write_text(text)
    (folder / "rewards.py").write_text(REWARD)


def replace_by_folder(file: Path) -> None:
    file.unlink()
    (file / "inner").mkdir(parents=True)


def spoil_metrics(file: Path) -> None:
    lines = file.read_bytes().splitlines(keepends=True)
    damaged = [
        re.sub(rb'"train/loss": [^,]*', b'"train/loss": 1e999', lines[0]),
        b'{"step": 1, "train/loss": "low"}\n',
        b"\xff\xfe\n",
        *lines,
    ]
    file.write_bytes(b"".join(damaged))


DAMAGES: dict[str, Callable[[Path], object]] = {
    "metrics.jsonl": spoil_metrics,
    "validation/step_1.jsonl": lambda file: file.write_bytes(file.read_bytes()[:-20]),
    "validation/step_2.jsonl": replace_by_folder,
    "rollouts/step_1.jsonl": replace_by_folder,
    "world.html": replace_by_folder,
    "logs/rank_0.log": lambda file: file.write_bytes(b"\xff\xfe\x00"),
    "UPLOADED.json": lambda file: file.write_bytes(b'{"s3://bucket/mine": 3}'),
}


@pytest.mark.parametrize("command", with_marks("sft", nightly=["grpo", "world"]))
def test_run_resumes_beside_damaged_reports(command: str, tiny_qwen2_5_vl: Path, tmp_path: Path) -> None:
    write_config(command, tiny_qwen2_5_vl, tmp_path)
    start = (command, "--config", "run.toml", "--output-dir", "run", "--nproc", 1)
    ended = dsreason(*start, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    run, weights = tmp_path / "run", Path("export", "final", EXPORTS[command])
    expected, logged = load_file(run / weights), metrics(run)

    (run / "UPLOADED.json").write_text("{}")
    damaged = [name for name in DAMAGES if (run / name).is_file()]
    assert len(damaged) >= 4, (damaged, sorted(run.rglob("*.jsonl")))
    for name in damaged:
        DAMAGES[name](run / name)
    for file in (run / "tensorboard").iterdir():
        file.write_bytes(bytes(100))
    ended = dsreason(*start, "--resume", "run/checkpoints/step_1", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "Traceback" not in ended.stderr + ended.stdout
    assert ended.stderr.count("metrics.jsonl: damaged lines are left out") == 1
    assert ended.stderr.count("validation/step_1.jsonl") == (command == "world")

    result = load_file(run / weights)
    assert all(expected[name].equal(result[name]) for name in expected)
    last = [line for line in metrics(run) if line["step"] == STEPS]
    assert [line["train/loss"] for line in last] == [line["train/loss"] for line in logged if line["step"] == STEPS]
    if command == "world":
        assert (run / "world.html").is_file() and (run / "world.html.1.unusable").is_dir()
    if (run / "validation").is_dir():
        rows = (run / "validation" / "step_2.jsonl").read_text().splitlines()
        assert rows and all(json.loads(row) for row in rows)
