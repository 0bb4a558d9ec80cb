"""Validation: right answers, accuracies, and blanked media."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from PIL import Image

from dsreason.config.schema import MonitorConfig, SFTConfig
from dsreason.data.types import Sample
from dsreason.job.ranks import World
from dsreason.monitor.metrics import open_metrics
from dsreason.train.common import validate as validation
from dsreason.train.common.answers import (
    GeneratedAnswer,
    ValidationResult,
    compute_accuracies,
    compute_mean_rewards,
    get_modality,
)
from dsreason.train.common.contact_sheet import draw_contact_sheet
from dsreason.train.common.validate import HeldOut


def sample(*parts: str, answer: str | None = None, reply: str | None = "left") -> Sample:
    content = [{"type": part, part: f"/d/{part}"} if part != "text" else {"type": part, "text": "?"} for part in parts]
    messages = [{"role": "user", "content": content}]
    if reply is not None:
        messages.append({"role": "assistant", "content": [{"type": "text", "text": reply}]})
    return Sample(id="7", messages=messages, answer=answer)


def answer(row: int, correct: bool, modality: str = "text", kind: str | None = None) -> GeneratedAnswer:
    reply = "left" if correct else "right"
    return GeneratedAnswer(row, str(row), modality, kind, "which way?", reply, "left", correct, "stop", [])


@pytest.mark.parametrize(
    ("parts", "modality"),
    [(("text",), "text"), (("image", "text"), "image"), (("image", "video", "text"), "video")],
)
def test_sample_counts_under_one_modality(parts: tuple[str, ...], modality: str) -> None:
    assert get_modality(sample(*parts)) == modality


def test_accuracy_is_reported_by_modality_and_kind() -> None:
    answers = [
        answer(0, True, "image", "colour"),
        answer(1, False, "image", "colour"),
        answer(2, True, "video", "motion"),
        answer(3, True, "video", "video"),
    ]
    assert compute_accuracies(answers) == {
        "val/accuracy": 0.75,
        "val/accuracy/image": 0.5,
        "val/accuracy/colour": 0.5,
        "val/accuracy/motion": 1.0,
        "val/accuracy/video": 1.0,
    }


def test_summary_is_one_readable_line() -> None:
    answers = [answer(0, True, "video"), answer(1, False), answer(2, True)]
    result = ValidationResult({"val/loss": 0.25} | compute_accuracies(answers), answers, {})
    assert result.summary(60) == "validation at step 60: loss 0.2500, accuracy 66.7 % (text 50.0 %, video 100.0 %)"
    assert ValidationResult({"val/loss": 0.25}, [], {}).summary(0) == "validation at step 0: loss 0.2500"


def test_answers_without_reference_count_only_for_reward() -> None:
    unknown = GeneratedAnswer(
        9, "9", "image", None, "which way?", "left", None, None, "stop", [], {"": 0.5, "short": 1.0}
    )
    expected = replace(answer(0, True, "video"), rewards={"": 1.5, "short": 0.0})
    assert compute_accuracies([expected, unknown]) == {"val/accuracy": 1.0, "val/accuracy/video": 1.0}
    assert compute_mean_rewards([expected, unknown]) == {"val/reward/mean": 1.0, "val/reward/short/mean": 0.5}
    result = ValidationResult(compute_mean_rewards([unknown]) | compute_accuracies([unknown]), [unknown], {})
    assert result.summary(5) == "validation at step 5: reward 0.5000"


def test_missing_rewards_are_excluded_from_average() -> None:
    answers = [
        replace(answer(0, True, "video"), rewards={"": 1.0, "short": 1.0}, data_source="a"),
        replace(answer(1, True, "video"), rewards={"": 0.5, "short": None}, data_source="b"),
    ]
    assert compute_mean_rewards(answers) == {
        "val/reward/mean": 0.75,
        "val/reward/mean/a": 1.0,
        "val/reward/mean/b": 0.5,
        "val/reward/short/mean": 1.0,
        "val/reward/short/mean/a": 1.0,
        "val/reward/short/none_fraction": 0.5,
    }


def test_accuracy_is_undefined_without_answers() -> None:
    assert compute_accuracies([]) == {}


@pytest.mark.parametrize(
    ("num_rows", "size", "groups"),
    [
        (7, 2, [[[0, 2], [4, 6]], [[1, 3], [5]]]),
        (5, 2, [[[0, 2], [4]], [[1, 3], []]]),
        (1, 4, [[[0]], [[]]]),
        (0, 4, [[], []]),
    ],
)
def test_every_rank_has_same_group_count(num_rows: int, size: int, groups: list[list[list[int]]]) -> None:
    config = SFTConfig.model_validate({"validation": {"micro_batch_size": size}})
    for rank in range(2):
        world = World(rank, rank, 2, torch.device("cpu"))
        assert HeldOut([None] * num_rows, None, config, world).build_groups() == groups[rank]


def test_max_samples_and_show_limit_the_rows() -> None:
    config = SFTConfig.model_validate({"validation": {"max_samples": 10, "show": 3}})
    held_out = HeldOut([None] * 99, None, config, World(0, 0, 1, torch.device("cpu")))
    assert len(held_out.rows) == 10
    assert held_out.shown == {0, 29, 59}


def test_validation_writes_every_answer_and_contact_sheets(tmp_path: Path) -> None:
    sheet = draw_contact_sheet([Image.new("RGB", (56, 28), "red")], "which way?\n" + "long " * 60)
    assert sheet.width == 640
    assert sheet.getpixel((20, 20)) == (255, 0, 0)
    result = ValidationResult({"val/loss": 1.0}, [answer(0, True, "video"), answer(1, False)], {1: sheet})
    with open_metrics(tmp_path, rank=0, resume_step=None, config=MonitorConfig(), run_config={}) as metrics:
        result.write(tmp_path, 3, metrics, World(0, 0, 1, torch.device("cpu")))
    lines = (tmp_path / "validation" / "step_3.jsonl").read_text().splitlines()
    assert [json.loads(line)["correct"] for line in lines] == [True, False]
    assert json.loads(lines[0])["modality"] == "video"


def test_only_rank_0_writes_validation_results(tmp_path: Path) -> None:
    result = ValidationResult({}, [answer(0, True)], {})
    result.write(tmp_path, 3, metrics=None, world=World(1, 1, 2, torch.device("cpu")))
    assert list(tmp_path.iterdir()) == []


class Rows(HeldOut):
    """Held-out rows that are already in memory."""

    def read(self, use):
        return iter([[(0, self.dataset[0]), (1, self.dataset[1])]])


@pytest.mark.parametrize(("need_reference", "rows"), [(True, [1]), (False, [0, 1])])
def test_rows_without_answer_are_read_for_rewards(need_reference: bool, rows: list[int]) -> None:
    prompts = [SimpleNamespace(sample=sample("text", reply=reply)) for reply in (None, "left")]
    held_out = Rows(prompts, SimpleNamespace(encode_prompt=None), SFTConfig(), World(0, 0, 1, torch.device("cpu")))
    done: list[int] = []
    [requested] = validation.read_prompts(held_out, done.append, with_pixels=True, need_reference=need_reference)
    assert [row for row, _ in requested] == rows
    assert sum(done) == 2 - len(rows)


class Policy:
    """A policy that assigns the log-probability -0.5 to every trained token."""

    training, device = True, None

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self.optimizer = None

    def __call__(self, batch: None) -> torch.Tensor:
        return torch.full((self.num_tokens,), -0.5)

    def eval(self) -> None: ...

    def train(self, mode: bool) -> None: ...


@pytest.mark.parametrize(("num_tokens", "loss"), [(0, None), (3, 0.5)])
def test_rows_without_trained_tokens_have_no_loss(
    monkeypatch: pytest.MonkeyPatch, num_tokens: int, loss: float | None
) -> None:
    batch = SimpleNamespace(to=lambda device: None)
    monkeypatch.setattr(validation, "align_micro_batches", lambda samples, encoder, exchange, packing: [batch])
    monkeypatch.setattr(validation, "reduce_sum", lambda value: value)
    held_out = Rows([None, None], SimpleNamespace(encode=None), SFTConfig(), World(0, 0, 1, torch.device("cpu")))
    assert validation.compute_held_out_loss(Policy(num_tokens), held_out, lambda count: None) == loss
