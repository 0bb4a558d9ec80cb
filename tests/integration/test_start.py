"""Work that a rank skips at its start: the checks that the command has already run, and DeepSpeed's Muon optimizer."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from dsreason.config.load import load_config
from dsreason.config.schema import SFTConfig
from dsreason.job.failures import ERROR_DIR
from tests.distributed import run_on_ranks

pytestmark = pytest.mark.integration


def started_run(folder: Path, *, by_us: bool) -> tuple[int, list[str]]:
    """Return how often the checks ran in a rank, and the unwanted modules and variables that its engine left behind."""
    if by_us:
        os.environ[ERROR_DIR] = str(folder)
    from dsreason.train.common.opening import build_policy_engine, open_policy_job

    checks: list[SFTConfig] = []
    config = load_config(SFTConfig, None, [], default_recipe="builtin_sft.toml")
    with ExitStack() as stack:
        job, _ = open_policy_job(config, folder / "run", None, command="sft", check=checks.append, stack=stack)
        build_policy_engine(job.config, job.deepspeed, job.model_path)
    unwanted = ("torch._inductor.compile_fx", "TORCHDYNAMO_DISABLE")
    return len(checks), [name for name in unwanted if name in {*sys.modules, *os.environ}]


def started_by_us(folder: Path) -> tuple[int, list[str]]:
    return started_run(folder, by_us=True)


def started_by_another(folder: Path) -> tuple[int, list[str]]:
    return started_run(folder, by_us=False)


@pytest.mark.parametrize("start, num_checks", [(started_by_us, 0), (started_by_another, 1)])
def test_rank_skips_checks_and_compilation(
    start: Callable[[Path], tuple[int, list[str]]], num_checks: int, tmp_path: Path
) -> None:
    assert run_on_ranks(start, 1, tmp_path) == [(num_checks, [])]
