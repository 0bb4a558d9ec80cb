"""FLOPs per second and padding of a step, with hand-made samples and fixed numbers for a second rank."""

from __future__ import annotations

import pytest
import torch

from dsreason.data.collate import append_dummies, collate, pack
from dsreason.data.micro_batches import compute_work
from dsreason.data.types import EncodedSample
from dsreason.monitor.flops import ModelFlops
from dsreason.train.common import utilisation
from dsreason.train.common.utilisation import UtilisationMeter

FLOPS = ModelFlops(text_token=100, text_pair=10, head_token=1000)


def sample(length: int, trained: int = 0, parent: EncodedSample | None = None) -> EncodedSample:
    """Build a sample whose last `trained` tokens are trained."""
    return EncodedSample(
        id="",
        input_ids=torch.zeros(length, dtype=torch.int64),
        loss_mask=torch.arange(length) >= length - trained,
        position_ids=torch.arange(length).expand(3, -1),
        mm_token_type_ids=torch.zeros(length, dtype=torch.int64),
        mm_kwargs={},
        parent=parent,
    )


def image(length: int) -> EncodedSample:
    made = sample(length)
    made.mm_kwargs.update(pixel_values=torch.zeros(4, 2), image_grid_thw=torch.tensor([[1, 2, 2]]))
    return made


def with_other_rank(monkeypatch: pytest.MonkeyPatch, *answers: float) -> None:
    """Simulate a second rank that contributes `answers`, in this order."""
    following = iter(answers)
    monkeypatch.setattr(utilisation, "reduce_sum", lambda own: own + next(following))


def test_mfu_counts_samples_but_not_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    # A prompt of 5 and a completion of 2: 7 tokens, 15 + (2 x 5 + 3) pairs, 2 trained; then a dummy image of 3 tokens.
    # The other rank computed 10 tokens, of which 8 belong to samples.
    with_other_rank(monkeypatch, 10, 8, 1020)
    samples = [sample(2, 2, parent=sample(5))]
    row = append_dummies(pack(samples), [image(3)], pad_id=0)
    metrics = UtilisationMeter(FLOPS, peak=1e4).metrics(compute_work([samples], packing=True), [row], seconds=2)
    assert metrics["perf/padding"] == pytest.approx((3 + 2) / (10 + 10))
    assert metrics["perf/mfu"] == pytest.approx((700 + 280 + 2000 + 1020) / 2 / 1e4)


def test_padding_share_excludes_sample_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    with_other_rank(monkeypatch, 0, 0)
    samples = [sample(3), sample(1)]
    metrics = UtilisationMeter(FLOPS, peak=None).metrics(
        compute_work([samples], packing=False), [collate(samples, pad_id=0)], seconds=1
    )
    assert metrics == {"perf/padding": pytest.approx(1 / 3)}  # 2 of 2 x 3 tokens


def test_shared_row_counts_once_in_mfu(monkeypatch: pytest.MonkeyPatch) -> None:
    # 4 tokens, 10 pairs and 1 trained token give 1,500 on each rank.
    with_other_rank(monkeypatch, 4, 4, 1500)
    samples = [sample(4, 1)]
    metrics = UtilisationMeter(FLOPS, peak=1e4, ranks_per_row=2).metrics(
        compute_work([samples], packing=True), [pack(samples)], seconds=1
    )
    assert metrics == {"perf/padding": 0, "perf/mfu": pytest.approx(0.15)}
