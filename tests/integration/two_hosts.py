"""Two hosts on this machine: network namespaces connected by a virtual cable, each with its own name and IP address.

torchrun is called on every host and needs nothing else. `deepspeed` starts its ranks over ssh: if the tools for ssh are
installed, each host runs an sshd.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

SEARCHED = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"


def missing(*tools: str) -> list[str]:
    return [name for name in tools if shutil.which(name, path=SEARCHED) is None]


TRIAL = """
ip link add eth0 type veth peer name eth1 && ip rule add priority 1 to 10.77.0.1 blackhole &&
echo trial > /proc/sys/kernel/hostname && mkdir -p /run/netns /etc/netns && mount --bind /run/netns /run/netns
"""


def can_join_hosts() -> bool:
    """Return whether this machine, which may be a container, allows namespaces and a virtual cable; leave nothing behind."""
    if missing("ip", "unshare", "hostname"):
        return False
    command = ["unshare", "--net", "--uts", "--mount", "sh", "-c", TRIAL]
    environment = os.environ | {"PATH": SEARCHED}
    return subprocess.run(command, check=False, env=environment, capture_output=True).returncode == 0


MISSING_FOR_SSH = missing("sshd", "ssh", "ssh-keygen", "pdsh")

needs_hosts = pytest.mark.skipif(
    not can_join_hosts(), reason="two hosts on one machine take root, iproute2 and leave to make network namespaces"
)
marks = [pytest.mark.integration, needs_hosts]
needs_ssh = pytest.mark.skipif(
    bool(MISSING_FOR_SSH), reason=f"{', '.join(MISSING_FOR_SSH)} not found (openssh-server, pdsh)"
)

ADDRESSES = ("10.77.0.1", "10.77.0.2")
NAMES = ("node-0", "node-1")

ANY_TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
MEETING = ["--rdzv_backend", "c10d", "--rdzv_endpoint", f"{NAMES[0]}:29400"]
"""Options that make torchrun rendezvous at the first host."""
TORCHRUN = [*ANY_TORCHRUN, "--nnodes", "2", "--nproc_per_node", "1", *MEETING]
DEEPSPEED = [sys.executable, "-m", "deepspeed.launcher.runner", "--hostfile", "hostfile"]


@dataclass(frozen=True)
class Host:
    name: str
    space: str
    path: str

    @property
    def inside(self) -> list[str]:
        """Command prefix that runs a command on this host."""
        rename = 'echo "$0" > /proc/sys/kernel/hostname && exec "$@"'
        unshare = ["unshare", "--uts", "sh", "-c", rename, self.name]
        return ["ip", "netns", "exec", self.space, *unshare, "env", f"PATH={self.path}"]

    @contextmanager
    def dropping(self, *packets: str) -> Iterator[None]:
        """Context manager in which packets that this host sends are dropped if the `ip rule` selector `packets` matches them."""
        rule = ("priority", "1", *packets, "blackhole")
        run("ip", "-n", self.space, "rule", "add", *rule)
        try:
            yield
        finally:
            run("ip", "-n", self.space, "rule", "delete", *rule)

    def processes(self) -> set[int]:
        return set(map(int, run("ip", "netns", "pids", self.space).split()))


@contextmanager
def two_hosts(folder: Path) -> Iterator[tuple[Host, Host]]:
    """Yield two connected hosts; if the ssh tools are installed, `folder` contains their keys and an `ssh` command that uses
    them."""
    hosts = [Host(name, f"dsreason-{os.getpid()}-{name}", f"{folder}:{SEARCHED}") for name in NAMES]
    with ExitStack() as stack:
        for host in hosts:
            write_names(host)
            stack.callback(shutil.rmtree, Path("/etc/netns") / host.space)
            run("ip", "netns", "add", host.space)
            stack.callback(remove, host)
        first, second = hosts
        cable = ("ip", "link", "add", "eth0", "netns", first.space, "type", "veth")
        run(*cable, "peer", "name", "eth1", "netns", second.space)
        options = [] if MISSING_FOR_SSH else ssh_options(folder)
        for host, address, device in zip(hosts, ADDRESSES, ("eth0", "eth1"), strict=True):
            run("ip", "-n", host.space, "address", "add", f"{address}/24", "dev", device)
            for name in ("lo", device):
                run("ip", "-n", host.space, "link", "set", name, "up")
            if options:
                run(*host.inside, shutil.which("sshd", path=SEARCHED), "-f", "/dev/null", *options)
        yield first, second


def write_hostfile(folder: Path) -> None:
    """Write the files that `DEEPSPEED` needs in its working folder: the hostfile, and the variables that each host gets."""
    (folder / "hostfile").write_text("".join(f"{name} slots=1\n" for name in NAMES))
    (folder / ".deepspeed_env").write_text("DS_ACCELERATOR=cpu\n")


def write_names(host: Host) -> None:
    """Write the host's /etc/hosts, in which the host's own name refers to its loopback address, as on Debian."""
    names = {
        name: "127.0.1.1" if name == host.name else address for name, address in zip(NAMES, ADDRESSES, strict=True)
    }
    folder = Path("/etc/netns") / host.space
    folder.mkdir(parents=True)
    lines = [f"{address} {name}\n" for name, address in {"localhost": "127.0.0.1", **names}.items()]
    (folder / "hosts").write_text("".join(lines))


def ssh_options(folder: Path) -> list[str]:
    """Write a key for hosts and user, and an `ssh` that uses it, only to `folder`; return the options of sshd."""
    key, ssh = folder / "key", folder / "ssh"
    run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key)
    expected = f"-i {key} -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR"
    ssh.write_text(f'#!/bin/sh\nexec {shutil.which("ssh", path=SEARCHED)} -F none {expected} "$@"\n')
    ssh.chmod(0o755)
    Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # sshd requires this folder
    options = f"HostKey={key} AuthorizedKeysFile={key}.pub PidFile=none UsePAM=no StrictModes=no"
    return [f"-o{option}" for option in options.split()]


def run(*command: object) -> str:
    environment = os.environ | {"PATH": SEARCHED}
    return subprocess.run(
        list(map(str, command)), check=True, env=environment, stdout=subprocess.PIPE, text=True
    ).stdout


def remove(host: Host) -> None:
    """Delete the namespace and end what runs in it."""
    while pids := host.processes():
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)
    run("ip", "netns", "delete", host.space)
