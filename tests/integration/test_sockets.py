"""What listens during a run on one machine: nothing beyond the loopback interface and private folders."""

from __future__ import annotations

import os
import socket
import stat
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from dsreason.job.network import find_interface
from tests.integration.command import COMMAND
from tests.integration.rows import write_mixed_rows

pytestmark = [pytest.mark.integration, pytest.mark.long]

LOOPBACK = ("127.0.0.1", "::1")
SHORT = """
[data]
adapter = "jsonl"
path = "{rows}"
workers = 1
[train]
max_steps = 1
precision = "fp32"
[validation]
before_training = false
generate = false
"""
GRPO = """
[grpo]
prompts_per_step = 2
num_generations = 2
[rollout]
engine = "vllm"
tensor_parallel_size = 2
self_test = false
max_completion_length = 4
"""
DEEPSPEED = [
    sys.executable,
    "-m",
    "deepspeed.launcher.runner",
    "--num_gpus=2",
    "--master_port=29519",
    "--no_local_rank",
]
REWARDS = """
def vowels(completion, sample):
    return sum(letter in "aeiou" for letter in completion)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_qwen3_vl: Path) -> Path:
    folder = tmp_path_factory.mktemp("sockets")
    model = f'model.path = "{tiny_qwen3_vl}"\n'
    config = model + SHORT.format(rows=write_mixed_rows(folder / "data"))
    (folder / "sft.toml").write_text(config.replace("[train]", "[train]\nglobal_batch_size = 4"))
    (folder / "grpo.toml").write_text(f'{config}{GRPO}[reward.functions]\n"rewards.py:vowels" = 1.0\n')
    (folder / "rewards.py").write_text(REWARDS)
    return folder


def find_sockets(process: psutil.Process) -> set[str]:
    """Return the sockets of a process that others can connect to, by name and address, apart from those that are private."""
    names = set()
    with suppress(psutil.Error):
        for item in process.net_connections("all"):
            if item.family == socket.AF_UNIX:
                if item.laddr and not is_private(item.laddr):
                    names.add(f"unix {item.laddr}")
            elif item.status == psutil.CONN_LISTEN or (
                item.type == socket.SOCK_DGRAM and item.laddr and not item.raddr
            ):
                names.add(f"{item.type.name} {item.laddr.ip}")
    return names


def is_private(path: str) -> bool:
    """Return whether only the user can access the folder of a Unix socket; a missing folder is, too."""
    if not path.startswith("/"):  # an abstract socket, which everybody can connect to
        return False
    try:
        return not stat.S_IMODE(os.stat(os.path.dirname(path)).st_mode) & 0o077
    except FileNotFoundError:
        return True


def watch(command: list[object], folder: Path, *, seconds: float = 900.0, signal_at: str = "") -> set[str]:
    """Run a command to its end, or until it has printed `signal_at`, and return the sockets of all its processes."""
    names: set[str] = set()
    output = folder / "output.txt"
    deadline = time.monotonic() + seconds
    with (
        output.open("w") as file,
        psutil.Popen(
            [str(word) for word in command], cwd=folder, env=build_environment(), stdout=file, stderr=file
        ) as parent,
    ):
        while parent.poll() is None:
            assert time.monotonic() < deadline, output.read_text()
            with suppress(psutil.Error):
                for process in (parent, *parent.children(recursive=True)):
                    names |= find_sockets(process)
            if signal_at and names and signal_at in output.read_text():
                parent.terminate()
                parent.wait(60)
            time.sleep(0.05)
        assert signal_at or parent.returncode == 0, output.read_text()
    return names


def build_environment() -> dict[str, str]:
    """Return the environment, with variables that make gloo and NCCL listen on another interface, if there is one."""
    environment = {
        name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    }
    environment["DS_ACCELERATOR"] = "cpu"
    others = [name for name in psutil.net_if_addrs() if name != find_interface(LOOPBACK[0])]
    return environment | {name: others[0] for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if others}


def test_training_listens_only_on_loopback(folder: Path) -> None:
    command = [*COMMAND, "sft", "--config=sft.toml", "--output-dir=ours", "--nproc=2"]
    assert watch(command, folder) == {"SOCK_STREAM 127.0.0.1"}


def test_deepspeed_on_one_machine_listens_only_on_loopback(folder: Path) -> None:
    command = [*DEEPSPEED, "--module", "dsreason", "sft", "--config=sft.toml", "--output-dir=theirs"]
    assert watch(command, folder) == {"SOCK_STREAM 127.0.0.1"}


def test_grpo_with_vllm_listens_only_on_loopback(folder: Path) -> None:
    command = [*COMMAND, "grpo", "--config=grpo.toml", "--output-dir=grpo", "--nproc=2"]
    assert watch(command, folder) == {"SOCK_STREAM 127.0.0.1"}


def test_infer_with_vllm_listens_only_on_loopback(folder: Path, tiny_qwen3_vl: Path) -> None:
    command = [*COMMAND, "infer", f"--model={tiny_qwen3_vl}", "--engine=vllm", "--max-tokens=4"]
    command += ["--prompt=What?", "--image=data/1_0.png"]
    assert watch(command, folder) <= {"SOCK_STREAM 127.0.0.1"}


def test_eval_with_vllm_listens_only_on_loopback(folder: Path, tiny_qwen3_vl: Path) -> None:
    command = [*COMMAND, "eval", f"--model={tiny_qwen3_vl}", "--data=data/rows.jsonl", "--adapter=jsonl"]
    command += ["--limit=2", "--results-dir=results", '--set=model.engine="vllm"']
    assert watch(command, folder) == {"SOCK_STREAM 127.0.0.1"}


def test_reward_server_listens_only_on_loopback(folder: Path) -> None:
    command = [*COMMAND, "reward-serve", "rewards.py", "--port=0"]
    assert watch(command, folder, signal_at="http://") == {"SOCK_STREAM 127.0.0.1"}
