"""The policy's log-probabilities, compared with those computed from the model's logits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText, PreTrainedModel

from dsreason.data.collate import collate
from dsreason.data.types import EncodedSample
from dsreason.models.policy import Policy

IDS = [[5, 9, 7, 3, 8], [6, 4, 2]]
TRAINED = [[False, False, True, False, True], [False, True, True]]


def row(ids: list[int], trained: list[bool]) -> EncodedSample:
    count = len(ids)
    return EncodedSample(
        id="",
        input_ids=torch.tensor(ids),
        loss_mask=torch.tensor(trained),
        position_ids=torch.arange(count).expand(3, -1),
        mm_token_type_ids=torch.zeros(count, dtype=torch.int64),
        mm_kwargs={},
    )


@pytest.fixture
def model(tiny_qwen2_5_vl: Path) -> PreTrainedModel:
    return AutoModelForImageTextToText.from_pretrained(tiny_qwen2_5_vl, dtype=torch.float32).eval()


@torch.no_grad()
def test_token_probability_comes_from_previous_token(model: PreTrainedModel) -> None:
    expected = []
    for ids, trained in zip(IDS, TRAINED, strict=True):
        logits = model(input_ids=torch.tensor([ids])).logits[0] / 0.7
        expected += [logits[i - 1].log_softmax(-1)[ids[i]].item() for i in range(1, len(ids)) if trained[i]]
    batch = collate([row(*item) for item in zip(IDS, TRAINED, strict=True)], pad_id=0)
    assert Policy(model)(batch, 0.7).tolist() == pytest.approx(expected, abs=1e-5)


def test_untrained_batch_still_runs_every_layer(model: PreTrainedModel) -> None:
    policy = Policy(model)(collate([row(IDS[0], [False] * 5)], pad_id=0))
    assert policy.shape == (0,)
    policy.sum().backward()
    reached = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert {name for name, _ in model.named_parameters() if "visual" not in name} <= reached
