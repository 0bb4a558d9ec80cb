"""The command as the tests start it: without an installed script, but with the packages that the tests import."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dsreason import __version__

pytestmark = pytest.mark.integration

PROGRAM = """
import sys
from pathlib import Path
from tests.integration.command import dsreason
ended = dsreason("--version", cwd=Path())
print(ended.stdout, ended.stderr)
sys.exit(ended.returncode)
"""


def test_command_starts_without_installed_packages(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "bare")], check=True)
    python = tmp_path / "bare" / "bin" / "python"
    ended = subprocess.run([python, "-c", PROGRAM], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert __version__ in ended.stdout
