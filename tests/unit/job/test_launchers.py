"""The launcher processes that a rank started by `deepspeed` on several hosts must not outlive."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

RUNNER = """
import subprocess, sys
from dsreason.job.launchers import find_launchers

def job(port):
    return ["--world_info=e30=", "--node_rank=0", "--master_addr=10.0.0.1", f"--master_port={port}"]

role, folder, *rest = sys.argv[1:]
if role == "runner":  # its pdsh, and what the sshd that pdsh reaches starts on the same host
    for port in (29500, 29600):
        subprocess.Popen([f"{folder}/pdsh.bin", *job(port)], stdin=subprocess.PIPE)
    subprocess.run([sys.executable, __file__, "sshd", folder], check=True)
elif role == "sshd":
    command = f"cd {folder}; {sys.executable} {__file__} launch {folder} {' '.join(job(29500))}; true"
    subprocess.run(["sh", "-c", command], check=True)
elif role == "launch":
    subprocess.run([sys.executable, __file__, "rank", folder], check=True)
else:
    names = [next((word for word in process.cmdline() if word in ("runner", "sshd", "launch")), process.name())
             for process in find_launchers()]
    print(" ".join(names))
"""


def test_launchers_between_rank_and_runner_are_found(tmp_path: Path) -> None:
    (tmp_path / "runner.py").write_text(RUNNER)
    (tmp_path / "pdsh.bin").write_text("#!/bin/sh\nread until_the_runner_ends\n")
    (tmp_path / "pdsh.bin").chmod(0o755)
    command = [sys.executable, str(tmp_path / "runner.py"), "runner", str(tmp_path)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["launch", "sh", "sshd", "pdsh.bin", "runner"]


def test_only_parent_counts_without_a_launcher() -> None:
    program = "import os; from dsreason.job.launchers import find_launchers\n"
    program += "print([process.pid for process in find_launchers()] == [os.getppid()])"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=60)
    assert done.stdout == "True\n"
