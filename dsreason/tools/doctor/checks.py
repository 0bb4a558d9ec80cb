"""List of all checks, with the quick checks first. If a check raises an error, the other checks still run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsreason.errors import DsReasonError
from dsreason.tools.doctor import environment, gpus, machine, network, trial, versions
from dsreason.tools.doctor.finding import DoctorFinding, report_failure, report_pass


@dataclass(frozen=True)
class Check:
    """A check of the machine: the name that is displayed while it runs, and the function that yields its findings."""

    name: str
    run: Callable[[], Iterator[DoctorFinding]]


CHECKS = (
    Check("Python", versions.check_python),
    Check("packages", versions.check_packages),
    Check("extras", versions.check_extras),
    Check("compiler", machine.check_compiler),
    Check("driver", gpus.check_driver_responds),
    Check("GPUs", gpus.check_gpus),
    Check("memory", machine.check_memory),
    Check("disks", machine.check_disks),
    Check("limits", machine.check_limits),
    Check("videos", machine.check_videos),
    Check("environment", environment.check_variables),
    Check("tokens", environment.check_tokens),
    Check("ports", network.check_ports),
)
TRIALS = (
    Check("a sum over two ranks (up to 3 minutes)", trial.check_collective),
    Check("a GRPO step of a tiny model with its rollout engine (about a minute)", trial.check_engine),
)


def iter_findings(check: Check) -> Iterator[DoctorFinding]:
    """Yield the findings of a check; if the check raises an error, yield the error as a failed finding."""
    try:
        yield from check.run()
    except Exception as error:  # noqa: BLE001 (a broken machine can raise anything)
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        yield report_failure(check.name, f"the check failed: {reason}", "please report this line")


def check_config(config: Any) -> Iterator[DoctorFinding]:
    """Check that the files named in a loaded configuration exist; URLs and names on the Hub are not queried."""
    from dsreason.config.deepspeed import read_deepspeed
    from dsreason.config.schema_data import DataConfig

    try:
        read_deepspeed(config.deepspeed)
        yield report_pass("deepspeed", config.deepspeed)
    except DsReasonError as error:
        yield report_failure("deepspeed", str(error), "choose another --ds-config")
    sources = config.data.list_sources() if isinstance(config.data, DataConfig) else (config.data,)
    paths = {"model.path": config.model.path} | {
        f"data.path ({number})": source.path for number, source in enumerate(sources, 1)
    }
    for key, value in paths.items():
        if not value or "://" in value or value.startswith("tiny:"):
            continue
        if Path(value).expanduser().exists():
            yield report_pass(key, f"{value} exists")
        elif value.startswith(("/", ".", "~")) or value.count("/") != 1:
            yield report_failure(key, f"{value} does not exist", "correct the path")
        else:
            yield report_pass(key, f"{value}: a name on the Hub, which was not queried")
