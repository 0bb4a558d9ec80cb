"""Checks of this host's ports and of the hosts in a hostfile."""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import dsreason
from dsreason.errors import ConfigError
from dsreason.tools.doctor.finding import (
    DoctorFinding,
    find_last_line,
    report_failure,
    report_pass,
    report_warning,
    run_program,
)

MASTER_PORT = 29500
"""Default rendezvous port of torchrun and `deepspeed`."""
SSH_SECONDS = 15
SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=5", "-o", "StrictHostKeyChecking=accept-new")


def check_ports() -> Iterator[DoctorFinding]:
    port = os.environ.get("MASTER_PORT", str(MASTER_PORT))
    if not port.isdecimal() or not 0 < int(port) < 65536:
        yield report_failure("ports", f"MASTER_PORT is {port!r}", "set it to a number from 1024 to 65535, or unset it")
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", int(port)))
            yield report_pass("ports", f"port {port} is free")
        except OSError as error:
            cure = "stop the job that uses it, or choose another port (--master_port, MASTER_PORT)"
            yield report_warning("ports", f"port {port} cannot be used: {error.strerror}", cure)
    try:
        socket.getaddrinfo(socket.gethostname(), None)
        yield report_pass("name", f"{socket.gethostname()} can be resolved")
    except OSError as error:
        cure = f"add {socket.gethostname()} to /etc/hosts if several machines train together"
        yield report_warning("name", f"{socket.gethostname()} cannot be resolved: {error.strerror}", cure)


def read_hostfile(file: Path) -> list[tuple[str, int]]:
    """Return (host, slots) for each line of the form `node-0 slots=8`.

    Raises:
        ConfigError: the file cannot be read, a line has a different form, or no host is listed.
    """
    try:
        lines = file.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--hostfile {file}: cannot be read: {error}; pass a text file") from None
    hosts = []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        name, _, slots = words[-1].partition("=")
        if len(words) != 2 or name != "slots" or not slots.isdecimal() or words[0].startswith("-"):
            raise ConfigError(f"--hostfile {file}: line {number} is {line[:80]!r}; write it as `node-0 slots=8`")
        hosts.append((words[0], int(slots)))
    if not hosts:
        raise ConfigError(f"--hostfile {file}: lists no host; write one line per host, such as `node-0 slots=8`")
    return hosts


def check_hosts(hosts: list[tuple[str, int]]) -> Iterator[DoctorFinding]:
    """Check all hosts over SSH, at most 16 at a time.

    Each host must be reachable without a password, and must have the same dsreason version as this host, at the same path.
    """
    if shutil.which("ssh") is None:
        yield report_failure(
            "hosts",
            "ssh is missing, but `deepspeed` needs it to reach the other hosts",
            "install an SSH client, or start torchrun on each host",
        )
        return
    with ThreadPoolExecutor(max_workers=16) as pool:
        yield from pool.map(lambda host: check_host(*host), hosts)


def check_host(host: str, slots: int) -> DoctorFinding:
    executable = Path(sys.executable).parent / "dsreason"
    script = f"{shlex.quote(str(executable))} --version; nvidia-smi -L 2>/dev/null | wc -l"
    code, text = run_program([*SSH, host, script], SSH_SECONDS)
    name = f"host {host}"
    if code == 124:
        return report_failure(
            name, f"does not respond to ssh within {SSH_SECONDS} s", "check that the host is up and its port 22 is open"
        )
    if code == 255:
        return report_failure(
            name, f"ssh: {find_last_line(text)}", "create an SSH key without a passphrase, and copy it to that host"
        )
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    version = next((line.split()[-1] for line in lines if line.startswith("dsreason ")), None)
    if version is None:
        return report_failure(
            name,
            f"dsreason was not found at {executable}: {find_last_line(text)}",
            "install dsreason in the same folder as here",
        )
    if version != dsreason.__version__:
        return report_failure(
            name,
            f"has dsreason {version}, but this host has {dsreason.__version__}",
            "install the same version on both",
        )
    gpus = int(lines[-1]) if lines[-1].isdecimal() else 0
    if 0 < gpus < slots:
        return report_failure(
            name, f"the hostfile sets slots={slots}, but the host has {gpus} GPUs", f"set slots={gpus}"
        )
    return report_pass(name, f"reachable, dsreason {version}" + (f", {gpus} GPUs" if gpus else ", no GPUs"))
