"""`deepspeed --hostfile` on two hosts (network namespaces with an sshd each) does what the ordinary start does."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from tests.integration.command import dsreason, metrics
from tests.integration.rows import write_mixed_rows

SEARCHED = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"
MISSING = [name for name in ("ip", "sshd", "ssh", "ssh-keygen", "pdsh") if shutil.which(name, path=SEARCHED) is None]

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can make network namespaces"),
    pytest.mark.skipif(bool(MISSING), reason=f"{', '.join(MISSING)} not found (iproute2, openssh-server, pdsh)"),
]

ADDRESSES = ("10.77.0.1", "10.77.0.2")

CONFIG = """
model.path = "{model}"
data.adapter = "jsonl"
data.path = "{rows}"
data.workers = 1
data.vision.fps = 4.0
optim.lr = 1e-3
train.epochs = 2
train.global_batch_size = 4
train.micro_batch_size = 2
train.precision = "fp32"
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_qwen2_5_vl: Path) -> Path:
    """Where the launcher is called: run configuration, hostfile, and the variables that every host gets."""
    folder = tmp_path_factory.mktemp("hosts")
    rows = write_mixed_rows(folder / "data")
    (folder / "run.toml").write_text(CONFIG.format(model=tiny_qwen2_5_vl, rows=rows))
    (folder / "hostfile").write_text("".join(f"{address} slots=1\n" for address in ADDRESSES))
    (folder / ".deepspeed_env").write_text("DS_ACCELERATOR=cpu\nGLOO_SOCKET_IFNAME=eth0\n")
    return folder


@pytest.fixture(scope="module")
def first_host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """Both hosts, joined by a cable; what to put before a command that is to run on the first."""
    folder = tmp_path_factory.mktemp("ssh")
    spaces = [f"dsreason-{os.getpid()}-{i}" for i in range(len(ADDRESSES))]
    with ExitStack() as stack:
        for space in spaces:
            run("ip", "netns", "add", space)
            stack.callback(remove, space)
        # One name on both: GLOO_SOCKET_IFNAME is the same for all hosts.
        run("ip", "link", "add", "eth0", "netns", spaces[0], "type", "veth", "peer", "name", "eth0", "netns", spaces[1])
        options = ssh_options(folder)
        for space, address in zip(spaces, ADDRESSES, strict=True):
            run("ip", "-n", space, "address", "add", f"{address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                run("ip", "-n", space, "link", "set", device, "up")
            run("ip", "netns", "exec", space, shutil.which("sshd", path=SEARCHED), "-f", "/dev/null", *options)
        yield ["ip", "netns", "exec", spaces[0], "env", f"PATH={folder}:{SEARCHED}"]


def ssh_options(folder: Path) -> list[str]:
    """A key for hosts and user, and an `ssh` that knows it, in `folder` alone; returns the options of sshd."""
    key, ssh = folder / "key", folder / "ssh"
    run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key)
    known = f"-i {key} -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR"
    ssh.write_text(f'#!/bin/sh\nexec {shutil.which("ssh", path=SEARCHED)} -F none {known} "$@"\n')
    ssh.chmod(0o755)
    Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # sshd asks for it
    options = f"HostKey={key} AuthorizedKeysFile={key}.pub PidFile=none UsePAM=no StrictModes=no"
    return [f"-o{option}" for option in options.split()]


def run(*command: object) -> str:
    environment = os.environ | {"PATH": SEARCHED}
    return subprocess.run(
        list(map(str, command)), check=True, env=environment, stdout=subprocess.PIPE, text=True
    ).stdout


def remove(space: str) -> None:
    """Delete the namespace and end what runs in it."""
    while pids := run("ip", "netns", "pids", space).split():
        for pid in map(int, pids):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)
    run("ip", "netns", "delete", space)


def start(folder: Path, first_host: list[str], *options: str) -> subprocess.CompletedProcess[str]:
    command = [*first_host, str(Path(sys.executable).with_name("deepspeed")), "--hostfile", "hostfile"]
    command += ["--module", "dsreason", "sft", "--config", "run.toml", *options]
    return subprocess.run(command, check=False, cwd=folder, capture_output=True, text=True, timeout=900)


def test_losses_equal_those_of_the_ordinary_start(folder: Path, first_host: list[str]) -> None:
    ended = start(folder, first_host, "--output-dir", "two_hosts")
    assert ended.returncode == 0, ended.stderr
    ended = dsreason("sft", "--config", "run.toml", "--output-dir", "one_host", "--nproc", 2, cwd=folder)
    assert ended.returncode == 0, ended.stderr
    expected, found = ([line["train/loss"] for line in metrics(folder / name)] for name in ("one_host", "two_hosts"))
    assert len(found) == 4
    assert found == pytest.approx(expected, rel=1e-5)  # threads of a rank, and so sums, may differ
    assert (folder / "two_hosts/export/final/model.safetensors").is_file()
    assert all((folder / "two_hosts/logs" / f"rank_{rank}.log").is_file() for rank in range(2))


def test_every_host_tells_an_error_and_the_launcher_keeps_its_exit_code(folder: Path, first_host: list[str]) -> None:
    ended = start(folder, first_host, "--set", "train.max_stepz=4")
    assert ended.returncode == 2
    told = "error: --set train.max_stepz=4: train.max_stepz: unknown key; did you mean train.max_steps?"
    assert all(f"{address}: {told}" in ended.stderr for address in ADDRESSES)
