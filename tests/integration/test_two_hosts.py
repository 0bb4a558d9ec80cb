"""A job on two hosts, started by `deepspeed --hostfile` or torchrun, gives the same results as a single-host job, or reports
the reason why it cannot."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from tests.integration import two_hosts
from tests.integration.command import dsreason, metrics
from tests.integration.rows import write_mixed_rows
from tests.integration.two_hosts import (
    ADDRESSES,
    ANY_TORCHRUN,
    DEEPSPEED,
    MEETING,
    NAMES,
    TORCHRUN,
    Host,
    needs_ssh,
    write_hostfile,
)

pytestmark = [*two_hosts.marks, pytest.mark.long]

MINUTE = 60.0
PORT_OF_STORE, OTHER_PORTS = "29500", ["1-29499", "29501-65534"]
CONFIG = """
model.path = "{model}"
data.adapter = "jsonl"
data.path = "{rows}"
data.workers = 1
data.vision.fps = 4.0
optim.lr = 1e-3
optim.schedule = "constant"
optim.warmup = 0
train.epochs = 2
train.global_batch_size = 4
train.micro_batch_size = 2
train.precision = "fp32"
"""
RANKS = """
import logging, os, signal, sys, time
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from dsreason.errors import DsReasonError
from dsreason.job import hosts, launch

launch.enter_rank()
from dsreason.job import lifeline
from dsreason.job.logs import setup_logs
from dsreason.job.watchdog import Watchdog
from dsreason.job.ranks import init_world

def work():
    world = init_world()
    setup_logs(Path.cwd(), world.rank)
    with Watchdog(world, time_limit=600.0) as watchdog, watchdog.track_phase("train"):
        Path(f"token_{world.rank}").write_text(os.environ.get("HF_TOKEN", ""))
        Path(f"ready_{world.rank}").touch()
        while not all(Path(f"ready_{rank}").exists() for rank in (0, 1)):
            time.sleep(0.1)
        if world.rank == 1 and how == "die":
            die()
        time.sleep(600)

def die():
    Path("since").write_text(str(time.time()))
    os.kill(os.getpid(), signal.SIGKILL)

how = sys.argv[-1]
hosts.JOIN_TIMEOUT = timedelta(seconds=15 if how == "join" else 600)
try:
    with lifeline.join_with_lifeline() if how in ("early", "die") else nullcontext():
        if how == "early" and os.environ["RANK"] == "1":
            die()
        work()
except DsReasonError as error:
    sys.exit(launch.report(error))
"""


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Host, Host]]:
    with two_hosts.two_hosts(tmp_path_factory.mktemp("ssh")) as hosts:
        yield hosts


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_qwen2_5_vl: Path) -> Path:
    """Create the folder in which the launchers run.

    The folder contains the run configuration, the hostfile, and the variables that every host gets.
    """
    folder = tmp_path_factory.mktemp("hosts")
    rows = write_mixed_rows(folder / "data")
    (folder / "run.toml").write_text(CONFIG.format(model=tiny_qwen2_5_vl, rows=rows))
    write_hostfile(folder)
    return folder


@pytest.fixture(scope="module")
def expected_losses(folder: Path) -> list[float]:
    ended = dsreason("sft", "--config", "run.toml", "--output-dir", "one_host", "--nproc", 2, cwd=folder)
    assert ended.returncode == 0, ended.stderr
    return losses(folder / "one_host")


def losses(output_dir: Path) -> list[float]:
    return [line["train/loss"] for line in metrics(output_dir)]


def deepspeed(
    hosts: tuple[Host, Host], folder: Path, *command: str, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `deepspeed --hostfile` on the first host."""
    value = os.environ | (environment or {})
    start = [*hosts[0].inside, *DEEPSPEED, *command]
    return subprocess.run(start, check=False, cwd=folder, env=value, capture_output=True, text=True, timeout=900)


def torchrun(
    hosts: tuple[Host, Host], folder: Path, *command: str, environment: Mapping[str, str] | None = None
) -> list[subprocess.CompletedProcess[str]]:
    """Run `torchrun` on both hosts, which connect at the first host."""
    start = [*TORCHRUN, *command]
    return on_both(hosts, folder, [start, start], environment or {})


