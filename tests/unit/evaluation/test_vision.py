"""The vision settings of an evaluation, which come from the user, from the model's training, or from defaults."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dsreason.checkpoints.trained_template import write_template_arguments
from dsreason.checkpoints.trained_vision import TrainedVision, collect_trained_vision, read_trained_vision
from dsreason.config.schema_data import VisionConfig
from dsreason.config.schema_eval import EvalConfig
from dsreason.errors import CheckpointError, ConfigError
from dsreason.evaluation.settings import collect_settings
from dsreason.evaluation.vision import apply_choice, choose_evaluation_vision, choose_vision
from tests.unit.evaluation.stand_in import PROXIES, StandIn, serving

TRAINED = TrainedVision({"fps": 2.0, "min_pixels": 1000, "max_pixels": 81920})


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    for variable in (*PROXIES, "OPENAI_API_KEY"):
        monkeypatch.delenv(variable, raising=False)
    with serving() as state:
        yield state


@pytest.fixture
def export(tiny_qwen3_vl: Path, tmp_path: Path) -> Path:
    """An export in a run folder with a different `data.vision`, as a later run in the same folder leaves it."""
    folder = tmp_path / "run" / "export" / "final"
    shutil.copytree(tiny_qwen3_vl, folder)
    write_record(tmp_path / "run", {"path": "a.jsonl", "vision": {"nframes": 6}})
    TRAINED.write(folder)
    return folder


def write_record(run: Path, data: dict[str, Any]) -> None:
    (run / "config.json").write_text(json.dumps({"config": {"data": data}, "deepspeed": {}}))


def config(**changes: Any) -> EvalConfig:
    return EvalConfig.model_validate({"datasets": ["robovqa"], **changes})


@pytest.mark.parametrize(
    ("settings", "stored"),
    [
        ({}, {}),
        ({"max_pixels": 500}, {"max_pixels": 500}),
        ({"nframes": 8, "video_start": 1.0}, {"nframes": 8}),
    ],
)
def test_only_explicit_vision_settings_are_stored(settings: dict[str, Any], stored: dict[str, Any]) -> None:
    assert collect_trained_vision([("a", VisionConfig(**settings))]) == TrainedVision(stored)


def test_sources_with_different_settings_are_listed() -> None:
    sources = [("a", VisionConfig(fps=1)), ("b", VisionConfig()), ("c", VisionConfig(fps=1))]
    assert collect_trained_vision(sources) == TrainedVision({"fps": 1.0}, ["b"])


@pytest.mark.parametrize(
    ("user", "used"),
    [
        ({}, {"fps": 2.0, "min_pixels": 1000, "max_pixels": 81920}),
        ({"fps": 4}, {"fps": 4.0, "min_pixels": 1000, "max_pixels": 81920}),
        ({"nframes": 8}, {"nframes": 8, "min_pixels": 1000, "max_pixels": 81920}),
        ({"max_pixels": 500}, {"fps": 2.0, "max_pixels": 500}),
        ({"min_pixels": 90000}, {"fps": 2.0, "min_pixels": 90000}),
    ],
)
def test_user_keys_take_precedence_over_training(user: dict[str, Any], used: dict[str, Any]) -> None:
    choice = choose_vision(VisionConfig(**user), TRAINED, "m", VisionConfig(fps=4))
    assert choice.settings.model_dump(exclude_none=True) == used
    assert choice.to_json() == {"used": used, "set": user, "trained": TRAINED.settings, "model": "m"}


@pytest.mark.parametrize(
    ("user", "trained", "origin", "line"),
    [
        ({}, None, "m", "fps = 4 (default; m has no vision settings of a training)"),
        ({}, None, "", "fps = 4 (default; the model is unknown)"),
        ({"fps": 2}, None, "m", "fps = 2 (set by you); m has no vision settings of a training"),
        ({}, TrainedVision({"fps": 2.0}), "m", "fps = 2 (as in training, m)"),
        (
            {"nframes": 8},
            TrainedVision({"fps": 2.0, "max_pixels": 81920}, ["b.jsonl"]),
            "m",
            "nframes = 8 (set by you); max_pixels = 81920 (as in training, m); training used fps = 2 instead (m); "
            "training used other settings for b.jsonl",
        ),
        ({"fps": 2}, TrainedVision({"fps": 2.0}), "m", "fps = 2 (set by you)"),
        ({}, TrainedVision({}), "m", "defaults (as in training, m)"),
    ],
)
def test_settings_and_their_origin_are_described(
    user: dict[str, Any], trained: TrainedVision | None, origin: str, line: str
) -> None:
    choice = choose_vision(VisionConfig(**user), trained, origin, VisionConfig(fps=4))
    assert choice.describe() == f"vision settings: {line}"


@pytest.mark.parametrize(
    ("changes", "used"),
    [
        ({}, {"fps": 2.0, "min_pixels": 1000, "max_pixels": 81920}),
        ({"evaluation": {"fps": 4}}, {"fps": 4.0, "min_pixels": 1000, "max_pixels": 81920}),
        ({"evaluation": {"fps": 4}, "vision": {"nframes": 6}}, {"nframes": 6, "min_pixels": 1000, "max_pixels": 81920}),
    ],
)
def test_evaluation_uses_vision_settings_of_export(export: Path, changes: dict[str, Any], used: dict[str, Any]) -> None:
    local = config(model={"path": str(export)}, **changes)
    applied = apply_choice(local, choose_evaluation_vision(local))
    assert applied.merge_vision().model_dump(exclude_none=True) == used


def test_evaluation_uses_template_arguments_of_export(export: Path) -> None:
    local = config(model={"path": str(export)})
    assert "evaluation.template_arguments" not in collect_settings(local, {})
    write_template_arguments(export, {"enable_thinking": False, "effort": "low"})
    choice = choose_evaluation_vision(local)
    line = f'chat template arguments of training: enable_thinking = false, effort = "low" ({export})'
    assert choice.describe().splitlines()[1] == line
    applied = apply_choice(local, choice)
    assert applied.evaluation.template_arguments == {"enable_thinking": False, "effort": "low"}
    assert collect_settings(applied, {})["evaluation.template_arguments"] == applied.evaluation.template_arguments
    changed = config(model={"path": str(export)}, evaluation={"template_arguments": {"enable_thinking": True}})
    applied = apply_choice(changed, choose_evaluation_vision(changed))
    assert applied.evaluation.template_arguments == {"enable_thinking": True, "effort": "low"}


def test_export_without_vision_settings_uses_defaults(export: Path) -> None:
    TrainedVision({}).write(export)
    local = config(model={"path": str(export)})
    assert apply_choice(local, choose_evaluation_vision(local)).merge_vision() == VisionConfig()


def test_source_settings_take_precedence_over_training(export: Path) -> None:
    source = {"path": "a.jsonl", "vision": {"max_pixels": 500}}
    local = config(datasets=[], sources=[source], model={"path": str(export)})
    applied = apply_choice(local, choose_evaluation_vision(local))
    vision = applied.merge_vision(applied.sources[0].vision)
    assert vision.model_dump(exclude_none=True) == {"fps": 2.0, "max_pixels": 500}


def test_older_export_uses_settings_of_its_run(export: Path) -> None:
    (export / "dsreason_vision.json").unlink()
    assert read_trained_vision(export) == TrainedVision({"nframes": 6})
    sources = [{"path": "a.jsonl", "vision": {"fps": 1.0}}, {"adapter": "mine.py:Rows", "vision": {}}]
    write_record(export.parents[1], {"sources": sources})
    assert read_trained_vision(export) == TrainedVision({"fps": 1.0}, ["mine.py:Rows"])


def test_unrelated_model_keeps_default_vision_settings(tiny_qwen3_vl: Path) -> None:
    local = config(model={"path": str(tiny_qwen3_vl)})
    choice = choose_evaluation_vision(local)
    assert choice.trained is None
    assert apply_choice(local, choice) == local
    assert local.merge_vision().model_dump(exclude_none=True) == {"fps": 4.0}


def test_invalid_stored_settings_are_rejected(export: Path) -> None:
    (export / "dsreason_vision.json").write_text('{"settings": {"fps": -1}}')
    with pytest.raises(CheckpointError, match=r"dsreason_vision.json: is not valid \(.*fps"):
        read_trained_vision(export)


def test_server_settings_come_from_its_local_folder(stand_in: StandIn, export: Path, tmp_path: Path) -> None:
    stand_in.models = {"data": [{"id": "mine", "root": str(export)}]}
    assert choose_evaluation_vision(config(server={"url": stand_in.url})).trained == TRAINED
    stand_in.models = {"data": [{"id": "mine", "root": "/on/another/machine"}]}
    choice = choose_evaluation_vision(config(server={"url": stand_in.url}))
    assert choice.describe() == "vision settings: fps = 4 (default; the model is unknown)"
    named = config(server={"url": stand_in.url, "folder": str(export)})
    assert choose_evaluation_vision(named).trained == TRAINED
    with pytest.raises(ConfigError, match=f"server.folder {tmp_path}: is not the folder of a supported model"):
        choose_evaluation_vision(config(server={"url": stand_in.url, "folder": str(tmp_path)}))
