"""Which evaluation a results folder holds: `run.json`, and what may not differ when it is continued."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

from dsreason.config.load import dump_config
from dsreason.config.schema_eval import EvalConfig
from dsreason.errors import ConfigError
from dsreason.evaluation.results import RUN_FILE, read_json, safe_name, write_text
from dsreason.runtime.record import git_state, versions

DECIDING = ("evaluation", "generation", "vision")
MAY_DIFFER = {"num_processes", "skip_saved", "overwrite", "limit", "batch_size"}
"""What does not change an answer. Data sets may be added, too: each stored answer is compared with its question."""
MODEL = ("dtype", "max_length", "engine", "trust_remote_code", "attention")


def run_folder(config: EvalConfig, model_name: str) -> Path:
    """`<results_dir>/<model>/<answer_type>`."""
    return Path(config.results_dir).expanduser() / safe_name(model_name) / config.evaluation.answer_type


def model_fingerprint(folder: Path) -> str:
    """Tells model folders apart: the config, and name, size and header of each weights file."""
    found = hashlib.sha256()
    for file in sorted([folder / "config.json", *folder.glob("*.safetensors")]):
        found.update(f"{file.name} {file.stat().st_size}".encode())
        with file.open("rb") as opened:
            found.update(opened.read(65536))
            opened.seek(max(0, file.stat().st_size - 65536))
            found.update(opened.read())
    return found.hexdigest()[:16]


def settings_of(config: EvalConfig, model: dict[str, str]) -> dict[str, Any]:
    """What decides the answers: `{"model.fingerprint": …, "evaluation.seed": 1, …}`."""
    document = dump_config(config)
    found: dict[str, Any] = {f"model.{name}": value for name, value in model.items()}
    if config.server.url is None:
        found |= {f"model.{name}": document["model"][name] for name in MODEL}
    else:
        found["server.video"] = config.server.video
    for section in DECIDING:
        found |= {f"{section}.{key}": value for key, value in document[section].items() if key not in MAY_DIFFER}
    return found


def open_run_folder(folder: Path, config: EvalConfig, model: dict[str, str]) -> None:
    """Write `run.json`, or see that the evaluation there is this one.

    Raises:
        ConfigError: names the settings that differ, with both values; with `evaluation.overwrite` the results there of
            the data sets of this evaluation are deleted instead.
    """
    settings, file = settings_of(config, model), folder / RUN_FILE
    if config.evaluation.overwrite:
        for name in (*config.datasets, *(source.dataset for source in config.sources)):
            shutil.rmtree(folder / safe_name(name), ignore_errors=True)
    if file.exists() and has_results(folder):
        check_same_settings(read_json(file), settings, folder)
    elif has_results(folder):
        raise ConfigError(f"{folder}: holds results, and no {RUN_FILE} that says whose; give another results_dir")
    record = {"settings": settings, "versions": versions(), "git": git_state(), "config": dump_config(config)}
    write_text(file, json.dumps(record, indent=2) + "\n")


def has_results(folder: Path) -> bool:
    return any(folder.glob("*/*.json"))


def check_same_settings(record: Any, settings: dict[str, Any], folder: Path) -> None:
    before = record.get("settings") if isinstance(record, dict) else None
    if not isinstance(before, dict):
        raise ConfigError(f"{folder / RUN_FILE}: holds no settings; give another results_dir")
    differing = [
        f"{key} was {before.get(key)!r} and is {settings.get(key)!r}"
        for key in sorted(before.keys() | settings.keys())
        if before.get(key) != settings.get(key)
    ]
    if differing:
        raise ConfigError(
            f"{folder}: holds results of other settings:\n  "
            + "\n  ".join(differing)
            + "\ngive another results_dir, or set evaluation.overwrite = true to replace what is there"
        )
