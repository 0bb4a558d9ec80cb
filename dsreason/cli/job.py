"""Code that the training commands share: their options, the checks before ranks start, and starting the ranks."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any, Generic, TypeVar, cast

import typer

from dsreason import train
from dsreason.config.deepspeed import read_deepspeed, resolve_deepspeed
from dsreason.config.load import dump_config, to_toml
from dsreason.config.output import build_default_output_dir, check_output_dir, resolve_output_dir
from dsreason.config.schema import JobConfig, RunConfig
from dsreason.errors import ConfigError
from dsreason.imports import make_imports_fast
from dsreason.job import launch, signals
from dsreason.job.gpu import check_gpus
from dsreason.screen import print_message, write
from dsreason.tools.cosmos_rl.loading import load_run
from dsreason.tools.cosmos_rl.tables import show

if TYPE_CHECKING:
    from dsreason.data.chat import Encoder
    from dsreason.data.types import Sample

ConfigOption = Annotated[Path | None, typer.Option("--config", help="Run configuration: TOML, YAML or JSON.")]
DeepSpeedOption = Annotated[
    str | None,
    typer.Option("--ds-config", help="DeepSpeed JSON: a path, or the name of a bundled file such as zero3.json."),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="A.B=V", help="Override one key, such as optim.lr=1e-5; V is a TOML value or null."),
]
OutputOption = Annotated[Path | None, typer.Option("--output-dir", help="Output folder of the run.")]
ResumeOption = Annotated[
    str | None,
    typer.Option(
        "--resume", metavar="auto|PATH", help="Checkpoint to continue from: its path, or auto for the newest."
    ),
]
NprocOption = Annotated[
    int | None, typer.Option("--nproc", min=1, help="Number of ranks to start; default: one per GPU.")
]
RestartsOption = Annotated[
    int, typer.Option("--max-restarts", min=0, help="Number of restarts from the last checkpoint after a crash.")
]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Check everything, print the configuration, and stop.")]


C = TypeVar("C", bound=JobConfig)


@dataclass
class Trainer(Generic[C]):
    """A training command.

    Its package has a module `preflight` with `check(config)`, `describe_modules(config)` and, for vision-language models,
    `build_row_encoder(config, encoder)`, and a module `loop` with `run(config, output_dir, resume)`. Both modules need torch and
    are imported only when used.
    """

    name: str
    schema: type[C]
    recipe: str
    """Name of the shipped recipe to use without --config."""
    help: str
    package: str = ""
    """Name of the trainer's package; empty: `dsreason.train.<name>`."""

    def check(self, config: C) -> None:
        """Check the data and the model before any rank starts."""
        self._import_module("preflight").check(config)

    def describe_modules(self, config: C) -> str:
        """Return a table of the modules with their learning rates; "" if the configuration has only one learning rate."""
        return cast("str", self._import_module("preflight").describe_modules(config))

    def build_row_encoder(self, config: C, encoder: Encoder) -> Callable[[Sample], object]:
        """Return the function that encodes a training row; it raises DataError for an unusable row."""
        return cast("Callable[[Sample], object]", self._import_module("preflight").build_row_encoder(config, encoder))

    def run(self, config: C, output_dir: Path | None, resume: str | None) -> None:
        """Run the training loop on one rank; if `output_dir` is None, the ranks agree on a folder."""
        self._import_module("loop").run(config, output_dir, resume)

    def _import_module(self, name: str) -> ModuleType:
        with make_imports_fast():
            return import_module(f"{self.package or f'dsreason.train.{self.name}'}.{name}")

    @property
    def own_sections(self) -> set[str]:
        """Names of the sections that this command has in addition to those in `RunConfig`."""
        return self.schema.model_fields.keys() - RunConfig.model_fields.keys()

    def command(self) -> Callable[..., None]:
        """Return the function that Typer registers as `dsreason NAME`."""

        def command(
            config: ConfigOption = None,
            ds_config: DeepSpeedOption = None,
            overrides: SetOption = None,
            output_dir: OutputOption = None,
            resume: ResumeOption = None,
            nproc: NprocOption = None,
            max_restarts: RestartsOption = 0,
            dry_run: DryRunOption = False,
        ) -> None:
            changes = tuple(overrides or ())
            run_job(TrainingCommand(self, config, ds_config, changes, output_dir, resume, nproc, max_restarts, dry_run))

        return command


