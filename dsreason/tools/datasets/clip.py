"""Functions that cut clips that are not on the Hub from raw videos; `clip_rules` derives each cut from the clip's name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from dsreason.config.schema_data import SourceConfig
from dsreason.data.rows import JSON_SUFFIXES, read_rows
from dsreason.errors import DataError
from dsreason.problems import join_first
from dsreason.tools.datasets.clip_rules import Cut, MissingRaw, Rule, check_name
from dsreason.tools.datasets.cutting import cut_clip
from dsreason.tools.datasets.processes import run_tracked


@dataclass(frozen=True)
class CutClips:
    """The requested clips, grouped by what happened to them."""

    cut: list[str] = field(default_factory=list)
    present: list[str] = field(default_factory=list)
    """Names of the clips that already existed."""
    missing: list[str] = field(default_factory=list)
    """A message for each clip whose raw video is missing."""
    failed: list[str] = field(default_factory=list)
    """A message for each clip that could not be cut."""


def list_needed_clips(folder: Path, dataset: str, annotations: Sequence[Path] = ()) -> list[str]:
    """List the clip names (without `.mp4`) in the `video` fields of the annotation files, by default all JSON files in `folder`.

    Raises:
        DataError: no annotation file exists, or a name does not follow the data set's naming convention.
    """
    files = list(annotations) or sorted(file for file in folder.glob("*") if file.suffix.lower() in JSON_SUFFIXES)
    if not files:
        raise DataError(
            f"{folder}: has no annotation file (.json, .jsonl); download it with dsreason data fetch, or pass it with "
            "--annotations"
        )
    names: dict[str, None] = {}
    problems = []
    for file in files:
        rows = read_rows(SourceConfig(path=str(file)))
        for index in range(len(rows)):
            try:
                names[read_clip_name(rows[index], dataset)] = None
            except DataError as error:
                problems.append(f"{rows.describe_location(index)}: {error}")
    if problems:
        shown_problems = join_first(problems, 10, separator="\n  ")
        raise DataError(f"{len(problems)} rows do not name a valid clip of {dataset}:\n  {shown_problems}")
    return list(names)


def read_clip_name(row: Any, dataset: str) -> str:
    """Return the name of a row's clip: `{"video": "clips/a.mp4"}` → `a`."""
    video = row.get("video") if isinstance(row, dict) else None
    if not isinstance(video, str) or not video:
        raise DataError(f"field 'video' must be the path of a clip; got {video!r:.100}")
    name = video.removeprefix("clips/").removesuffix(".mp4")
    check_name(name, dataset)
    return name


def cut_clips(names: Sequence[str], rule: Rule, folder: Path, *, workers: int = 0) -> CutClips:
    """Cut each clip that is not in `folder` yet to `<name>.mp4`, in `workers` processes (0: in this process)."""
    folder.mkdir(parents=True, exist_ok=True)
    clips = CutClips(present=[name for name in names if (folder / f"{name}.mp4").is_file()])
    cuts: list[tuple[str, Cut]] = []
    present = set(clips.present)
    for name in (name for name in names if name not in present):
        try:
            cuts.append((name, rule(name)))
        except MissingRaw as error:
            clips.missing.append(f"{name}: {error}")
        except DataError as error:
            clips.failed.append(f"{name}: {error}")
    cuts.sort(key=lambda task: task[1].source)  # keep clips from the same raw video together
    results = run_tracked(
        partial(cut_one, folder=folder), cuts, lambda task: str(task[1].source), workers, "cutting", "clips"
    )
    for (name, _), result in zip(cuts, results, strict=True):
        if isinstance(result, DataError):
            clips.failed.append(f"{name}: {result}")
        else:
            clips.cut.append(name)
    return clips


def cut_one(task: tuple[str, Cut], folder: Path) -> None:
    name, cut = task
    cut_clip(cut, folder / f"{name}.mp4")
