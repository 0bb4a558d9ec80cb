"""Policy losses compared with hand-computed values."""

import math

import pytest
import torch

from dsreason.losses.kl import bias_corrected_k3, k3
from dsreason.losses.policy import GlobalCounts, LossInputs, cispo_loss, dapo_loss, dr_grpo_loss, grpo_loss, gspo_loss

LOSSES = [grpo_loss, dr_grpo_loss, dapo_loss, gspo_loss, cispo_loss]

# Two sequences with the ratios 1.5, 0.5 | 1. With clipping at 1.2, the objectives are 1.2, 0.5 | -1.
LOGPROBS = [-1.0, -2.0, -3.0]
RATIOS = [1.5, 0.5, 1.0]
ADVANTAGES = torch.tensor([1.0, 1.0, -1.0])
SEQUENCE = torch.tensor([0, 0, 1])
COUNTS = GlobalCounts(num_tokens=3, num_sequences=2, max_length=4)
CLIP = {"clip_low": 0.2, "clip_high": 0.2}


def run(loss_fn, ratios=RATIOS, correction=None, penalty=None, **clips):
    """Return the result of the loss, and the gradient of each token."""
    logprobs = torch.tensor(LOGPROBS, requires_grad=True)
    old_logprobs = logprobs.detach() - torch.tensor(ratios).log()
    inputs = LossInputs(logprobs, old_logprobs, ADVANTAGES, SEQUENCE, COUNTS, correction, penalty)
    result = loss_fn(inputs, **(CLIP | clips))
    result.loss.backward()
    return result, logprobs.grad.tolist()


# A token that is not clipped has the gradient -r A times its weight in the mean.


def test_grpo_averages_tokens_then_sequences():
    result, gradient = run(grpo_loss)
    assert result.loss.item() == pytest.approx(0.075)  # -((1.2 + 0.5) / 2 - 1) / 2
    assert gradient == pytest.approx([0, -0.5 / 4, 1 / 2])


def test_dr_grpo_divides_by_a_constant_length():
    result, gradient = run(dr_grpo_loss)
    assert result.loss.item() == pytest.approx(-0.0875)  # -(1.2 + 0.5 - 1) / (2 * 4)
    assert gradient == pytest.approx([0, -0.5 / 8, 1 / 8])


def test_dapo_averages_tokens_and_raises_upper_clip():
    result, gradient = run(dapo_loss, clip_high=0.28)
    assert result.loss.item() == pytest.approx(-0.26)  # -(1.28 + 0.5 - 1) / 3
    assert gradient == pytest.approx([0, -0.5 / 3, 1 / 3])


def test_gspo_has_one_ratio_per_sequence():
    # ratios 4, 1 | 1: s = 2 | 1, not clipped: -(2 - 1) / 2; the gradient of s reaches both tokens, s / 2 each
    result, gradient = run(gspo_loss, ratios=[4.0, 1.0, 1.0], clip_high=1.5)
    assert result.loss.item() == pytest.approx(-0.5)
    assert gradient == pytest.approx([-0.5, -0.5, 0.5])
    assert result.clipped.tolist() == [False, False, False]


def test_gspo_clips_a_sequence_as_a_whole():
    result, gradient = run(gspo_loss, ratios=[4.0, 1.0, 1.0], clip_high=0.5)
    assert result.loss.item() == pytest.approx(-0.25)  # -(1.5 - 1) / 2
    assert gradient == pytest.approx([0, 0, 0.5])
    assert result.clipped.tolist() == [True, True, False]


def test_cispo_truncates_weight_and_keeps_gradient():
    result, gradient = run(cispo_loss, clip_low=math.inf)
    assert result.loss.item() == pytest.approx(-0.266667, abs=1e-6)  # (1.2 * 1 + 0.5 * 2 - 1 * 3) / 3
    assert gradient == pytest.approx([-1.2 / 3, -0.5 / 3, 1 / 3])
    assert result.clipped.tolist() == [True, False, False]


