"""`dsreason eval` of world models as a user would run it: two models, an interruption, and a comparison."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.command import dsreason, metrics

pytestmark = [pytest.mark.integration, pytest.mark.long]

RUN = """
[model]
path = "tiny:squares"
max_prompt_length = 64
[data]
frames = 9
height = 32
width = 32
limit = 24
validation = 8
[optim]
lr = 1e-2
[train]
max_steps = 1
precision = "fp32"
micro_batch_size = 3
ema_decay = 0.5
[world]
prompts_per_step = 2
num_generations = 2
sampling_steps = 4
schedule = "linear"
guidance_scale = 2.0
conditional_frames = [0, 1]
[reward.functions]
follow = 1.0
brightness = 0.5
[validation]
max_samples = 5
[checkpoint]
export_dtype = "fp32"
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create `run/`, a run on one rank, and `results/` of its final model and of the model that it started from."""
    pytest.importorskip("diffusers")
    folder = tmp_path_factory.mktemp("world_eval")
    (folder / "run.toml").write_text(RUN)
    trained = dsreason("world", "--config", "run.toml", "--output-dir", "run", cwd=folder)
    assert trained.returncode == 0, trained.stderr
    for options in (["--model", "run", "--nproc", "2"], ["--config", "run.toml"]):
        ended = dsreason("eval", *options, "--results-dir", "results", cwd=folder)
        assert ended.returncode == 0, ended.stderr
    return folder


def means(results: Path) -> dict[str, float]:
    summary = json.loads((results / "summary.json").read_text())
    return {name: item["mean"] for name, item in summary["values"].items()}


@pytest.mark.long
def test_evaluation_of_export_matches_last_validation(folder: Path) -> None:
    """Evaluate the exported average with the same prompts, noise, guidance and given frames, but on two ranks with other
    micro-batches."""
    last = metrics(folder / "run")[-1]
    result = means(folder / "results" / "run-final")
    assert result["reward"] == pytest.approx(last["val/reward/mean"], abs=1e-5)
    assert result["reward/follow"] == pytest.approx(last["val/reward/follow/mean"], abs=1e-5)
    assert result["brightness"] == pytest.approx(last["val/brightness"], abs=1e-5)
    assert (folder / "results" / "run-final" / "world.html").read_text().count("<video") == 5


def test_evaluation_of_start_model_matches_first_validation(folder: Path) -> None:
    first = metrics(folder / "run")[0]
    result = means(folder / "results" / "tiny-squares")
    assert result["reward"] == pytest.approx(first["val/reward/mean"], abs=1e-5)
    assert result["reward"] != pytest.approx(metrics(folder / "run")[-1]["val/reward/mean"], abs=1e-5)


def test_two_models_are_compared_clip_by_clip(folder: Path) -> None:
    results = folder / "results"
    ended = dsreason("score", "--results-dir", results / "run-final", "--compare", results / "tiny-squares", cwd=folder)
    assert ended.returncode == 0, ended.stderr
    loads = json.loads((results / "run-final" / "summary.json").read_text())["comparison"]
    assert loads["clips"] == 5
    after, before = means(results / "run-final"), means(results / "tiny-squares")
    assert loads["values"]["reward"]["estimate"]["mean"] == pytest.approx(after["reward"] - before["reward"])
    low, high = loads["values"]["reward"]["estimate"]["interval"]
    assert low <= after["reward"] - before["reward"] <= high
    assert (results / "run-final" / "world.html").read_text().count("<video") == 10


def test_evaluation_resumes_without_changing_other_clips(folder: Path) -> None:
    clips = folder / "results" / "tiny-squares" / "clips"
    before = {file.name: file.read_bytes() for file in clips.glob("*.json")}
    remaining = {name: (clips / name).stat().st_mtime_ns for name in before if name != "3.json"}
    (clips / "3.json").unlink()
    ended = dsreason("eval", "--config", "run.toml", "--results-dir", "results", cwd=folder)
    assert ended.returncode == 0, ended.stderr
    after = {file.name: file.read_bytes() for file in clips.glob("*.json")}
    second, first = (json.loads(result.pop("3.json")) for result in (after, before))
    assert after == before
    # The last bit of MKL's results may depend on the memory address.
    assert second.pop("rewards") == pytest.approx(first.pop("rewards"), abs=1e-6)
    assert second == first
    assert {name: (clips / name).stat().st_mtime_ns for name in remaining} == remaining


def test_options_for_other_models_are_rejected(folder: Path) -> None:
    ended = dsreason("eval", "--model", "run", "--data", "rows.jsonl", cwd=folder)
    assert ended.returncode == 2
    assert "--data does not apply to world models; remove it" in ended.stderr
    ended = dsreason(
        *("eval", "--config", "run.toml", "--results-dir", "results"),
        *("--set", "world.sampling_steps=5"),
        cwd=folder,
    )
    assert ended.returncode == 2
    assert "contains an evaluation with a different world.sampling_steps (was 4, is now 5)" in ended.stderr
