"""The objective of a run: a preset, with the changes from the configuration."""

from __future__ import annotations

import pytest
import torch

from dsreason.config.schema_grpo import AlgorithmConfig
from dsreason.losses.objective import build_objective
from dsreason.losses.policy import GlobalCounts, LossInputs

RATIO = torch.tensor([1.5, 0.5, 1.0]).log()
ADVANTAGES, SEQUENCE = torch.tensor([1.0, 1.0, -1.0]), torch.tensor([0, 0, 1])
COUNTS = GlobalCounts(num_tokens=3, num_sequences=2, max_length=4)
INPUTS = LossInputs(RATIO, torch.zeros(3), ADVANTAGES, SEQUENCE, COUNTS)


def loss(config: AlgorithmConfig) -> float:
    return build_objective(config).loss(INPUTS).loss.item()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, 0.075),  # -((1.2 + 0.5) / 2 - 1) / 2
        ({"clip_high": 0.4}, 0.025),  # -((1.4 + 0.5) / 2 - 1) / 2
        ({"preset": "dapo"}, -0.26),  # -(1.28 + 0.5 - 1) / 3
        ({"preset": "dapo", "clip_high": 0.4}, -0.3),  # -(1.4 + 0.5 - 1) / 3
        ({"preset": "dr_grpo"}, -0.0875),  # -(1.2 + 0.5 - 1) / 8
    ],
)
def test_unset_values_default_to_preset(settings: dict[str, object], expected: float) -> None:
    assert loss(AlgorithmConfig.model_validate(settings)) == pytest.approx(expected, abs=1e-6)


def test_dual_clip_bounds_negative_advantage_ratio() -> None:
    objective = build_objective(AlgorithmConfig(preset="dapo", dual_clip=3.0))
    counts = GlobalCounts(num_tokens=1, num_sequences=1, max_length=4)
    logprobs, advantages, sequence = torch.tensor([8.0]).log(), torch.tensor([-1.0]), torch.tensor([0])
    loss = objective.loss(LossInputs(logprobs, torch.zeros(1), advantages, sequence, counts))
    assert loss.loss.item() == pytest.approx(3.0)


def test_configured_correction_bounds_override_published_bounds() -> None:
    log_ratio, sequence = torch.tensor([1.0, 3.0, 0.25]).log(), torch.zeros(3, dtype=torch.int64)
    for settings, expected in (
        ({}, [1, 2, 0.25]),
        ({"correction_high": 2.5}, [1, 2.5, 0.25]),
        ({"correction": "token_mask", "correction_low": 0.2}, [1, 3, 0.25]),
    ):
        weights = build_objective(AlgorithmConfig.model_validate(settings)).correction(log_ratio, sequence)
        assert weights.tolist() == pytest.approx(expected)
    assert build_objective(AlgorithmConfig(correction="none")).correction is None


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"kl_coef": 0.0}, None),
        ({"kl_coef": 0.1, "kl_estimator": "k1"}, -0.05),  # 0.1 * (-1 + 0.5)
        ({"kl_coef": 0.1, "kl_estimator": "k2"}, 0.0125),  # 0.1 * 0.125
        ({"kl_coef": 0.1}, 0.014872),  # 0.1 * (e^0.5 - 1.5)
        ({"kl_coef": 0.1, "kl_clamp": 0.1}, 0.01),
        ({"kl_coef": 0.1, "kl_estimator": "bias_corrected_k3"}, 0.016436),  # times e^0.1
        ({"kl_coef": 0.1, "kl_estimator": "bias_corrected_k3", "kl_clamp": 0.1}, 0.011052),  # 0.1 * e^0.1 * 0.1
        ({"kl_coef": 0.0, "entropy_coef": 0.01}, -0.02),
        ({"kl_coef": 0.1, "entropy_coef": 0.01}, -0.005128),
        ({}, 0.005949),  # 0.04, as in the paper
    ],
)
def test_penalty_combines_kl_and_entropy(settings: dict[str, object], expected: float | None) -> None:
    objective = build_objective(AlgorithmConfig.model_validate(settings))
    logprobs, ref, old, entropy = (torch.tensor([value]) for value in (-1.0, -0.5, -1.1, 2.0))
    penalty = objective.compute_penalty(logprobs, ref, old, entropy)
    assert (None if penalty is None else penalty.item()) == pytest.approx(expected, abs=1e-6)


def test_filters_and_advantages_can_be_overridden() -> None:
    dapo = build_objective(AlgorithmConfig(preset="dapo"))
    assert (dapo.overlong_filter, dapo.dynamic_sampling) == (True, True)
    plain = build_objective(AlgorithmConfig(preset="dapo", overlong_filter=False, dynamic_sampling=False))
    assert (plain.overlong_filter, plain.dynamic_sampling) == (False, False)
    loo = build_objective(AlgorithmConfig(advantage="leave_one_out"))
    assert loo.advantages(torch.tensor([[1.0, 0, 0, 0]])).tolist()[0] == pytest.approx([1, -1 / 3, -1 / 3, -1 / 3])