def test_cispo_lower_bound_applies_when_requested():
    result, gradient = run(cispo_loss)
    assert gradient == pytest.approx([-1.2 / 3, -0.8 / 3, 1 / 3])
    assert result.clipped.tolist() == [True, True, False]


@pytest.mark.parametrize(
    ("loss_fn", "expected"),
    [
        # objectives 1.2, 0.5 | -1 become 1.2, 0.25 | -2
        (grpo_loss, 0.6375),  # -(1.45 / 2 - 2) / 2
        (dr_grpo_loss, 0.06875),  # -(1.45 - 2) / 8
        (dapo_loss, 0.183333),  # -(1.45 - 2) / 3
        # s = sqrt(0.75) = 0.866025: 0.866025, 0.433013 | -2
        (gspo_loss, 0.675240),  # -(1.299038 / 2 - 2) / 2
        # -1.2, -1 | 3 become -1.2, -0.5 | 6; the lower clip makes the second -1.6 * 0.5
        (cispo_loss, -1.333333),  # -(-1.2 - 0.8 + 6) / 3
    ],
)
def test_correction_scales_objective_and_penalty_is_added(loss_fn, expected):
    correction, penalty = torch.tensor([1.0, 0.5, 2.0]), torch.tensor([0.2, 0.4, 0.1])
    result, _ = run(loss_fn, correction=correction)
    assert result.loss.item() == pytest.approx(expected, abs=1e-6)
    # averaged like the loss of each variant: (0.3 + 0.1) / 2 over sequences, 0.7 / 8, 0.7 / 3 over tokens
    added = {grpo_loss: 0.2, gspo_loss: 0.2, dr_grpo_loss: 0.0875, dapo_loss: 0.7 / 3, cispo_loss: 0.7 / 3}[loss_fn]
    result, _ = run(loss_fn, correction=correction, penalty=penalty)
    assert result.loss.item() == pytest.approx(expected + added, abs=1e-6)


@pytest.mark.parametrize("loss_fn", LOSSES)
def test_every_variant_is_policy_gradient_on_policy(loss_fn):
    result, gradient = run(loss_fn, ratios=[1.0, 1.0, 1.0])
    weights = {dr_grpo_loss: [1 / 8] * 3, dapo_loss: [1 / 3] * 3, cispo_loss: [1 / 3] * 3}
    expected = zip(weights.get(loss_fn, [0.25, 0.25, 0.5]), [1, 1, -1], strict=True)
    assert gradient == pytest.approx([-weight * advantage for weight, advantage in expected])
    assert not result.clipped.any()


# cosmos-rl's settings: clip 0.2 / 0.2, dual clip 3. Its negative clip, which disables clipping, is infinity here.
@pytest.mark.parametrize("loss_fn", [grpo_loss, dr_grpo_loss, dapo_loss])
@pytest.mark.parametrize(
    ("ratio", "advantage", "options", "expected", "clipped"),
    [
        (1.5, 1.0, {}, -1.2, True),
        (0.5, 1.0, {}, -0.5, False),
        (0.5, -1.0, {}, 0.8, True),
        (1.5, -1.0, {}, 1.5, False),
        (math.e, -1.0, {}, math.e, False),
        (math.e**2, -1.0, {}, 3.0, True),
        (math.e**2, -1.0, {"dual_clip": None}, math.e**2, False),
        (math.e**2, 1.0, {}, -1.2, True),
        (1.5, 1.0, {"clip_low": math.inf, "clip_high": math.inf}, -1.5, False),
        (0.5, -1.0, {"clip_low": math.inf, "clip_high": math.inf}, 0.5, False),
        (1.5, 0.0, {}, 0.0, False),
        # e^200 is infinite in float32
        (math.inf, 1.0, {}, -1.2, True),
        (math.inf, -1.0, {}, 3.0, True),
    ],
)
def test_single_token_loss_and_gradient_match_formula(loss_fn, ratio, advantage, options, expected, clipped):
    logprobs = torch.tensor([min(math.log(ratio), 200.0)], requires_grad=True)
    options = {**CLIP, "dual_clip": 3.0, **options}
    zero = torch.zeros(1)
    result = loss_fn(LossInputs(logprobs, zero, zero + advantage, zero.long(), GlobalCounts(1, 1, 1)), **options)
    result.loss.backward()
    assert result.loss.item() == pytest.approx(expected, abs=1e-6)
    assert result.clipped.tolist() == [clipped]
    assert logprobs.grad.item() == pytest.approx(0.0 if clipped else -ratio * advantage)


