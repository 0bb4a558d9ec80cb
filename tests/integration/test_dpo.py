"""Runs of `dsreason dpo` on real ranks: they resume exactly, and measure the reference once and check it from then on."""

from __future__ import annotations

import json
import math
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.distributed import run_on_ranks
from tests.integration.command import metrics
from tests.integration.test_dpo_gradients import write_pairs

pytestmark = pytest.mark.integration

RUN = """
deepspeed = "{deepspeed}"
[model]
path = "{model}"
gradient_checkpointing = false
[data]
adapter = "jsonl"
path = "{rows}"
workers = 0
validation = 2
vision.fps = 4.0
[optim]
lr = 1e-3
warmup = 0
schedule = "constant"
[train]
epochs = 4
global_batch_size = 4
max_tokens_per_micro_batch = 120
precision = "fp32"
[dpo]
loss = "mpo"
[validation]
every = 3
[checkpoint]
every = 3
keep = -1
"""


def run_dpo(file: str, output_dir: str, resume: str | None, changes: tuple[str, ...]) -> None:
    """Run `dsreason dpo` the way one of its ranks does."""
    from dsreason.cli.job import TrainingCommand, find_trainers, load_job

    trainer = find_trainers()["dpo"]
    trainer.run(load_job(TrainingCommand(trainer, Path(file), overrides=changes)), Path(output_dir), resume)


def train(folder: Path, name: str, *changes: str, ranks: int = 2, resume: str | None = None) -> Path:
    run_on_ranks(run_dpo, ranks, str(folder / "run.toml"), str(folder / name), resume and str(folder / resume), changes)
    return folder / name


def losses(run: Path, after: int = 0) -> list[float]:
    return [line["train/loss"] for line in metrics(run) if line["step"] > after and "train/loss" in line]


