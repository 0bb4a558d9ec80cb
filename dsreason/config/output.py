"""Functions for the output folder: its default name, checks before a run uses it, and the configuration stored in it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, StrictStr, ValidationError

from dsreason.config.load import dump_config
from dsreason.config.schema import JobConfig
from dsreason.errors import ConfigError
from dsreason.files.atomic import write_file
from dsreason.files.disk import check_writable, read_small
from dsreason.files.lock import check_not_in_use
from dsreason.problems import describe_first_problem, is_nested_deeper
from dsreason.secrets import hide_in_json

CONFIG_FILE = "config.json"
CHECKPOINTS = "checkpoints"
FOLDERS = (CHECKPOINTS, "export", "logs", "nonfinite", "profile", "rollouts", "tensorboard", "validation", "wandb")

OF_ONE_COMMAND = ("grpo", "dpo", "world")
"""Configuration sections that exist only for the command of the same name; SFT has no such section."""
SAME_RUN_KEYS = ("train.global_batch_size", "train.precision", "train.seed", "train.ema_decay", "train.ema_every")
MAY_DIFFER = frozenset(
    {
        *(
            "model.gradient_checkpointing",
            "model.attention",
            "model.trust_remote_code",
            "data.workers",
            "data.prefetch",
        ),
        *("reward.workers", "reward.time_limit", "reward.enqueue_url", "reward.fetch_url"),
    }
)
"""Keys that a resumed run may change, because they affect speed or memory use but not the results."""


class Source(BaseModel):
    """Fields that are read from a section for a model or a data set."""

    path: StrictStr = ""


class DataRecord(Source):
    """Fields that are read from the section `data`."""

    sources: list[Source] = []


class ConfigRecord(BaseModel):
    """Fields that are read from the configuration in a run's record."""

    model: Source = Source()
    data: DataRecord = DataRecord()


class RunRecord(BaseModel):
    """Fields that are read from a run's record; records of older versions have fewer fields."""

    config: ConfigRecord
    command: list[StrictStr] = []
    versions: dict[str, StrictStr] = {}


def build_default_output_dir(command: str) -> Path:
    """Return the default output folder, `outputs/<command>-<time>`, such as `outputs/sft-20260131-120000`."""
    return Path("outputs") / f"{command}-{time.strftime('%Y%m%d-%H%M%S')}"


def resolve_output_dir(resume: str | None, output_dir: Path | None) -> Path | None:
    """Return the output folder; if unset, it is derived from the checkpoint to resume from (`D/checkpoints/step_N` → `D`)."""
    if resume == "auto" and output_dir is None:
        raise ConfigError("--resume auto needs the folder of the run; specify the folder with --output-dir")
    if resume in (None, "auto"):
        return output_dir
    checkpoint = Path(str(resume))
    if not checkpoint.is_dir():
        raise ConfigError(
            f"--resume {resume}: the folder does not exist; pass a checkpoint (D/{CHECKPOINTS}/step_N), or auto"
        )
    return output_dir or _find_run(checkpoint)


def check_output_dir(folder: Path, config: JobConfig, resume: str | None) -> None:
    """Check that the folder is writable, not in use, and contains no run except the one to resume; create nothing.

    Raises:
        ConfigError: the folder cannot be used. If it contains a run with different settings, the message lists them with both
            values.
    """
    check_writable(folder, "--output-dir")
    check_not_in_use(folder)
    for inside in (folder / name for name in FOLDERS):
        if (inside.is_symlink() or inside.exists()) and not inside.is_dir():
            raise ConfigError(f"{inside} exists but is not a folder; remove it, or choose another --output-dir")
    if resume is None:
        names = [name for name in (CONFIG_FILE, CHECKPOINTS) if (folder / name).exists()]
        if names:
            raise ConfigError(
                f"{folder} already contains a run ({' and '.join(names)}); continue the run with --resume auto, "
                "or choose another --output-dir"
            )
        return
    _check_same_run(folder, config)
    if resume != "auto" and _find_run(Path(resume)).resolve() != folder.resolve():
        _check_same_run(_find_run(Path(resume)), config)


def write_run_config(folder: Path, config: BaseModel, facts: Mapping[str, Any]) -> None:
    """Write `config.json`: the configuration under `config`, and `facts` (versions, git state, world size) at the top level."""
    folder.mkdir(parents=True, exist_ok=True)
    document = {"config": dump_config(config), **hide_in_json(dict(facts))}
    write_file(folder / CONFIG_FILE, json.dumps(document, indent=2) + "\n")