# cosmos-rl's batch: two sequences of 2 and 3 tokens.
CUR = torch.tensor([-1, -2, -0.5, -0.5, -0.5])
OLD = torch.tensor([-1.1, -1.9, -1.5, -0.5, -0.4])
REF = torch.tensor([-1.2, -2, -0.7, -0.1, -0.5])


def cosmos(loss_fn, old=OLD, counts=COUNTS, penalty=None):
    advantages, sequence = torch.tensor([1.0, 1, -1, -1, -1]), torch.tensor([0, 0, 1, 1, 1])
    inputs = LossInputs(CUR, old, advantages, sequence, counts, penalty=penalty)
    return loss_fn(inputs, **CLIP, dual_clip=3.0).loss.item()


def test_losses_match_cosmos_rl_on_its_batch():
    counts = GlobalCounts(num_tokens=5, num_sequences=2, max_length=1)
    assert cosmos(dapo_loss, counts=counts) == pytest.approx(0.522622, abs=1e-6)  # token-mean
    assert cosmos(grpo_loss, counts=counts) == pytest.approx(0.268018, abs=1e-6)  # seq-mean-token-mean
    assert cosmos(dr_grpo_loss, counts=counts) == pytest.approx(1.306555, abs=1e-6)  # seq-mean-token-sum
    assert cosmos(dapo_loss, counts=GlobalCounts(1, 1, 1)) == pytest.approx(2.613111, abs=1e-6)  # token-sum


def test_kl_penalty_matches_cosmos_rl_batch():
    # In cosmos-rl "5 tokens" is the micro-batch; here it is the global batch, which is the same for one micro-batch.
    counts = GlobalCounts(num_tokens=5, num_sequences=2, max_length=1)
    kl = k3(CUR, REF)
    assert kl.mean().item() == pytest.approx(0.025857, abs=1e-6)
    assert cosmos(dapo_loss, old=CUR, counts=counts, penalty=0.1 * kl) == pytest.approx(0.202586, abs=1e-6)
    assert cosmos(dapo_loss, counts=counts, penalty=0.1 * kl) == pytest.approx(0.525208, abs=1e-6)
    kl = bias_corrected_k3(CUR, REF, OLD)
    assert kl.mean().item() == pytest.approx(0.032688, abs=1e-6)
    assert cosmos(dapo_loss, counts=counts, penalty=0.1 * kl) == pytest.approx(0.525891, abs=1e-6)


@pytest.mark.parametrize("num_tokens", [7, 0])  # trained tokens on other ranks, or none at all
@pytest.mark.parametrize("loss_fn", LOSSES)
def test_loss_is_zero_without_trained_tokens(loss_fn, num_tokens):
    weight = torch.ones(3, requires_grad=True)
    empty = torch.zeros(0)
    counts = GlobalCounts(num_tokens=num_tokens, num_sequences=num_tokens, max_length=4)
    inputs = LossInputs((weight * 2)[:0], empty, empty, empty.long(), counts, empty, (weight * 3)[:0])
    result = loss_fn(inputs, **CLIP)
    result.loss.backward()
    assert result.loss.item() == 0.0
    assert torch.equal(weight.grad, torch.zeros(3))
    assert result.clipped.shape == (0,)


@pytest.mark.parametrize("loss_fn", LOSSES)
def test_logged_values_carry_no_gradient(loss_fn):
    result, _ = run(loss_fn)
    assert not result.clipped.requires_grad
    assert result.clipped.dtype == torch.bool
