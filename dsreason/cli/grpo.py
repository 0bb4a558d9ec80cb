"""`dsreason grpo`: reinforcement learning from rewards."""

from __future__ import annotations

from pathlib import Path

from dsreason.cli.job import (
    ConfigOption,
    DeepSpeedOption,
    DryRunOption,
    Job,
    NprocOption,
    OutputOption,
    RestartsOption,
    ResumeOption,
    SetOption,
    run_job,
)
from dsreason.config.schema_grpo import GRPOConfig
from dsreason.runtime.imports import quick_imports

RECIPE = "builtin_grpo.toml"


def grpo(
    config: ConfigOption = None,
    ds_config: DeepSpeedOption = None,
    overrides: SetOption = None,
    output_dir: OutputOption = None,
    resume: ResumeOption = None,
    nproc: NprocOption = None,
    max_restarts: RestartsOption = 0,
    dry_run: DryRunOption = False,
) -> None:
    """Train on rewards of the model's own answers to questions about videos and images."""
    job = Job(
        command="grpo",
        schema=GRPOConfig,
        default_recipe=RECIPE,
        config=config,
        ds_config=ds_config,
        overrides=tuple(overrides or ()),
        output_dir=output_dir,
        resume=resume,
        nproc=nproc,
        max_restarts=max_restarts,
        dry_run=dry_run,
    )
    run_job(job, check=check, run=run)


def check(config: GRPOConfig, resume: str | None) -> None:
    with quick_imports():
        from dsreason.train.common.preflight import check_grpo, check_resume, check_upload

    check_grpo(config)
    check_upload(config, check_resume(config, resume))


def run(config: GRPOConfig, output_dir: Path | None, resume: str | None) -> None:
    with quick_imports():
        from dsreason.train.grpo import loop as grpo

    grpo.run(config, output_dir=output_dir, resume=resume)
