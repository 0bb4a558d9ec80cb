"""Ranks killed at random moments, checkpoint writing included: `--resume auto` ends with the undisturbed run's weights.

pytest tests/integration/test_kills.py --kills 25      # of each command; 1 in continuous integration

Half of the kills come while a checkpoint is written, a quarter at some moment of a step, a quarter while the ranks start.
"""

from __future__ import annotations

import random
import re
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file

from tests.integration.command import COMMAND, dsreason, metrics
from tests.integration.rows import write_mixed_rows
from tests.integration.test_dpo_gradients import write_pairs

pytestmark = [pytest.mark.integration, pytest.mark.long]

COMMON = """
[model]
path = "{model}"
gradient_checkpointing = false
[data]
adapter = "jsonl"
path = "{rows}"
workers = 1
vision.fps = 4.0
[optim]
lr = 1e-3
[validation]
before_training = false
generate = false
[checkpoint]
every = 1
keep = 2
[train]
epochs = 1000
max_steps = {steps}
micro_batch_size = 4
precision = "fp32"
"""
OF_COMMAND = {
    "sft": "global_batch_size = 4\n",
    "grpo": """
[grpo]
prompts_per_step = 2
num_generations = 4
kl_coef = 0.05
[rollout]
engine = "transformers"
max_completion_length = 6
self_test = false
[reward.functions]
"rewards.py:vowels" = 1.0
""",
    "dpo": """global_batch_size = 4
[lora]
rank = 4
[dpo]
loss = "mpo"
""",
}
WORLD = """
[model]
max_prompt_length = 64
gradient_checkpointing = false
[data]
frames = 9
height = 32
width = 32
limit = 16
[optim]
lr = 1e-3
[validation]
before_training = false
max_samples = 0
[checkpoint]
every = 1
keep = 2
keep_best = false
export_dtype = "fp32"
[train]
epochs = 1000
max_steps = {steps}
precision = "fp32"
ema_decay = 0.5
[world]
prompts_per_step = 2
num_generations = 2
sampling_steps = 4
window = 1
kl_coef = 0.1
[reward.functions]
brightness = 1.0
"""
EXPORTS = {
    "sft": "model.safetensors",
    "grpo": "model.safetensors",
    "dpo": "model.safetensors",
    "world": "transformer/diffusion_pytorch_model.safetensors",
}
RANKS = 2
STEPS_PER_KILL = 3
MOMENTS = ("writing", "step", "writing", "start")
START_UP = 15.0
"""Seconds from the first rank to the first step, about."""
REWARD = "def vowels(completion, sample):\n    return sum(letter in 'aeiou' for letter in completion)\n"
GONE_WITHIN = 60.0


def start(folder: Path, command: str, log: str) -> subprocess.Popen[str]:
    call = [
        *COMMAND,
        command,
        "--config",
        f"{command}.toml",
        "--nproc",
        str(RANKS),
    ]
    with (folder / log).open("w") as output:
        return subprocess.Popen(
            [*call, "--output-dir", "run", "--resume", "auto"], cwd=folder, stdout=output, stderr=output
        )


def newest(run: Path) -> int:
    """Step of the newest complete checkpoint, 0 where there is none."""
    return max((int(file.parent.name.split("_")[1]) for file in run.glob("checkpoints/step_*/COMPLETE")), default=0)


def assert_resumed(log: str, run: Path, step: int) -> None:
    """That a run whose newest checkpoint was of that step did not start anywhere before it."""
    if step:
        assert "starting fresh" not in log
        assert all(int(found) >= step for found in re.findall(rf"resumed from {run.name}/checkpoints/step_(\d+)", log))
        assert log.count("resumed from") == log.count(f"resumed from {run.name}/checkpoints/step_")


def steps_of(run: Path) -> list[int]:
    found = metrics(run) if (run / "metrics.jsonl").exists() else []
    return [line["step"] for line in found if "train/loss" in line]


def wait_for_moment(process: subprocess.Popen[str], run: Path, moment: str, steps: int, moments: random.Random) -> None:
    """Until the `moment` of the life of a process that began after `steps` steps, or until it ends."""
    if moment == "start":
        while process.poll() is None and len(psutil.Process(process.pid).children()) < RANKS:
            time.sleep(0.01)
        time.sleep(moments.random() * START_UP)
        return
    goal = steps + moments.randrange(1, STEPS_PER_KILL)
    while process.poll() is None and newest(run) < goal:
        time.sleep(0.01)
    if moment == "step":
        time.sleep(moments.random() * 0.5)
        return
    while process.poll() is None and not list(run.glob("checkpoints/.saving_*/*")):
        time.sleep(0.0005)


def config_of(command: str, model: Path, rows: Path, steps: int) -> str:
    if command == "world":
        return WORLD.format(steps=steps)
    return COMMON.format(model=model, rows=rows, steps=steps) + OF_COMMAND[command]


@pytest.mark.parametrize("command", EXPORTS)
def test_killed_runs_continue_and_end_as_the_undisturbed(
    command: str, tiny_qwen2_5_vl: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    kills = request.config.getoption("--kills")
    rows = (write_pairs if command == "dpo" else write_mixed_rows)(tmp_path / "data")
    steps = STEPS_PER_KILL * kills + 3
    (tmp_path / f"{command}.toml").write_text(config_of(command, tiny_qwen2_5_vl, rows, steps))
    (tmp_path / "rewards.py").write_text(REWARD)
    options = ["--config", f"{command}.toml", "--output-dir", "whole", "--nproc", RANKS]
    whole = dsreason(command, *options, cwd=tmp_path)
    assert whole.returncode == 0, whole.stderr

    moments, run, hits = random.Random(kills), tmp_path / "run", 0
    for kill in range(kills):
        log = tmp_path / f"{kill}.log"
        before, process = newest(run), start(tmp_path, command, log.name)
        wait_for_moment(process, run, MOMENTS[kill % len(MOMENTS)], before, moments)
        assert process.poll() is None, log.read_text()
        rank = moments.choice(psutil.Process(process.pid).children())
        rank.send_signal(signal.SIGKILL)
        process.wait(timeout=GONE_WITHIN)
        hits += bool(list(run.glob("checkpoints/.saving_*")))
        assert process.returncode not in (0, 2), f"kill {kill}"
        assert newest(run) >= before, f"kill {kill} lost checkpoints"
        assert_resumed(log.read_text(), run, before)
    process = start(tmp_path, command, "last.log")
    assert process.wait(timeout=900) == 0, (tmp_path / "last.log").read_text()

    print(f"{command}: {kills} kills, {hits} while a checkpoint was being written")
    assert hits >= kills * 2 // 5
    assert steps_of(run) == steps_of(tmp_path / "whole")
    expected, found = (load_file(r / "export/final" / EXPORTS[command]) for r in (tmp_path / "whole", run))
    assert all(expected[name].equal(found[name]) for name in expected)
