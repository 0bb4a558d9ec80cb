"""`dsreason sft`: supervised fine-tuning."""

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
from dsreason.config.schema import SFTConfig
from dsreason.runtime.imports import quick_imports

RECIPE = "builtin_sft.toml"


def sft(
    config: ConfigOption = None,
    ds_config: DeepSpeedOption = None,
    overrides: SetOption = None,
    output_dir: OutputOption = None,
    resume: ResumeOption = None,
    nproc: NprocOption = None,
    max_restarts: RestartsOption = 0,
    dry_run: DryRunOption = False,
) -> None:
    """Fine-tune on questions and answers about videos and images. Without --config: the built-in task."""
    job = Job(
        "sft",
        SFTConfig,
        RECIPE,
        config,
        ds_config,
        tuple(overrides or ()),
        output_dir,
        resume,
        nproc,
        max_restarts,
        dry_run,
    )
    run_job(job, check=check, run=run)


def check(config: SFTConfig, resume: str | None) -> None:
    with quick_imports():
        from dsreason.train.common.preflight import check_resume, check_sft, check_upload

    check_sft(config)
    check_upload(config, check_resume(config, resume))


def run(config: SFTConfig, output_dir: Path | None, resume: str | None) -> None:
    with quick_imports():
        from dsreason.train.sft import loop as sft

    sft.run(config, output_dir=output_dir, resume=resume)
