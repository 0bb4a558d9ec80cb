"""Ranks and launchers are killed at random moments; `--resume auto` then ends with the weights and exports of an undisturbed
run.

    pytest tests/integration/test_kills.py --all --kills 20      # kills per command; 1 in continuous integration

Two fifths of the kills happen while a checkpoint is written; the others happen during an export, during a step, and while the
ranks start.
"""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file

from tests.integration.command import COMMAND, metrics
from tests.integration.rows import write_mixed_rows
from tests.integration.test_dpo_gradients import write_pairs
from tests.integration.two_hosts import DEEPSPEED, TORCHRUN, Host, needs_hosts, needs_ssh, two_hosts, write_hostfile

pytestmark = pytest.mark.integration

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
export = "all"
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
MOMENTS = ("writing", "exporting", "step", "writing", "start")
TRACES = {"writing": "checkpoints/.saving_*/*", "exporting": "export/.*.partial"}
"""Moment → glob pattern of files in the run's folder that exist only at that moment."""
START_UP = 15.0
"""Approximate number of seconds from the start of the first rank to the first step."""
REWARD = "def vowels(completion, sample):\n    return sum(letter in 'aeiou' for letter in completion)\n"
GONE_WITHIN = 60.0
FOUND_WITHIN = 15.0


@dataclass(frozen=True)
class Where:
    """Place where a job runs: this machine, or two hosts that a launcher reaches."""

    hosts: Sequence[Host] = ()
    launcher: str = ""

    def calls(self, called: Sequence[str]) -> list[list[str]]:
        if not self.hosts:
            return [[*COMMAND, *called, "--nproc", str(RANKS)]]
        if self.launcher == "deepspeed":
            return [[*self.hosts[0].inside, *DEEPSPEED, "--module", "dsreason", *called]]
        return [[*host.inside, *TORCHRUN, "-m", "dsreason", *called] for host in self.hosts]

    def processes(self) -> set[int]:
        return {pid for host in self.hosts for pid in host.processes()}


class Job:
    """A call of the command, of `deepspeed` for two hosts, or of torchrun on each of two hosts; all calls write to the log."""

    def __init__(self, folder: Path, command: str, run: str, log: str, where: Where) -> None:
        self.before = where.processes()
        self.where = where
        called = [command, "--config", f"{command}.toml", "--output-dir", run, "--resume", "auto"]
        with (folder / log).open("w") as output:
            self.launchers = [
                psutil.Popen(call, cwd=folder, env=os.environ | {"DS_ACCELERATOR": "cpu"}, stdout=output, stderr=output)
                for call in where.calls(called)
            ]

    def started(self) -> list[psutil.Process]:
        """Return the processes that the launchers started.

        These are the ranks once there are at least `RANKS` of them; with `deepspeed`, all intermediate processes are included.
        """
        if self.where.launcher == "deepspeed":
            return self.others()
        return [child for launcher in self.launchers if launcher.is_running() for child in launcher.children()]

    def others(self) -> list[psutil.Process]:
        """Return all processes that have appeared on the hosts since the job began, except its launchers."""
        expected, result = {launcher.pid for launcher in self.launchers} | self.before, []
        for pid in sorted(self.where.processes() - expected):
            with suppress(psutil.NoSuchProcess):
                result.append(psutil.Process(pid))
        return result

    def runs(self) -> bool:
        return all(launcher.poll() is None for launcher in self.launchers)

    def kill_one(self, moments: random.Random, *, met: bool) -> str:
        """Kill a rank or a launcher, and return its name; all processes of the job must be gone a minute later.

        If the ranks had not `met` yet, a rank on the other host waits for a peer that never comes, until its time limit
        expires or it is killed, which this method does.
        """
        everything = [*self.launchers, *self.started()]
        victim, name = moments.choice(everything), ""
        with suppress(psutil.NoSuchProcess):
            name = victim.name()
            victim.send_signal(signal.SIGKILL)
        if self.where.hosts and not met:
            _, remaining = psutil.wait_procs(everything, timeout=FOUND_WITHIN)
            for launcher in {*remaining}.intersection(self.launchers):
                launcher.terminate()
        _, remaining = psutil.wait_procs([*everything, *self.others()], timeout=GONE_WITHIN)
        assert not remaining, remaining
        return name

    def wait(self) -> list[int]:
        return [launcher.wait(timeout=900) for launcher in self.launchers]


def newest(run: Path) -> int:
    """Return the step of the newest complete checkpoint, or 0 if there is none."""
    return max((int(file.parent.name.split("_")[1]) for file in run.glob("checkpoints/step_*/COMPLETE")), default=0)


