"""The two sets of locked versions, which must be the newest and oldest ones that pyproject.toml allows."""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from dsreason.imports import EXTRAS, build_install_command

ROOT = Path(__file__).parents[2]
REQUIREMENTS = ROOT / "launch" / "requirements"


def claimed(extra: str) -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [Requirement(line) for line in project["dependencies"] + project["optional-dependencies"][extra]]


def locked(file: Path) -> dict[str, set[Version]]:
    """Read the versions of each package for all Python versions."""
    result: dict[str, set[Version]] = {}
    for line in file.read_text().splitlines():
        name, equals, remainder = line.partition("==")
        if equals and not line.startswith((" ", "#")):
            result.setdefault(canonicalize_name(name), set()).add(Version(remainder.split()[0]))
    return result


@pytest.mark.parametrize("extra", ["cpu", "cuda"])
@pytest.mark.parametrize("folder", [REQUIREMENTS, REQUIREMENTS / "oldest"], ids=["newest", "oldest"])
def test_locked_versions_match_declared_ranges(folder: Path, extra: str) -> None:
    versions = locked(folder / f"{extra}.txt")
    wrong = {
        str(requirement): version
        for requirement in claimed(extra)
        for version in versions[canonicalize_name(requirement.name)]
        if version not in requirement.specifier
    }
    assert wrong == {}


@pytest.mark.parametrize("extra", ["cpu", "cuda"])
def test_oldest_versions_match_claimed_minimum(extra: str) -> None:
    versions = locked(REQUIREMENTS / "oldest" / f"{extra}.txt")
    lowest = {
        requirement.name: {Version(bound.version) for bound in requirement.specifier if bound.operator == ">="}
        for requirement in claimed(extra)
    }
    assert {name: versions[canonicalize_name(name)] for name in lowest} == lowest


@pytest.mark.parametrize("folder", [REQUIREMENTS, REQUIREMENTS / "oldest"], ids=["newest", "oldest"])
@pytest.mark.parametrize("extra", EXTRAS)
def test_extra_is_locked_as_tested(folder: Path, extra: str) -> None:
    added, base, tested = (locked(folder / f"{name}.txt") for name in (extra, "cuda", "dev"))
    assert not added.keys() & base.keys()
    assert {name: base.get(name) or tested[name] for name in added} == added
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (expected,) = map(Requirement, project["optional-dependencies"][extra])
    assert all(version in expected.specifier for version in added[canonicalize_name(expected.name)])


@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("pip", [True, False], ids=["pip", "uv"])
def test_install_command_fits_this_environment(extra: str, pip: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if pip else None)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    python = [sys.executable, "-m", "pip", "install"]
    uv = ["uv", "pip", "install", "--python", sys.executable]
    expected = (python if pip else uv) + project["optional-dependencies"][extra]
    assert shlex.split(build_install_command(extra)) == expected


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize(
    ("stack", "environment", "says"),
    [("newest", ".venv/", ""), ("oldest", ".venv-oldest/", ""), ("latest", "", 'newest or oldest, not "latest"')],
)
def test_each_stack_has_a_separate_environment(stack: str, environment: str, says: str) -> None:
    plain = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}  # make may run this test
    command = ["make", "-n", "unit", f"STACK={stack}"]
    done = subprocess.run(command, cwd=ROOT, env=plain, capture_output=True, text=True)
    assert f"{environment}bin/python -m pytest tests/unit" in done.stdout or says
    assert says in done.stderr and (done.returncode == 0) == (not says)