def on_both(
    hosts: tuple[Host, Host], folder: Path, commands: list[list[str]], environment: Mapping[str, str]
) -> list[subprocess.CompletedProcess[str]]:
    """Run one command on each host at the same time."""
    value = os.environ | {"DS_ACCELERATOR": "cpu"} | environment
    with ExitStack() as stack:
        started = [
            stack.enter_context(
                subprocess.Popen(
                    [*host.inside, *command],
                    cwd=folder,
                    env=value,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
            for host, command in zip(hosts, commands, strict=True)
        ]
        texts = [process.communicate(timeout=900)[0] for process in started]
    return [
        subprocess.CompletedProcess(process.args, process.returncode, text)
        for process, text in zip(started, texts, strict=True)
    ]


@needs_ssh
def test_hostfile_run_reproduces_single_host_losses(
    folder: Path, hosts: tuple[Host, Host], expected_losses: list[float]
) -> None:
    ended = deepspeed(
        hosts, folder, "--module", "dsreason", "sft", "--config", "run.toml", "--output-dir", "hostfile_run"
    )
    assert ended.returncode == 0, ended.stderr
    assert len(expected_losses) == 4
    # The number of threads per rank may differ.
    assert losses(folder / "hostfile_run") == pytest.approx(expected_losses, rel=1e-5)
    assert (folder / "hostfile_run/export/final/model.safetensors").is_file()
    assert all((folder / "hostfile_run/logs" / f"rank_{rank}.log").is_file() for rank in range(2))


@pytest.mark.long
def test_torchrun_run_reproduces_single_host_losses(
    folder: Path, hosts: tuple[Host, Host], expected_losses: list[float]
) -> None:
    ended = torchrun(hosts, folder, "-m", "dsreason", "sft", "--config", "run.toml", "--output-dir", "torchrun_run")
    assert [host.returncode for host in ended] == [0, 0], ended
    assert losses(folder / "torchrun_run") == pytest.approx(expected_losses, rel=1e-5)


@needs_ssh
def test_config_error_is_reported_by_every_host(folder: Path, hosts: tuple[Host, Host]) -> None:
    ended = deepspeed(
        hosts, folder, "--module", "dsreason", "sft", "--config", "run.toml", "--set", "train.max_stepz=4"
    )
    assert ended.returncode == 2
    message = "error: --set train.max_stepz=4: train.max_stepz: unknown key; did you mean train.max_steps?"
    assert all(f"{name}: {message}" in ended.stderr for name in NAMES)


@pytest.fixture
def ranks(folder: Path) -> str:
    for file in ("ready_0", "ready_1", "since"):
        (folder / file).unlink(missing_ok=True)
    (folder / "ranks.py").write_text(RANKS)
    return "ranks.py"


@pytest.mark.parametrize(
    ("launcher", "how", "place"),
    [
        pytest.param("torchrun", "die", 'in phase "train"', marks=pytest.mark.nightly),
        pytest.param("deepspeed", "die", 'in phase "train"', marks=needs_ssh),
        ("torchrun", "early", "during startup"),
    ],
)
def test_killed_rank_stops_both_hosts(
    folder: Path, hosts: tuple[Host, Host], ranks: str, launcher: str, how: str, place: str
) -> None:
    before = [host.processes() for host in hosts]
    if launcher == "torchrun":
        first, second = torchrun(hosts, folder, ranks, how)
        assert first.returncode != 0
        assert second.returncode != 0
        stdout = first.stdout
    else:
        ended = deepspeed(
            hosts, folder, ranks, how, environment={"HF_TOKEN": "hf_secret", "DSREASON_SHARE_CREDENTIALS": "1"}
        )
        assert ended.returncode != 0
        stdout = ended.stderr
        # The shell's variables reached the ranks that pdsh started, but did not appear on a command line, which
        # `deepspeed` logs.
        assert [(folder / f"token_{rank}").read_text() for rank in (0, 1)] == ["hf_secret", "hf_secret"]
        lines = [
            line
            for line in stdout.splitlines()
            if ": these variables were copied from where the job was started: " in line
        ]
        assert len(lines) == 2
        assert all("HF_TOKEN" in line for line in lines)
        assert "hf_secret" not in stdout + ended.stdout
    deadline = float((folder / "since").read_text()) + MINUTE
    while [host.processes() for host in hosts] != before:
        assert time.time() < deadline, stdout
        time.sleep(0.2)
    assert f"rank 1 on node-1 died {place} (it was killed, or its host is down)" in stdout


@pytest.mark.parametrize(
    "launcher", [pytest.param("torchrun", marks=pytest.mark.long), pytest.param("deepspeed", marks=needs_ssh)]
)
def test_killed_launcher_stops_both_hosts(folder: Path, hosts: tuple[Host, Host], ranks: str, launcher: str) -> None:
    before = [host.processes() for host in hosts]
    if launcher == "torchrun":
        commands = [[*host.inside, *TORCHRUN, ranks, "stay"] for host in hosts]
    else:
        commands = [[*hosts[0].inside, *DEEPSPEED, ranks, "stay"]]
    value = os.environ | {"DS_ACCELERATOR": "cpu"}
    with ExitStack() as stack:
        quiet = subprocess.DEVNULL
        started = [
            stack.enter_context(subprocess.Popen(command, cwd=folder, env=value, stdout=quiet, stderr=quiet))
            for command in commands
        ]
        stack.callback(lambda: [process.kill() for process in started])
        deadline = time.monotonic() + 3 * MINUTE
        while not all((folder / f"ready_{rank}").exists() for rank in (0, 1)):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        started[0].kill()
        deadline = time.monotonic() + MINUTE
        while [host.processes() for host in hosts] != before:
            assert time.monotonic() < deadline
            time.sleep(0.2)


@pytest.mark.nightly
def test_torchrun_continues_after_losing_a_host(
    folder: Path, hosts: tuple[Host, Host], expected_losses: list[float]
) -> None:
    start = [*ANY_TORCHRUN, "--nnodes", "1:2", "--nproc_per_node", "1", "--max_restarts", "1"]
    start += [*MEETING, "--rdzv_conf", "last_call_timeout=5"]
    start += ["-m", "dsreason", "sft", "--config", "run.toml", "--output-dir", "elastic"]
    start += ["--set", "checkpoint.every=1", "--set", "train.epochs=8"]
    value = os.environ | {"DS_ACCELERATOR": "cpu"}
    before, run = hosts[1].processes(), folder / "elastic"
    with ExitStack() as stack:
        outputs = [stack.enter_context((folder / f"elastic_{host.name}.txt").open("w+")) for host in hosts]
        first, second = (
            stack.enter_context(
                subprocess.Popen([*host.inside, *start], cwd=folder, env=value, stdout=file, stderr=file)
            )
            for host, file in zip(hosts, outputs, strict=True)
        )
        stack.callback(lambda: [process.kill() for process in (first, second)])
        deadline = time.monotonic() + 3 * MINUTE
        while not list((run / "checkpoints").glob("step_*/COMPLETE")):
            assert time.monotonic() < deadline
            assert first.poll() is None
            time.sleep(0.05)
        for pid in hosts[1].processes() - before:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        ended = first.wait(timeout=5 * MINUTE)
        text = (folder / f"elastic_{hosts[0].name}.txt").read_text()
    assert ended == 0, text
    assert "rank 1 on node-1 died" in text
    assert json.loads((run / "config.json").read_text())["world_size"] == 1
    assert len(losses(run)) == 16
    assert losses(run)[:4] == pytest.approx(expected_losses, rel=1e-5)


@pytest.mark.parametrize(
    ("lost", "told", "advice"),
    [
        ([PORT_OF_STORE], "the ranks did not all connect to 10.77.0.1:29500 within 15 s", "blocks that port"),
        (
            OTHER_PORTS,
            "the ranks reached 10.77.0.1:29500, but then could not connect to each other",
            "check firewalls",
        ),
    ],
    ids=["of the store", "of the ranks"],
)
def test_closed_port_is_reported_on_both_hosts(
    folder: Path, hosts: tuple[Host, Host], ranks: str, lost: list[str], told: str, advice: str
) -> None:
    described = ["WORLD_SIZE=2", "LOCAL_RANK=0", "LOCAL_WORLD_SIZE=1", "MASTER_ADDR=10.77.0.1", "MASTER_PORT=29500"]
    command = [sys.executable, ranks, "join"]
    with ExitStack() as stack:
        for ports in lost:
            stack.enter_context(hosts[0].dropping("to", ADDRESSES[1], "ipproto", "tcp", "sport", ports))
        ended = on_both(hosts, folder, [["env", f"RANK={rank}", *described, *command] for rank in (0, 1)], {})
    for rank, host in enumerate(ended):
        assert host.returncode == 1, host.stdout
        line = next(line for line in host.stdout.splitlines() if line.startswith("error: "))
        assert line.startswith(f"error: rank {rank} on {NAMES[rank]} ({ADDRESSES[rank]}): {told}")
        assert advice in line
