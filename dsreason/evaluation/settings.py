"""Evaluation settings recorded in a results folder (`run.json`), and the check that a continued evaluation uses the same."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from dsreason.config.load import dump_config
from dsreason.config.schema_eval import EvalConfig
from dsreason.errors import ConfigError, DataError
from dsreason.evaluation.report.results import (
    RUN_FILE,
    list_dataset_files,
    make_safe_name,
    read_file,
    read_json,
    write_text,
)
from dsreason.files.disk import remove
from dsreason.job.record import read_git_state, read_versions

COMPARED = ("evaluation", "generation", "vision")
OPTIONS = ("engine_options", "scorer_options", "template_arguments")
NOT_COMPARED = {"num_processes", "skip_saved", "overwrite", "limit", "batch_size", "media_memory_gib", *OPTIONS}
"""Settings that are not compared because they do not affect answers, and the options, which are compared only if they are set.
Data sets are not compared, either, so that more can be added; instead, each stored answer is compared with its question."""
SOURCES = "vision of "
"""Prefix of keys that hold a source's vision settings. Such a key is compared only if both evaluations have the data set."""
THRESHOLD, FORMER_THRESHOLD = "evaluation.scorer_threshold", 0.5
"""Key of the scorer threshold, and its fixed value in older versions, which lacked the key."""
MODEL = ("max_length", "engine", "trust_remote_code", "attention")


def get_run_folder(config: EvalConfig, model_name: str) -> Path:
    """Return an evaluation's results folder, `<results_dir>/<model>/<answer_type>`."""
    return Path(config.results_dir).expanduser() / make_safe_name(model_name) / config.evaluation.answer_type


def collect_settings(config: EvalConfig, model: dict[str, str]) -> dict[str, Any]:
    """Collect the settings that affect the answers: `{"model.fingerprint": …, "evaluation.seed": 1, …}`."""
    document = dump_config(config)
    has_fingerprint = "fingerprint" in model  # a fingerprint identifies the model independently of its path
    settings: dict[str, Any] = {
        f"model.{key}": value for key, value in model.items() if key != "path" or not has_fingerprint
    }
    if config.server.url is None:
        settings |= {f"model.{name}": document["model"][name] for name in MODEL}
    else:
        settings["server.video"] = config.server.video
    for section in COMPARED:
        settings |= {f"{section}.{key}": value for key, value in document[section].items() if key not in NOT_COMPARED}
    for name in OPTIONS:
        if options := document["evaluation"][name]:
            settings[f"evaluation.{name}"] = options
    if config.evaluation.scorer is not None and (scorer := locate_scorer(config.evaluation.scorer)).is_file():
        settings["evaluation.scorer's content"] = hashlib.sha256(scorer.read_bytes()).hexdigest()[:16]
    for source in config.sources:
        settings[f"{SOURCES}{source.dataset}"] = config.merge_vision(source.vision).model_dump(exclude_none=True)
    return settings


def locate_scorer(scorer: str) -> Path:
    """Return the path of the file that a scorer such as `judge.py:helpful` names; for other scorers, the path does not exist."""
    return Path(scorer.partition(":")[0]).expanduser()


def open_run_folder(
    folder: Path, config: EvalConfig, model: dict[str, str], vision: Mapping[str, Any] = MappingProxyType({})
) -> None:
    """Check that existing results in the folder were made with the same settings, and write `run.json`.

    With `evaluation.overwrite`, the old results for this evaluation's data sets are not checked but deleted, provided that the
    settings agree with those of any results for other data sets. Questions without an answer do not count as results.

    `vision` records where the vision settings come from.

    Raises:
        ConfigError: settings differ; the message lists them with both values.
    """
    settings, file = collect_settings(config, model), folder / RUN_FILE
    replaced: list[Path] = []
    if config.evaluation.overwrite:
        replaced = [folder / make_safe_name(name) for name in config.names]
    stay = [inside for inside in sorted(folder.glob("*/")) if inside not in replaced]
    if any(has_answers(stored) for inside in stay for stored in list_dataset_files(inside)):
        if not file.exists():
            raise ConfigError(
                f"{folder}: contains results, but no {RUN_FILE} with their settings; set another results_dir"
            )
        settings = check_same_settings(read_json(file), settings, folder)
    for old in replaced:
        delete(old)
    facts = {"versions": read_versions(), "git": read_git_state(), "vision": dict(vision)}
    record = {"settings": settings, **facts, "config": dump_config(config)}
    write_text(file, json.dumps(record, indent=2) + "\n")


def delete(folder: Path) -> None:
    try:
        remove(folder)
    except OSError as error:
        raise DataError(f"{folder}: cannot be deleted ({error.strerror}); set another results_dir") from error


def has_answers(file: Path) -> bool:
    """Return whether the file has any answers. Questions that failed, for example because of a wrong URL, are asked again."""
    return any(result.error is None for result in read_file(file))


def check_same_settings(record: Any, settings: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Compare the settings with those in `record`, and raise ConfigError if they differ.

    Returns:
        The settings, together with the recorded settings for other data sets.
    """
    before = record.get("settings") if isinstance(record, dict) else None
    if not isinstance(before, dict):
        raise ConfigError(f"{folder / RUN_FILE}: contains no settings; set another results_dir")
    if before.get("evaluation.scorer") is not None and THRESHOLD not in before:
        before = before | {THRESHOLD: FORMER_THRESHOLD}
    compared = {key for key in before.keys() | settings.keys() if not key.startswith(SOURCES)}
    if settings["evaluation.parser"] == "compat":  # with `compat`, the scorer does not affect correctness
        before, settings = before | {THRESHOLD: None}, settings | {THRESHOLD: None}
    differing = [
        f"{key} was {before.get(key)!r}, but is now {settings.get(key)!r}"
        for key in sorted(compared | before.keys() & settings.keys())
        if before.get(key) != settings.get(key)
    ]
    if differing:
        raise ConfigError(
            f"{folder}: contains results with other settings:\n  "
            + "\n  ".join(differing)
            + "\nset another results_dir, or set evaluation.overwrite = true to replace the existing results"
        )
    return before | settings