def find_trainers() -> dict[str, Trainer[Any]]:
    """Find all trainers, by name.

    For each folder in `dsreason.train`, and for `world`, `dsreason.cli` has a module with the same name that defines `TRAINER`.
    """
    names = [module.name for module in iter_modules(train.__path__) if module.ispkg and module.name != "common"]
    return {name: import_module(f"dsreason.cli.{name}").TRAINER for name in [*names, "world"]}


@dataclass(frozen=True)
class TrainingCommand(Generic[C]):
    """An invocation of a training command, with its options."""

    trainer: Trainer[C]
    config: Path | None = None
    ds_config: str | None = None
    overrides: tuple[str, ...] = ()
    output_dir: Path | None = None
    resume: str | None = None
    nproc: int | None = None
    max_restarts: int = 0
    dry_run: bool = False

    @property
    def config_name(self) -> str:
        return str(self.config or f"{self.trainer.recipe} (shipped)")

    def arguments(self, output_dir: Path, resume: str | None) -> list[str]:
        """Build the command-line arguments with which each rank starts Python.

        Relative paths are kept, because ranks start in the same working folder.
        """
        options: list[tuple[str, object]] = [("--config", self.config), ("--ds-config", self.ds_config)]
        options += [("--set", text) for text in self.overrides]
        options += [("--output-dir", output_dir), ("--resume", resume)]
        return ["-m", "dsreason", self.trainer.name] + [
            f"{name}={value}" for name, value in options if value is not None
        ]


def load_job(job: TrainingCommand[C]) -> C:
    """Load the run configuration and apply the command-line options; without --config, report which recipe is used.

    A cosmos-rl configuration is converted, and a report on its keys is printed.
    """
    speaks = launch.is_first_rank() and not launch.is_started_by_us()
    if job.config is None and speaks:
        print_message(f"no --config: running the built-in recipe {job.trainer.recipe}", err=True)
    overrides = list(job.overrides)
    if job.ds_config is not None:
        overrides.append(f"deepspeed={to_toml(job.ds_config)}")
    if job.output_dir is not None:
        overrides.append(f"output_dir={to_toml(str(job.output_dir))}")
    trainer = job.trainer
    config, imported = load_run(trainer.name, trainer.schema, job.config, overrides, default_recipe=trainer.recipe)
    if imported is not None and speaks:
        show(imported)
    return config


def check_job(trainer: Trainer[C], config: C, resume: str | None) -> None:
    """Check the data, the model, the checkpoint to resume from and the upload targets before any rank starts."""
    with make_imports_fast():
        from dsreason.train.common.preflight import check_resume, check_upload

    trainer.check(config)
    check_upload(config, check_resume(config, resume))