def find_run_record(folder: Path) -> dict[str, Any] | None:
    """Return the content of a dsreason run's `config.json`; None if the file is missing, damaged, or a model's."""
    try:
        return read_record(folder)
    except (OSError, ValueError, RecursionError):
        return None


def read_record(folder: Path) -> dict[str, Any]:
    """Read a dsreason run's `config.json`.

    Raises:
        OSError, ValueError, RecursionError: the file cannot be read, or does not describe a run.
    """
    record = json.loads(read_small(folder / CONFIG_FILE), parse_constant=_refuse_constant)
    if not (isinstance(record, dict) and isinstance(record.get("config"), dict)):
        raise ValueError('it has no "config" object')
    if is_nested_deeper(record):
        raise ValueError("it is nested too deeply")
    try:
        RunRecord.model_validate(record)
    except ValidationError as error:
        raise ValueError(describe_first_problem(error)) from None
    return dict(record)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"it contains {name}")


def read_run_config(folder: Path) -> dict[str, Any] | None:
    """Return the configuration of the run in `folder`; None if it has no `config.json`."""
    file = folder / CONFIG_FILE
    if not os.path.lexists(file):
        return None
    try:
        return dict(read_record(folder)["config"])
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{file} is not a valid run configuration ({error}); restore it, remove it to continue without comparing "
            "settings, or choose another --output-dir"
        ) from None


def _find_run(checkpoint: Path) -> Path:
    """Return the folder of a checkpoint's run; a folder that is not in `checkpoints` is returned unchanged."""
    return checkpoint.parent.parent if checkpoint.absolute().parent.name == CHECKPOINTS else checkpoint


def _check_same_run(folder: Path, config: JobConfig) -> None:
    before = read_run_config(folder)
    if before is None:
        return
    then, now = (
        next((name for name in OF_ONE_COMMAND if name in keys), "sft") for keys in (before, type(config).model_fields)
    )
    if then != now:
        weights = "" if "world" in (then, now) else "; to start from that run's weights, set model.path to its export"
        raise ConfigError(
            f"{folder} contains a run of dsreason {then}, but this is dsreason {now}; choose another --output-dir{weights}"
        )
    # The saved values are masked again, because an older version may have written values that this version masks.
    defaults = dump_config(
        type(config).model_construct()
    )  # no validation, because some configurations have required keys
    differing = find_differing_keys(hide_in_json(before), dump_config(config), config.deciding_sections, defaults)
    if differing:
        differences = "; ".join(f"{key} was {old!r} and is now {new!r}" for key, old, new in differing[:3])
        more = f" (and {len(differing) - 3} more)" if len(differing) > 3 else ""
        raise ConfigError(
            f"{folder} contains a run with different settings: {differences}{more}; restore the old values to continue "
            "the run, or choose another --output-dir and omit --resume"
        )


def find_differing_keys(
    before: dict[str, Any], now: dict[str, Any], sections: Collection[str], defaults: dict[str, Any]
) -> list[tuple[str, Any, Any]]:
    """Return (key, old value, new value) for each key that affects a run's results and has changed.

    For a key that the older version did not have, the old value is the default.
    """
    new = flatten_keys(now)
    old = {key: value for key, value in flatten_keys(defaults).items() if key in new} | flatten_keys(before)
    return [
        (key, old.get(key), new.get(key))
        for key in dict.fromkeys([*new, *old])
        if key not in MAY_DIFFER and (key.split(".")[0] in sections or key in SAME_RUN_KEYS)
        if old.get(key) != new.get(key)
    ]


def flatten_keys(section: Any, prefix: str = "") -> dict[str, Any]:
    """Flatten nested sections: `{"optim": {"lr": 1.0}}` → `{"optim.lr": 1.0}`."""
    if isinstance(section, dict):
        items = section.items()
    elif isinstance(section, list) and any(isinstance(item, dict) for item in section):
        items = {str(i): item for i, item in enumerate(section)}.items()
    else:
        return {prefix.removesuffix("."): section}
    values: dict[str, Any] = {}
    for key, value in items:
        values |= flatten_keys(value, f"{prefix}{key}.")
    return values