def assert_resumed(log: str, run: Path, step: int) -> None:
    """Assert that a run whose newest checkpoint was at `step` did not resume from an earlier step."""
    if step:
        assert "starting a new run" not in log
        assert all(
            int(result) >= step for result in re.findall(rf"resumed from {run.name}/checkpoints/step_(\d+)", log)
        )
        assert log.count("resumed from") == log.count(f"resumed from {run.name}/checkpoints/step_")


def steps_of(run: Path) -> list[int]:
    result = metrics(run) if (run / "metrics.jsonl").exists() else []
    return [line["step"] for line in result if "train/loss" in line]


def wait_for_moment(job: Job, run: Path, moment: str, steps: int, moments: random.Random) -> None:
    """Wait until the given `moment` in the life of a job that began after `steps` steps, or until the job ends."""
    if moment == "start":
        while job.runs() and len(job.started()) < RANKS:
            time.sleep(0.01)
        time.sleep(moments.random() * START_UP)
        return
    goal = steps + moments.randrange(1, STEPS_PER_KILL)
    while job.runs() and newest(run) < goal:
        time.sleep(0.01)
    if moment == "step":
        time.sleep(moments.random() * 0.5)
        return
    while job.runs() and not list(run.glob(TRACES[moment])):
        time.sleep(0.0005)


def with_marks(*long: str, nightly: Sequence[str]) -> list[Any]:
    return [
        *(pytest.param(command, marks=pytest.mark.long) for command in long),
        *(pytest.param(command, marks=pytest.mark.nightly) for command in nightly),
    ]


def config_of(command: str, model: Path, rows: Path, steps: int) -> str:
    if command == "world":
        return WORLD.format(steps=steps)
    return COMMON.format(model=model, rows=rows, steps=steps) + OF_COMMAND[command]


@pytest.mark.parametrize("command", with_marks("sft", nightly=["grpo", "dpo", "world"]))
def test_killed_runs_end_like_undisturbed_runs(
    command: str, tiny_qwen2_5_vl: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    kill_and_compare(command, tiny_qwen2_5_vl, tmp_path, request.config.getoption("--kills"), Where())


@needs_hosts
@pytest.mark.parametrize(
    ("launcher", "command"),
    [
        pytest.param("torchrun", "grpo", marks=pytest.mark.long),
        pytest.param("torchrun", "sft", marks=pytest.mark.nightly),
        pytest.param("deepspeed", "sft", marks=[pytest.mark.nightly, needs_ssh]),
    ],
)
def test_runs_killed_on_one_host_end_like_undisturbed(
    launcher: str, command: str, tiny_qwen2_5_vl: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    write_hostfile(tmp_path)
    with two_hosts(tmp_path) as hosts:
        where = Where(hosts, launcher)
        kill_and_compare(command, tiny_qwen2_5_vl, tmp_path, request.config.getoption("--kills"), where)


def kill_and_compare(command: str, model: Path, folder: Path, kills: int, where: Where) -> None:
    rows = (write_pairs if command == "dpo" else write_mixed_rows)(folder / "data")
    steps = STEPS_PER_KILL * kills + 3
    (folder / f"{command}.toml").write_text(config_of(command, model, rows, steps))
    (folder / "rewards.py").write_text(REWARD)
    full = Job(folder, command, "whole", "whole.log", where)
    assert not any(full.wait()), (folder / "whole.log").read_text()

    moments, run, hits = random.Random(kills), folder / "run", dict.fromkeys(TRACES, 0)
    for kill in range(kills):
        log, moment = folder / f"{kill}.log", MOMENTS[kill % len(MOMENTS)]
        before, job = newest(run), Job(folder, command, "run", log.name, where)
        wait_for_moment(job, run, moment, before, moments)
        assert job.runs(), log.read_text()
        killed = job.kill_one(moments, met=moment != "start")
        for trace, files in TRACES.items():
            hits[trace] += bool(list(run.glob(files)))
        # DeepSpeed's runner treats a pdsh that was ended by a signal as successful.
        as_if_well = {2} if killed.startswith("pdsh") else {0, 2}
        assert not as_if_well.intersection(job.wait()), f"kill {kill} of {killed}: {log.read_text()}"
        assert newest(run) >= before, f"kill {kill} lost checkpoints"
        assert_resumed(log.read_text(), run, before)
    last = Job(folder, command, "run", "last.log", where)
    assert not any(last.wait()), (folder / "last.log").read_text()

    print(f"{command}: {kills} kills, {hits['writing']} while saving, {hits['exporting']} while exporting")
    assert hits["writing"] >= kills * 2 // 5
    assert steps_of(run) == steps_of(folder / "whole")
    assert exports_of(run) == exports_of(folder / "whole")
    for export in exports_of(run):
        expected, result = (load_file(r / "export" / export / EXPORTS[command]) for r in (folder / "whole", run))
        assert all(expected[name].equal(result[name]) for name in expected), export


def exports_of(run: Path) -> list[str]:
    return sorted(folder.name for folder in (run / "export").glob("[!.]*"))
