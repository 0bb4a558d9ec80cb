"""Part of `make smoke`: every module is imported, and every command started."""

from __future__ import annotations

import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import data_adapters
import dsreason
from dsreason.cli.job import find_trainers
from dsreason.cli.main import app
from tests.integration.command import dsreason as run_command

pytestmark = pytest.mark.integration

MODULES = sorted(
    module.name
    for package in (dsreason, data_adapters)
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    if not module.name.endswith("__main__")
)
BESIDE_THE_CORE = ("dsreason.world", "dsreason.tools", "dsreason.cli")
COMMANDS = sorted(typer.main.get_command(app).commands)
IMPORT_ALL = """
import importlib, sys, traceback
hidden, *names = sys.argv[1:]
for name in filter(None, hidden.split(",")):
    sys.modules[name] = None
failed = []
for name in names:
    try:
        importlib.import_module(name)
    except Exception:
        traceback.print_exc()
        failed.append(name)
sys.exit(f"cannot be imported: {failed}" if failed else 0)
"""


def run(folder: Path, *arguments: str) -> str:
    """Run a command that must succeed, and return its output."""
    ended = run_command(*arguments, cwd=folder)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


CORE = [name for name in MODULES if not name.startswith(BESIDE_THE_CORE)]


@pytest.mark.parametrize(("hidden", "modules"), [("", MODULES), (",".join(BESIDE_THE_CORE), CORE)], ids=["all", "core"])
def test_every_module_can_be_imported(hidden: str, modules: list[str]) -> None:
    """The core also if world models, tools and commands are hidden."""
    command = [sys.executable, "-c", IMPORT_ALL, hidden, *modules]
    ended = subprocess.run(command, cwd=Path(dsreason.__file__).parents[1], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_starts(command: str) -> None:
    result = CliRunner().invoke(app, [command, "--help"])
    assert result.exit_code == 0
    assert f"{command} [OPTIONS]" in result.output


@pytest.mark.parametrize("command", find_trainers())
def test_training_commands_pass_their_checks(command: str, tmp_path: Path) -> None:
    assert '"optim"' in run(tmp_path, command, "--dry-run")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("plan", "--gpus", "1"), "fits: "),
        (("data", "validate", "--config", "builtin_sft.toml", "--limit", "4"), "rows"),
        (("doctor", "--quick"), " 0 fail"),
    ],
    ids=["plan", "data", "doctor"],
)
def test_commands_inspect_model_rows_and_machine(arguments: tuple[str, ...], expected: str, tmp_path: Path) -> None:
    assert expected in run(tmp_path, *arguments)
