"""Ranks that act as two hosts: they find each other, share variables and compare settings, or report what prevents this."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from dsreason.job.ranks import find_free_port

pytestmark = [pytest.mark.integration, pytest.mark.long]

RANK = """
import os, sys
from datetime import timedelta
from dsreason.errors import DsReasonError
from dsreason.job import launch

launch.enter_rank()
from dsreason.job import hosts
from dsreason.job.ranks import reduce_sum, init_world, shutdown

hosts.JOIN_TIMEOUT = timedelta(seconds=float(os.environ.get("SECONDS", 60)))
try:
    if sys.argv[1] == "meet":
        store = hosts.join()
        print({name: os.environ.get(name) for name in ("HF_TOKEN", "HF_HOME", "CUDA_VISIBLE_DEVICES")}, flush=True)
        if os.environ["RANK"] == "1":
            store.set("rank 1 has read all", "")
        else:  # the store ends with this process
            store.wait(["rank 1 has read all"])
    else:
        world = init_world()
        sys.stdout.write(f"sum {reduce_sum(world.rank + 1)}\\n")
        sys.stdout.flush()
        if world.rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os._exit(1)
        reduce_sum(1)
    shutdown()
except DsReasonError as error:
    sys.exit(launch.report(error))
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    (tmp_path / "rank.py").write_text(RANK)
    return str(tmp_path / "rank.py")


def run_hosts(
    commands: Mapping[int, Sequence[str]], variables: Mapping[int, Mapping[str, str]], folder: Path
) -> dict[int, subprocess.CompletedProcess[str]]:
    """Run `python COMMAND` for each rank, as the only rank of its host in a job of two; return the results by rank."""
    common = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "CUDA_"))}
    common |= {"DS_ACCELERATOR": "cpu", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
    common |= {"LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_free_port())}
    started = {
        rank: subprocess.Popen(
            [sys.executable, *command],
            cwd=folder,
            env=common | {"RANK": str(rank)} | variables.get(rank, {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, command in commands.items()
    }
    outputs = {rank: process.communicate(timeout=300) for rank, process in started.items()}
    return {
        rank: subprocess.CompletedProcess(process.args, process.returncode, *outputs[rank])
        for rank, process in started.items()
    }


def test_host_inherits_missing_variables_without_revealing_values(script: str, tmp_path: Path) -> None:
    first = {"HF_TOKEN": "hf_secret", "HF_HOME": "/of/first", "CUDA_VISIBLE_DEVICES": "3"}
    shared = first | {"DSREASON_SHARE_CREDENTIALS": "1"}
    ended = run_hosts(dict.fromkeys((0, 1), [script, "meet"]), {0: shared, 1: {"HF_HOME": "/of/second"}}, tmp_path)
    assert [ended[rank].returncode for rank in (0, 1)] == [0, 0], ended
    assert ended[0].stdout == f"{first}\n"
    assert ended[1].stdout == f"{first | {'HF_HOME': '/of/second', 'CUDA_VISIBLE_DEVICES': None}}\n"
    assert ended[0].stderr == ""
    assert ended[1].stderr.endswith(": these variables were copied from where the job was started: HF_TOKEN\n")
    assert "hf_secret" not in ended[1].stderr


def test_missing_credentials_are_named_and_not_sent(script: str, tmp_path: Path) -> None:
    first = {"HF_TOKEN": "hf_secret", "HF_HOME": "/of/first", "HTTPS_PROXY": "http://me:password@proxy"}
    ended = run_hosts(dict.fromkeys((0, 1), [script, "meet"]), {0: first}, tmp_path)
    assert [ended[rank].returncode for rank in (0, 1)] == [0, 0], ended
    assert ended[1].stdout == f"{ {'HF_TOKEN': None, 'HF_HOME': '/of/first', 'CUDA_VISIBLE_DEVICES': None} }\n"
    host = socket.gethostname()
    assert (
        f"warning: {host} has credentials that other hosts lack: {host} has no HF_TOKEN, HTTPS_PROXY; "
        in ended[0].stderr
    )
    assert ended[1].stderr.endswith(": these variables were copied from where the job was started: HF_HOME\n")


def test_hosts_with_different_code_or_config_are_rejected(tmp_path: Path) -> None:
    for rank, lr in enumerate((1e-6, 2e-6)):
        (tmp_path / f"run_{rank}.toml").write_text(
            f'data.adapter = "my_adapter.py"\ndata.path = "rows.jsonl"\nmodel.path = "model"\noptim.lr = {lr}\n'
        )
    (tmp_path / "my_adapter.py").touch()
    commands = {rank: ["-m", "dsreason", "sft", "--config", f"run_{rank}.toml"] for rank in (0, 1)}
    commands[1] += ["--set", "train.seed=7", "--set", 'model.path="other.py"']
    (tmp_path / "other.py").touch()
    ended = run_hosts(commands, {}, tmp_path)
    assert [ended[rank].returncode for rank in (0, 1)] == [2, 2]
    message = ended[0].stderr + ended[1].stderr  # the message appears only once, because the ranks run on the same host
    host = socket.gethostname()
    for line in (
        "error: the hosts of this job differ:",
        f"  code of other.py: None on {host} (rank 0), but 'e3b0c44298fc' on {host} (rank 1)",
        f"  model.path: 'model' on {host} (rank 0), but 'other.py' on {host} (rank 1)",
        f"  optim.lr: 1e-06 on {host} (rank 0), but 2e-06 on {host} (rank 1)",
        f"  train.seed: 0 on {host} (rank 0), but 7 on {host} (rank 1)",
    ):
        assert line in message.splitlines()
    assert message.endswith("use the same environment, code, files and options on all hosts, and start again\n")


@pytest.mark.long
def test_rank_without_peers_reports_rendezvous_address(script: str, tmp_path: Path) -> None:
    ended = run_hosts({1: [script, "meet"]}, {1: {"SECONDS": "3", "MASTER_PORT": "29411"}}, tmp_path)[1]
    assert ended.returncode == 1
    (line,) = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    assert line.startswith("error: rank 1 on ")
    assert ": the ranks did not all connect to 127.0.0.1:29411 within 3 s (" in line
    assert line.endswith("that no firewall between them blocks that port, and that no other program uses it")


@pytest.mark.long
def test_ranks_reconnect_after_torchrun_restart(script: str, tmp_path: Path) -> None:
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--max-restarts=1", script, "work"]
    environment = os.environ | {"DS_ACCELERATOR": "cpu"}
    ended = subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("sum 3.0") == 4
