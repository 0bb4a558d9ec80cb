"""The settings that an evaluation stores in its results folder."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from dsreason.config.schema_eval import EvalConfig
from dsreason.errors import ConfigError
from dsreason.evaluation.report.results import write_text
from dsreason.evaluation.settings import open_run_folder
from dsreason.models.folder import compute_fingerprint
from tests.unit.evaluation.made_results import made

MODEL = {"name": "m", "fingerprint": "1"}
ANSWERED = json.dumps([asdict(made())])


def config(**changes: Any) -> EvalConfig:
    return EvalConfig.model_validate({"datasets": ["robovqa"], "model": {"path": "m"}, **changes})


def with_results(folder: Path) -> Path:
    open_run_folder(folder, config(), MODEL)
    write_text(folder / "robovqa" / "1.json", ANSWERED)
    return folder


def test_settings_may_change_before_first_answer(tmp_path: Path) -> None:
    open_run_folder(tmp_path, config(), MODEL)
    write_text(tmp_path / "robovqa" / "1.json", json.dumps([asdict(made(error="the server responds with 500"))]))
    open_run_folder(tmp_path, config(evaluation={"seed": 2}), MODEL)
    assert json.loads((tmp_path / "run.json").read_text())["settings"]["evaluation.seed"] == 2


@pytest.mark.parametrize(
    ("changes", "model", "words"),
    [
        ({"evaluation": {"seed": 2}}, MODEL, "evaluation.seed was 1, but is now 2"),
        ({"generation": {"top_p": 0.5}}, MODEL, "generation.top_p was 0.95, but is now 0.5"),
        ({}, MODEL | {"fingerprint": "2"}, "model.fingerprint was '1', but is now '2'"),
        ({"vision": {"nframes": 4}}, MODEL, "vision.nframes was None, but is now 4"),
    ],
)
def test_changed_settings_or_weights_are_rejected(
    tmp_path: Path, changes: dict[str, Any], model: dict[str, str], words: str
) -> None:
    folder = with_results(tmp_path)
    with pytest.raises(ConfigError, match=words):
        open_run_folder(folder, config(**changes), model)


@pytest.mark.parametrize(
    "changes", [{"datasets": ["robovqa", "av"]}, {"evaluation": {"limit": 5, "batch_size": 2, "media_memory_gib": 1.0}}]
)
def test_evaluation_may_continue_with_harmless_changes(tmp_path: Path, changes: dict[str, Any]) -> None:
    open_run_folder(with_results(tmp_path), config(**changes), MODEL)


def test_vision_settings_of_shared_sources_are_compared(tmp_path: Path) -> None:
    def rows(name: str, fps: float) -> dict[str, Any]:
        return {"datasets": [], "sources": [{"path": f"{name}.jsonl", "vision": {"fps": fps}}]}

    open_run_folder(tmp_path, config(**rows("a", 2.0)), MODEL)
    write_text(tmp_path / "a" / "1.json", ANSWERED)
    open_run_folder(tmp_path, config(**rows("b", 1.0)), MODEL)
    with pytest.raises(ConfigError, match="vision of a was {'fps': 2.0}, but is now {'fps': 3.0}"):
        open_run_folder(tmp_path, config(**rows("a", 3.0)), MODEL)


def test_overwriting_deletes_only_the_selected_datasets(tmp_path: Path) -> None:
    folder = with_results(tmp_path)
    write_text(folder / "av" / "1.json", ANSWERED)
    open_run_folder(folder, config(evaluation={"overwrite": True}), MODEL)
    assert not (folder / "robovqa").exists() and (folder / "av").exists()


def test_partial_overwrite_with_new_settings_is_rejected(tmp_path: Path) -> None:
    folder = with_results(tmp_path)
    write_text(folder / "av" / "1.json", ANSWERED)
    with pytest.raises(ConfigError, match="evaluation.seed was 1, but is now 2"):
        open_run_folder(folder, config(evaluation={"overwrite": True, "seed": 2}), MODEL)
    assert (folder / "robovqa").exists()


def test_overwriting_everything_permits_changed_settings(tmp_path: Path) -> None:
    folder = with_results(tmp_path)
    open_run_folder(folder, config(evaluation={"overwrite": True, "seed": 2}), MODEL)
    assert not (folder / "robovqa").exists()


def test_results_without_settings_are_refused(tmp_path: Path) -> None:
    write_text(tmp_path / "robovqa" / "1.json", ANSWERED)
    with pytest.raises(ConfigError, match="run.json"):
        open_run_folder(tmp_path, config(), MODEL)


def test_edited_scorer_counts_as_changed(tmp_path: Path) -> None:
    judge, folder = tmp_path / "judge.py", tmp_path / "results"
    judge.write_text("def reward(completion, sample): return 1.0")
    local = config(evaluation={"scorer": f"{judge}:reward"})
    open_run_folder(folder, local, MODEL)
    write_text(folder / "robovqa" / "1.json", ANSWERED)
    open_run_folder(folder, local, MODEL)
    judge.write_text("def reward(completion, sample): return 0.0")
    with pytest.raises(ConfigError, match="evaluation.scorer's content was '[0-9a-f]{16}', but is now '[0-9a-f]{16}'"):
        open_run_folder(folder, local, MODEL)


def test_scorer_threshold_is_compared_with_old_default(tmp_path: Path) -> None:
    local = {"scorer": "exact_match"}
    open_run_folder(tmp_path, config(evaluation=local), MODEL)
    write_text(tmp_path / "robovqa" / "1.json", ANSWERED)
    record = json.loads((tmp_path / "run.json").read_text())
    del record["settings"]["evaluation.scorer_threshold"]
    write_text(tmp_path / "run.json", json.dumps(record))
    with pytest.raises(ConfigError, match=r"evaluation.scorer_threshold was 0.5, but is now None"):
        open_run_folder(tmp_path, config(evaluation=local), MODEL)
    open_run_folder(tmp_path, config(evaluation=local | {"scorer_threshold": 0.5}), MODEL)


@pytest.mark.parametrize("recorded", [{}, {"evaluation.scorer_threshold": 0.7}])
def test_compat_ignores_recorded_scorer_threshold(tmp_path: Path, recorded: dict[str, float]) -> None:
    local = config(evaluation={"scorer": "exact_match", "parser": "compat"})
    open_run_folder(tmp_path, local, MODEL)
    write_text(tmp_path / "robovqa" / "1.json", ANSWERED)
    record = json.loads((tmp_path / "run.json").read_text())
    del record["settings"]["evaluation.scorer_threshold"]
    write_text(tmp_path / "run.json", json.dumps(record | {"settings": record["settings"] | recorded}))
    open_run_folder(tmp_path, local, MODEL)


def test_fingerprint_changes_with_the_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    result = set()
    middle = b"a" * 100_000 + b"b" + b"a" * 99_999
    for content in (b"a" * 200_000, b"a" * 199_999 + b"b", b"a" * 199_999, middle):
        (tmp_path / "model.safetensors").write_bytes(content)
        result.add(compute_fingerprint(tmp_path))
    assert len(result) == 4
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    assert compute_fingerprint(tmp_path) not in result