def stored(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "reference.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_qwen2_5_vl: Path) -> Path:
    """Return a folder with `whole/`, a run of six steps on two ranks, and `resumed/`, which repeats the last three of these
    steps."""
    return whole_and_resumed(tmp_path_factory.mktemp("dpo"), tiny_qwen2_5_vl, "zero3.json")


def whole_and_resumed(folder: Path, model: Path, deepspeed: str) -> Path:
    rows = write_pairs(folder / "data")
    shutil.copytree(model, folder / "model")
    (folder / "run.toml").write_text(RUN.format(model=folder / "model", rows=rows, deepspeed=deepspeed))
    train(folder, "whole")
    train(folder, "resumed", resume="whole/checkpoints/step_3")
    return folder


def test_resumed_run_matches_full_run_exactly(folder: Path) -> None:
    check_resumed(folder)


@pytest.mark.nightly
def test_zero2_qwen3_resumed_run_matches_exactly(tmp_path: Path, tiny_qwen3_vl: Path) -> None:
    check_resumed(whole_and_resumed(tmp_path, tiny_qwen3_vl, "zero2.json"))


def check_resumed(folder: Path) -> None:
    assert len(losses(folder / "whole")) == 6
    assert losses(folder / "resumed", after=3) == losses(folder / "whole", after=3)
    full, resumed = (load_file(folder / name / "export/final/model.safetensors") for name in ("whole", "resumed"))
    assert all(full[name].equal(resumed[name]) for name in full)


def test_baseline_resumes_from_checkpoint(folder: Path) -> None:
    full, resumed = (
        {line["step"]: line["dpo/baseline"] for line in metrics(folder / name) if "dpo/baseline" in line}
        for name in ("whole", "resumed")
    )
    assert full[1] == 0
    assert len({full[step] for step in (2, 3, 4, 5, 6)}) == 5
    assert [resumed[step] for step in (4, 5, 6)] == [full[step] for step in (4, 5, 6)]


def test_reference_is_measured_once_per_row(folder: Path) -> None:
    header, *rows = stored(folder / "whole")
    assert header.keys() == {"model"}
    assert sorted((row["part"], row["row"]) for row in rows) == [
        *(("training", i) for i in range(6)),
        *(("validation", i) for i in range(2)),
    ]
    assert stored(folder / "resumed") == stored(folder / "whole")


def test_initial_policy_equals_reference(folder: Path) -> None:
    first, *_ = metrics(folder / "whole")
    assert first["step"] == 0
    assert first["val/margin"] == pytest.approx(0, abs=1e-5)
    assert {"val/loss", "val/preference_accuracy", "val/ranking_accuracy"} <= first.keys()


def test_steps_log_margins_lengths_and_both_answers(folder: Path) -> None:
    line = next(line for line in metrics(folder / "whole") if line["step"] == 6)
    names = ("loss", "margin", "accuracy", "ranking", "chosen", "rejected", "chosen_length", "rejected_length")
    assert {f"dpo/{name}" for name in names} <= line.keys()
    assert line["dpo/margin"] == pytest.approx(0.1 * (line["dpo/chosen"] - line["dpo/rejected"]))


def test_reference_file_of_another_run_is_used(folder: Path) -> None:
    value = f'dpo.reference_file="{folder / "whole/reference.jsonl"}"'
    run = train(folder, "given", 'dpo.reference="precomputed"', value, "train.max_steps=3")
    assert losses(run) == pytest.approx(losses(folder / "whole")[:3], rel=1e-6)
    assert not (run / "reference.jsonl").exists()


def test_log_ratios_equal_logprobs_without_reference(folder: Path) -> None:
    run = train(folder, "free", 'dpo.reference="none"', 'dpo.loss="sigmoid"', "train.max_steps=1", ranks=1)
    line = next(line for line in metrics(run) if line["step"] == 1)
    assert line["dpo/chosen"] < -5
    assert not (run / "reference.jsonl").exists()


def test_adapter_off_reference_matches_measured_reference(folder: Path) -> None:
    lora = ("lora.rank=4", "optim.lr=0.01", 'dpo.loss="sigmoid"', "train.max_steps=4")
    requested = train(folder, "asked", *lora, 'dpo.reference="adapter_off"')
    measured = train(folder, "measured", *lora, 'dpo.reference="model"')
    assert losses(requested)[0] == pytest.approx(math.log(2), abs=1e-6)
    assert abs(losses(requested)[3] - math.log(2)) > 1e-3
    assert losses(requested) == pytest.approx(losses(measured), rel=1e-6)
    assert not (requested / "reference.jsonl").exists()


def test_changed_row_is_reported_by_id(folder: Path) -> None:
    rows = folder / "data/rows.jsonl"
    text = rows.read_text()
    try:
        rows.write_text(text.replace('"rejected": "grey"', '"rejected": "gray"'))
        with pytest.raises(AssertionError, match=r"rows\.jsonl, row \d \(sample '\d'\): the row has changed since"):
            train(folder, "changed_row", resume="whole/checkpoints/step_3")
    finally:
        rows.write_text(text)


def test_resume_is_rejected_when_model_changed(folder: Path) -> None:
    weights = folder / "model/model.safetensors"
    content = weights.read_bytes()
    try:
        tensors = load_file(weights)
        save_file({name: tensor + 0.01 for name, tensor in tensors.items()}, weights, metadata={"format": "pt"})
        with pytest.raises(AssertionError, match="but the reference of this run was computed by the model with"):
            train(folder, "changed_model", resume="whole/checkpoints/step_3")
    finally:
        weights.write_bytes(content)


def test_interrupted_reference_measurement_is_resumed(folder: Path) -> None:
    lines = (folder / "whole/reference.jsonl").read_text().splitlines(keepends=True)
    (folder / "killed").mkdir()
    (folder / "killed/reference.jsonl").write_text("".join(lines[:4]) + lines[4][:20])
    run = train(folder, "killed", "train.max_steps=3", "validation.before_training=false")
    assert losses(run) == pytest.approx(losses(folder / "whole")[:3], rel=1e-6)
    assert (run / "reference.jsonl").read_text().startswith("".join(lines[:4]))
    assert len(stored(run)) == 9


def test_resumed_run_remeasures_missing_reference(folder: Path) -> None:
    text = (folder / "whole/reference.jsonl").read_text()
    (folder / "lost/checkpoints").mkdir(parents=True)
    shutil.copytree(folder / "whole/checkpoints/step_3", folder / "lost/checkpoints/step_3")
    run = train(folder, "again", resume="lost/checkpoints/step_3")
    result, expected = ({(row["part"], row["row"]): row for row in lines} for lines in (stored(run)[1:], rows_of(text)))
    assert result.keys() == expected.keys()
    for place, row in result.items():
        assert row["chosen"] == pytest.approx(expected[place]["chosen"], abs=1e-4)
    assert losses(run) == pytest.approx(losses(folder / "whole", after=3), rel=1e-6)


def rows_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()[1:]]


def test_data_validate_renders_training_and_validation_pairs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dsreason.cli.data.chosen_run import choose_trainer, load_run
    from dsreason.cli.data.commands import list_encoded_parts
    from dsreason.tools.datasets.rendering import render_rows

    monkeypatch.chdir(folder)
    trainer = choose_trainer(folder / "run.toml", None, None)
    assert trainer.name == "dpo"
    parts = list_encoded_parts(trainer, load_run(trainer, folder / "run.toml", None))
    render = partial(render_rows, limit=None, workers=0)
    assert {name: render(name, dataset, encode) for name, dataset, encode in parts} == {
        "training": (6, []),
        "validation": (2, []),
    }
