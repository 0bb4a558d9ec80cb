"""Files of a world-model evaluation: its settings and one result per clip, from which an interrupted evaluation continues."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import FiniteFloat, TypeAdapter, ValidationError

from dsreason.config.output import flatten_keys
from dsreason.errors import ConfigError, DataError
from dsreason.files.atomic import write_file
from dsreason.files.disk import read_small
from dsreason.problems import describe_first_problem, is_nested_deeper

SETTINGS_FILE, CLIPS = "world.json", "clips"
MODEL_KEYS = ("model.path", "model.revision", "model.weights")
"""Settings that may differ between two compared evaluations."""


@dataclass(frozen=True)
class ClipResult:
    """The result for a clip.

    Example: `ClipResult(3, "test.txt:4", "a red square", {"": 0.9, "colour": 0.95}, 0.2, 0.01, [12, 200, …])`.
    """

    number: int
    """Number of the prompt, which determines the noise."""
    id: str
    prompt: str
    rewards: dict[str, FiniteFloat]
    """Reward name → value, with the weighted sum under ""; empty if the evaluation has no rewards."""
    brightness: FiniteFloat
    motion: FiniteFloat
    picture: list[int]
    """The clip's pixel values at a low resolution, 0 to 255; diversity is computed from them."""


CLIP = TypeAdapter(ClipResult)


def locate_clip_result(folder: Path, number: int) -> Path:
    return folder / CLIPS / f"{number}.json"


def write_clip(folder: Path, clip: ClipResult) -> None:
    write_file(locate_clip_result(folder, clip.number), json.dumps(asdict(clip), ensure_ascii=False) + "\n")


def read_clips(folder: Path) -> list[ClipResult]:
    """Read the results, sorted by number; ignore files with other names. Raise DataError if a result is damaged."""
    files = {int(file.stem): file for file in (folder / CLIPS).glob("*.json") if file.stem.isdecimal()}
    clips = [read_clip(files[number]) for number in sorted(files)]
    for number, clip in zip(sorted(files), clips, strict=True):
        if len(clip.picture) != len(clips[0].picture):
            raise DataError(
                f"{files[number]}: its picture has {len(clip.picture)} values, but that of {files[min(files)]} has "
                f"{len(clips[0].picture)}; delete the damaged file and evaluate again"
            )
    return clips


def read_clip(file: Path) -> ClipResult:
    try:
        return CLIP.validate_json(read_small(file), strict=True)
    except (OSError, ValueError) as error:
        problem = describe_first_problem(error) if isinstance(error, ValidationError) else error
        raise DataError(f"{file}: is not the result of a clip ({problem}); delete it and evaluate again") from error


def check_settings(folder: Path, settings: Mapping[str, Any]) -> None:
    """Raise ConfigError if the folder contains an evaluation with different settings."""
    if (folder / SETTINGS_FILE).is_file() and (changed := find_differences(read_settings(folder), settings)):
        name, (before, now) = next(iter(changed.items()))
        raise ConfigError(
            f"{folder}: contains an evaluation with a different {name} (was {before!r}, is now {now!r}); choose another "
            "--results-dir, or start over with --overwrite"
        )


def open_results(folder: Path, settings: Mapping[str, Any], *, overwrite: bool) -> None:
    """Create the folder and write the settings; with `overwrite`, delete existing results.

    Raises:
        ConfigError: the folder contains an evaluation with different settings, and `overwrite` is false.
    """
    (folder / CLIPS).mkdir(parents=True, exist_ok=True)
    if overwrite:
        for clip in (folder / CLIPS).iterdir():
            clip.unlink()
    else:
        check_settings(folder, settings)
    write_file(folder / SETTINGS_FILE, json.dumps(settings, indent=2, ensure_ascii=False) + "\n")


def read_settings(folder: Path) -> dict[str, Any]:
    """Read the settings. Raise DataError if the folder or its settings are missing or invalid."""
    if not folder.is_dir():
        raise DataError(f"{folder}: does not exist; specify the results folder of a world-model evaluation")
    file = folder / SETTINGS_FILE
    try:
        settings = dict(json.loads(read_small(file)))
        if is_nested_deeper(settings):
            raise ValueError("it is nested too deeply")
        return settings
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise DataError(f"{file}: does not contain the settings of a world-model evaluation ({error})") from error


def find_differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the settings that differ: dotted name → (value in `one`, value in `other`)."""
    first, second = flatten_keys(dict(one)), flatten_keys(dict(other))
    names = dict.fromkeys([*first, *second])
    return {name: (first.get(name), second.get(name)) for name in names if first.get(name) != second.get(name)}
