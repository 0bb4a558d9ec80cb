"""The vision settings with which a model was trained, as stored in checkpoints (`trainer_state.json`) and exports."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from dsreason.config.output import find_run_record
from dsreason.config.schema_data import VisionConfig
from dsreason.errors import CheckpointError
from dsreason.files.disk import read_small
from dsreason.problems import describe_first_problem

log = logging.getLogger(__name__)

VISION_FILE = "dsreason_vision.json"
"""Name of the file in an export."""
OF_ROWS = ("video_start", "video_end")
"""Settings that select a part of each training clip. They are not stored, because they do not apply to other clips."""


@dataclass(frozen=True)
class TrainedVision:
    """The vision settings of a run's training rows. Example: `TrainedVision({"fps": 2.0, "max_pixels": 81920})`."""

    settings: dict[str, int | float]
    """Keys that were set in `[data.vision]`; with several sources, those of the first source."""
    differing: list[str] = field(default_factory=list)
    """Paths (or adapters) of the sources with different settings."""

    def to_config(self) -> VisionConfig:
        return VisionConfig.model_validate(self.settings)

    def write(self, folder: Path) -> None:
        (folder / VISION_FILE).write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")


def collect_trained_vision(sources: Sequence[tuple[str, VisionConfig]]) -> TrainedVision:
    """Collect the settings of a run's training sources, each with its path."""
    (_, first), *others = [
        (path, vision.model_dump(exclude_none=True, exclude=set(OF_ROWS))) for path, vision in sources
    ]
    return TrainedVision(first, [path for path, settings in others if settings != first])


def read_trained_vision(folder: Path) -> TrainedVision | None:
    """Return an export's settings, or else the settings of the run that contains it; None if neither has any.

    Raises:
        CheckpointError: the export's file is invalid.
    """
    file = folder / VISION_FILE
    if not file.is_file():
        is_in_run = folder.absolute().parent.name == "export"
        return read_run_vision(folder.absolute().parent.parent) if is_in_run else None
    try:
        trained = TypeAdapter(TrainedVision).validate_json(read_small(file))
        trained.to_config()
    except (OSError, ValueError) as cause:
        problem = describe_first_problem(cause) if isinstance(cause, ValidationError) else cause
        raise CheckpointError(
            f"{file}: is not valid ({problem}); export the model again, or remove the file"
        ) from cause
    return trained


def read_run_vision(run: Path) -> TrainedVision | None:
    """Return the settings in a run's `config.json`, for exports and checkpoints from older versions; None if it has none."""
    data = (find_run_record(run) or {"config": {}})["config"].get("data")
    if not isinstance(data, dict):
        return None
    try:
        sources = [
            (str(source.get("path") or source.get("adapter")), VisionConfig.model_validate(source.get("vision", {})))
            for source in data.get("sources") or [data]
        ]
    except ValidationError as error:
        log.warning(
            "%s: has vision settings that are not valid (%s); they are ignored", run, describe_first_problem(error)
        )
        return None
    return collect_trained_vision(sources)


def format_settings(settings: Mapping[str, float]) -> str:
    """Format settings as in TOML: `fps = 2, max_pixels = 81920`."""
    return ", ".join(f"{key} = {value:.15g}" for key, value in settings.items())
