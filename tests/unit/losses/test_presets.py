"""Presets, and the independence of their gradients from the division of the batch."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from dsreason.losses import policy
from dsreason.losses.advantages import ADVANTAGES
from dsreason.losses.kl import bias_corrected_k3
from dsreason.losses.policy import GlobalCounts, LossInputs
from dsreason.losses.presets import PRESETS

LENGTHS = [1, 12, 3, 5, 7, 2, 9, 4]
MAX_LENGTH = 12

# [rank][micro-batch] → sequences
CUTS = {
    "1x8": [[[0, 1, 2, 3, 4, 5, 6, 7]]],
    "8x1": [[[i] for i in range(8)]],
    "2x2x2": [[[0, 1], [2, 3]], [[4, 5], [6, 7]]],
    "uneven, one empty": [[[6, 1, 3], []], [[7], [0, 5, 4, 2]]],
}


def test_presets_match_papers():
    assert {name: preset.loss for name, preset in PRESETS.items()} == {
        "grpo": policy.grpo_loss,
        "dr_grpo": policy.dr_grpo_loss,
        "dapo": policy.dapo_loss,
        "gspo": policy.gspo_loss,
        "cispo": policy.cispo_loss,
    }
    assert [(preset.clip_low, preset.clip_high) for preset in PRESETS.values()] == [
        (0.2, 0.2),
        (0.2, 0.2),
        (0.2, 0.28),
        (3e-4, 4e-4),
        (float("inf"), 4.0),
    ]
    assert {name for name, preset in PRESETS.items() if preset.kl_coef} == {"grpo"}
    assert {name for name, preset in PRESETS.items() if preset.dynamic_sampling} == {"dapo", "cispo"}
    assert {name for name, preset in PRESETS.items() if preset.overlong_filter} == {"dapo"}
    assert {name for name, preset in PRESETS.items() if preset.advantage == "group_centered"} == {"dr_grpo"}
    assert {preset.advantage for preset in PRESETS.values()} <= ADVANTAGES.keys()


@dataclass(frozen=True)
class Batch:
    """The trained tokens of some sequences of the global batch; log-probabilities come from a small model."""

    features: torch.Tensor
    old_logprobs: torch.Tensor
    ref_logprobs: torch.Tensor
    advantages: torch.Tensor
    correction: torch.Tensor
    sequence: torch.Tensor

    def pick(self, sequences: list[int]) -> Batch:
        """Return these sequences, renumbered from 0 as in a micro-batch."""
        rows = [torch.nonzero(self.sequence == i)[:, 0] for i in sequences]
        index = torch.cat([*rows, torch.zeros(0, dtype=torch.int64)])
        picked = {name: value[index] for name, value in vars(self).items()}
        local = [torch.full_like(part, number) for number, part in enumerate(rows)]
        return Batch(**picked | {"sequence": torch.cat([*local, torch.zeros(0, dtype=torch.int64)])})


def global_batch(dtype: torch.dtype, weight: torch.Tensor) -> Batch:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    num_tokens, lengths = sum(LENGTHS), torch.tensor(LENGTHS)
    features = normal(num_tokens, len(weight))
    logprobs = torch.nn.functional.logsigmoid(features @ weight.detach())
    return Batch(
        features=features,
        old_logprobs=logprobs + 0.1 * normal(num_tokens),
        ref_logprobs=logprobs + 0.3 * normal(num_tokens),
        advantages=normal(len(LENGTHS)).repeat_interleave(lengths),
        correction=(0.1 * normal(num_tokens)).exp(),
        sequence=torch.arange(len(LENGTHS)).repeat_interleave(lengths),
    )


def gradient(name: str, cut: list[list[list[int]]], dtype: torch.dtype, *, naive: bool = False) -> torch.Tensor:
    """Sum gradients over ranks and micro-batches; `naive` instead averages the means of the micro-batches."""
    preset = PRESETS[name]
    weight = torch.tensor([0.3, -0.5, 0.8, 0.1], dtype=dtype, requires_grad=True)
    batch = global_batch(dtype, weight)
    counts = GlobalCounts(num_tokens=sum(LENGTHS), num_sequences=len(LENGTHS), max_length=MAX_LENGTH)
    micro_batches = [sequences for rank in cut for sequences in rank]
    for sequences in micro_batches:
        part = batch.pick(sequences)
        if naive:
            counts = replace(counts, num_tokens=len(part.sequence), num_sequences=len(sequences))
        logprobs = torch.nn.functional.logsigmoid(part.features @ weight)
        kl = bias_corrected_k3(logprobs, part.ref_logprobs, part.old_logprobs)
        inputs = LossInputs(
            logprobs, part.old_logprobs, part.advantages, part.sequence, counts, part.correction, 0.1 * kl
        )
        loss = preset.loss(inputs, clip_low=preset.clip_low, clip_high=preset.clip_high).loss
        (loss / len(micro_batches) if naive else loss).backward()
    return weight.grad


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", PRESETS)
def test_gradient_does_not_depend_on_batch_split(name, cut, dtype, tolerance):
    full = gradient(name, CUTS["1x8"], dtype)
    assert full.norm() > 1e-2
    torch.testing.assert_close(gradient(name, CUTS[cut], dtype), full, rtol=tolerance, atol=tolerance)


# Uneven micro-batches, because even ones would hide errors of the variants that average over sequences.
@pytest.mark.parametrize("name", PRESETS)
def test_micro_batch_means_change_gradient(name):
    full = gradient(name, CUTS["1x8"], torch.float64)
    naive = gradient(name, [[[0, 1, 2], [3]], [[4, 5, 6], [7]]], torch.float64, naive=True)
    assert (naive - full).norm() > 0.05 * full.norm()


@pytest.mark.parametrize("name", ["dapo", "cispo"])
@pytest.mark.parametrize("cut", ["8x1", "2x2x2"])
def test_micro_batch_token_means_change_gradient(name, cut):
    full = gradient(name, CUTS["1x8"], torch.float64)
    assert (gradient(name, CUTS[cut], torch.float64, naive=True) - full).norm() > 0.05 * full.norm()