def run_job(job: TrainingCommand[C], *, ranks_on_cpu: int = 1) -> Path | None:
    """Train if this process is a rank; otherwise, check everything and start the ranks.

    Returns:
        The output folder; None if it is unknown.
    """
    config = load_job(job)
    if launch.is_rank():
        return _run_rank(job, config)
    # These checks come first, because counting the GPUs imports torch, which takes seconds.
    read_deepspeed(config.deepspeed)
    output_dir = _resolve_output_dir(job, config) or build_default_output_dir(job.trainer.name)
    config = config.model_copy(update={"output_dir": str(output_dir)})
    check_output_dir(output_dir, config, job.resume)
    launch.prepare_environment()
    check_gpus()
    ranks = launch.count_ranks(job.nproc, launch.count_gpus(), on_cpu=ranks_on_cpu)
    deepspeed = _resolve_deepspeed(job, config, ranks)
    for note in config.check_ranks(ranks):
        print_message(f"note: {note}", err=True)
    print_message("checking data and model …", err=True)
    check_job(job.trainer, config, job.resume)
    if job.dry_run:
        if table := job.trainer.describe_modules(config):
            write(table, file=sys.stderr)
        _print_config(config, deepspeed)
        return output_dir
    before = _list_checkpoints(output_dir)
    print_message(f"{job.trainer.name} on {ranks} rank{'s' * (ranks > 1)}, output in {output_dir}", err=True)
    with signals.add_stop_message("no step was in progress, saved checkpoints are kept, and --resume auto continues"):
        launch.start_ranks(
            lambda attempt: job.arguments(output_dir, _choose_resume(attempt, job.resume, output_dir, before)),
            ranks=ranks,
            log_dir=output_dir / "logs",
            max_restarts=job.max_restarts,
        )
    return output_dir


def _run_rank(job: TrainingCommand[C], config: C) -> Path | None:
    world_size = os.environ["WORLD_SIZE"]
    if job.nproc is not None:
        raise ConfigError(
            f"--nproc ({job.nproc}) does not apply, because the launcher has started {world_size} ranks; remove it"
        )
    if job.max_restarts:
        raise ConfigError(
            f"--max-restarts ({job.max_restarts}) does not apply to ranks of a launcher; pass it to torchrun"
        )
    output_dir, resume = _resolve_output_dir(job, config), job.resume
    if job.dry_run:
        if launch.is_first_rank():
            _print_config(config, _resolve_deepspeed(job, config, int(world_size)))
        return output_dir
    with make_imports_fast():
        from dsreason.job import hosts, lifeline  # they import torch

    with lifeline.join_with_lifeline():
        hosts.check_hosts_match(config, {"command": job.trainer.name, "--resume": resume})
        if launch.is_started_by_torchrun():  # torchrun may restart the ranks
            output_dir = output_dir or Path(
                launch.share_value("output_dir", str(build_default_output_dir(job.trainer.name)))
            )
            before = json.loads(launch.share_value("checkpoints", json.dumps(_list_checkpoints(output_dir))))
            resume = _choose_resume(launch.get_attempt(), resume, output_dir, before)
        job.trainer.run(config, output_dir, resume)
    return output_dir


def _list_checkpoints(output_dir: Path) -> dict[str, str]:
    """Return a run's complete checkpoints: name → text that identifies the checkpoint's current version."""
    from dsreason.checkpoints.checkpoint_folder import find_complete_checkpoints
    from dsreason.checkpoints.marker import MARKER

    markers = {path.name: (path / MARKER).stat() for path in find_complete_checkpoints(output_dir / "checkpoints")}
    return {name: f"{marker.st_ino} {marker.st_mtime_ns}" for name, marker in markers.items()}


def _choose_resume(attempt: int, resume: str | None, output_dir: Path, before: Mapping[str, str]) -> str | None:
    """Return the value of `--resume` for an attempt: "auto" if this job has written a checkpoint, else the requested value.

    Checkpoints from before this job, listed in `before`, must not replace a requested path. They are recognised by their identity
    instead of their age, because the hosts' clocks may differ.
    """
    if attempt == 0 or (resume is not None and not _list_checkpoints(output_dir).items() - before.items()):
        return resume
    return "auto"


def _resolve_output_dir(job: TrainingCommand[C], config: C) -> Path | None:
    return resolve_output_dir(job.resume, Path(config.output_dir) if config.output_dir else None)


def _resolve_deepspeed(job: TrainingCommand[C], config: C, ranks: int) -> dict[str, Any]:
    device = launch.get_device_kind(launch.count_gpus())
    return resolve_deepspeed(config.deepspeed, config, device=device, world_size=ranks, config_name=job.config_name)


def _print_config(config: JobConfig, deepspeed: dict[str, Any]) -> None:
    write(json.dumps({**dump_config(config), "deepspeed_config": deepspeed}, indent=2))
