"""Steps and log-probabilities, compared with hand-computed published coefficients and with the processes' marginals."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from dsreason.world.noise import compute_linear_sigmas
from dsreason.world.steps import NEAR_ONE, Kind, build_step, compute_mean, log_prob

X, V, X_NEXT = (
    torch.tensor(values, dtype=torch.float64).view(1, 2, 1, 1, 1) for values in ([1, -2], [0.5, 0.25], [0.9, -1.9])
)
NOISY: list[Kind] = ["flow", "cps", "dance", "ddim"]


@pytest.mark.parametrize(
    ("kind", "s", "s_next", "eta", "a", "b", "means", "std", "density"),
    [
        ("flow", 0.8, 0.6, 0.7, 0.755, -0.249, (0.6305, -1.57225), 0.626099, -0.565520),
        ("flow", 1.0, 0.9, 0.7, 0.755, -0.1, (0.705, -1.535), 0.7, -0.649636),
        ("flow", 0.2, 0.0, 0.7, 0.93875, -0.249, (0.81425, -1.93975), 0.156525, 0.844448),
        ("cps", 0.8, 0.6, 0.8, 0.585410, -0.282918, (0.443951, -1.241550), 0.570634, -0.850477),
        ("cps", 0.8, 0.6, 0.5, 0.824264, -0.235147, (0.706690, -1.707315), 0.424264, -0.165006),
        ("dance", 0.8, 0.6, 0.3, 0.98875, -0.20225, (0.887625, -2.028062), 0.134164, 0.859848),
    ],
)
def test_steps_match_published_formulas(
    kind: Kind,
    s: float,
    s_next: float,
    eta: float,
    a: float,
    b: float,
    means: tuple[float, float],
    std: float,
    density: float,
) -> None:
    step = build_step(kind, s, s_next, eta, s_cap=0.9)
    assert (step.a, step.b, step.std) == pytest.approx((a, b, std), abs=1e-6)
    expected = compute_mean(step, X, V)
    assert expected.flatten().tolist() == pytest.approx(means, abs=1e-6)
    assert log_prob(X_NEXT, expected, step.std).tolist() == pytest.approx([density], abs=1e-6)


@pytest.mark.parametrize(
    ("kind", "s", "s_next", "eta", "means", "std", "density"),
    [
        ("flow", 0.6, 0.45, 0.5, (-0.4040625, 1.21125), 0.237170825, 0.359539124),
        ("flow", 0.95, 0.9, 1.2, (-0.1442, 0.3704), 1.169615321, -1.174939064),
        ("flow", 1.0, 0.875, 0.6, (-0.3335, 1.034), 0.6, -0.415979750),
        ("dance", 0.9, 0.7, 0.25, (-0.438402778, 1.271944444), 0.111803399, -0.029135189),
        ("dance", 0.3, 0.1, 0.6, (-0.4628, 1.1696), 0.268328157, 0.222550491),
        ("cps", 0.6, 0.45, 0.7, (-0.400085914, 1.004467554), 0.400952936, -0.054249112),
        ("cps", 0.35, 0.2, 0.9, (-0.431150532, 1.101409679), 0.197537668, 0.492632767),
        ("ddim", 0.6, 0.45, 0.7, (-0.403288250, 1.170989025), 0.264014228, 0.310463352),
        ("ddim", 0.9, 0.5, 1.0, (-0.477777778, 0.844444444), 0.496903995, -0.338236343),
    ],
)
def test_steps_match_high_precision_values(
    kind: Kind, s: float, s_next: float, eta: float, means: tuple[float, float], std: float, density: float
) -> None:
    """Compare with the papers' own formulas: the drift of the SDE, predicted data and noise, and DDIM's alphas (2010.02502)."""
    x, v, x_next = (
        torch.tensor(values, dtype=torch.float64).view(1, 2, 1, 1, 1)
        for values in ([-0.3, 1.2], [0.7, -0.4], [-0.25, 1.1])
    )
    step = build_step(kind, s, s_next, eta, s_cap=0.875)
    expected = compute_mean(step, x, v)
    assert step.std == pytest.approx(std, abs=1e-9)
    assert expected.flatten().tolist() == pytest.approx(means, abs=1e-9)
    assert log_prob(x_next, expected, step.std).item() == pytest.approx(density, abs=1e-8)


def test_ratio_includes_standard_deviation() -> None:
    """Check that the ratio includes the standard deviation.

    Squared errors without 2·std² would give −0.01875, and an update whose size depends on the noise level.
    """
    x_next, new, old = (
        torch.tensor(values, dtype=torch.float64).view(1, 2, 1, 1, 1)
        for values in ([1.0, -2.0], [0.9, -1.8], [0.95, -1.9])
    )
    difference = log_prob(x_next, new, 0.5) - log_prob(x_next, old, 0.5)
    assert difference.item() == pytest.approx(-0.0375, abs=1e-12)


def test_ddim_recombines_predicted_data_and_noise() -> None:
    """Use s .8 → .5, eta .6: the posterior's std is s'·sqrt(1 − (s'(1 − s)/(s(1 − s')))²) = .5·sqrt(1 − .25²) = .484123."""
    step = build_step("ddim", 0.8, 0.5, 0.6)
    assert step.std == pytest.approx(0.6 * 0.4841229, abs=1e-6)
    sqrt = math.sqrt(0.25 - step.std**2)
    data, noise = X - 0.8 * V, X + 0.2 * V
    torch.testing.assert_close(compute_mean(step, X, V), 0.5 * data + sqrt * noise)


@pytest.mark.parametrize("kind", NOISY)
@pytest.mark.parametrize(("s", "s_next"), [(0.8, 0.6), (1.0, 0.9), (0.2, 0.0)])
def test_every_sampler_without_noise_follows_ode(kind: Kind, s: float, s_next: float) -> None:
    step, ode = build_step(kind, s, s_next, 0.0, s_cap=0.9), build_step("ode", s, s_next)
    assert (step.a, step.b, step.std) == pytest.approx((ode.a, ode.b, ode.std), abs=1e-15)


@pytest.mark.parametrize("kind", ["cps", "ddim"])
def test_last_sampling_step_adds_no_noise(kind: Kind) -> None:
    step = build_step(kind, 0.2, 0.0, 0.8)
    assert step.std == 0
    with pytest.raises(ValueError, match="adds no noise"):
        log_prob(X, X, step.std)


def test_flow_noise_is_bounded_near_time_one() -> None:
    """Check s = 0.999999, where Wan's schedules start: dividing by 1 − s would make the standard deviation 130."""
    step, at_one = (build_step("flow", s, 0.9643, 0.7, s_cap=0.9643) for s in (0.999999, 1.0))
    assert step.std == pytest.approx(at_one.std, abs=1e-3)
    cosmos = build_step("flow", 0.99502, 0.99084, 0.7, s_cap=0.99084)
    assert cosmos.std == pytest.approx(0.7 * math.sqrt(0.99502 / 0.00498 * 0.00418), abs=1e-6)


@pytest.mark.parametrize(
    ("shift", "count", "number", "std"), [(12, 100, 2, 0.5015), (25, 50, 2, 0.5095), (17, 100, 3, 0.4116)]
)
def test_flow_noise_is_uncapped_after_first_steps(shift: float, count: int, number: int, std: float) -> None:
    """Check that only steps from above the second level are capped; others use eta·sqrt(s / (1 − s)·(s − s'))."""
    levels = compute_linear_sigmas(count, shift).tolist()
    s, s_next = levels[number], levels[number + 1]
    assert s > NEAR_ONE
    assert std == pytest.approx(0.7 * math.sqrt(s / (1 - s) * (s - s_next)), abs=1e-4)
    assert build_step("flow", s, s_next, 0.7, s_cap=levels[1]).std == pytest.approx(std, abs=1e-4)


@pytest.mark.parametrize("kind", ["cps", "ddim"])
def test_eta_above_one_is_rejected(kind: Kind) -> None:
    """Reject eta above 1: with cps, eta = 2 would add no noise, because its standard deviation is a sine."""
    with pytest.raises(ValueError, match=f"at most 1 with {kind}"):
        build_step(kind, 0.8, 0.6, 2.0)


@pytest.mark.parametrize(("s", "s_next", "eta"), [(0.5, 0.6, 0.1), (0.5, 0.5, 0.1), (1.2, 0.5, 0.1), (0.5, 0.1, -1)])
def test_invalid_step_settings_are_rejected(s: float, s_next: float, eta: float) -> None:
    with pytest.raises(ValueError, match="build_step"):
        build_step("flow", s, s_next, eta)


@pytest.mark.parametrize("kind", ["cps", "ddim"])
def test_eta_between_one_and_two_is_rejected(kind: Kind) -> None:
    with pytest.raises(ValueError, match=f"at most 1 with {kind}"):
        build_step(kind, 0.8, 0.5, 1.5)


def exact_velocity(x: Tensor, s: float, centre: float = 2.0, spread: float = 0.5) -> Tensor:
    """Return the exact velocity for data from N(centre, spread²): E[noise − data | x]."""
    variance = ((1 - s) * spread) ** 2 + s**2
    residual = (x - (1 - s) * centre) / variance
    return s * residual - (centre + (1 - s) * spread**2 * residual)


def cosmos_levels(count: int) -> list[float]:
    """Return Cosmos-Predict2.5's schedule: EDM's ramp with exponent 7 from 200 to 0.01, converted to flow times."""
    first, last = 200 ** (1 / 7), 0.01 ** (1 / 7)
    sigmas = [(first + i / (count - 1) * (last - first)) ** 7 for i in range(count)]
    return [sigma / (1 + sigma) for sigma in sigmas] + [0.0]


@pytest.mark.parametrize(
    ("grid", "kind", "eta", "count", "spread", "tolerance"),
    [
        ("linear", "ode", 0.0, 10, 0.431, 0.006),
        ("linear", "flow", 0.7, 10, 0.478, 0.006),
        ("linear", "flow", 0.7, 200, 0.500, 0.01),
        ("linear", "dance", 0.3, 200, 0.500, 0.01),
        ("linear", "cps", 0.5, 10, 0.400, 0.006),
        ("linear", "cps", 0.8, 10, 0.352, 0.006),
        ("linear", "ddim", 0.7, 10, 0.414, 0.006),
        ("cosmos", "ode", 0.0, 10, 0.356, 0.006),
        ("cosmos", "flow", 0.7, 10, 0.499, 0.006),
        ("cosmos", "flow", 0.7, 100, 0.4945, 0.006),
        ("cosmos", "cps", 0.8, 10, 0.297, 0.006),
    ],
)
def test_gaussian_samples_have_exact_mean_and_spread(
    grid: str, kind: Kind, eta: float, count: int, spread: float, tolerance: float
) -> None:
    """Use the exact velocity in float64: Euler's error is known at 10 steps, and negligible at 200."""
    numbers = torch.Generator().manual_seed(0)
    x = torch.randn(50_000, generator=numbers, dtype=torch.float64)
    levels = compute_linear_sigmas(count, 1.0).tolist() if grid == "linear" else cosmos_levels(count)
    for s, s_next in zip(levels, levels[1:], strict=False):
        step = build_step(kind, s, s_next, eta, s_cap=levels[1])
        x = compute_mean(step, x, exact_velocity(x, s)) + step.std * torch.randn(
            x.shape, generator=numbers, dtype=x.dtype
        )
    assert x.mean().item() == pytest.approx(2.0, abs=0.01)
    assert x.std().item() == pytest.approx(spread, abs=tolerance)


def test_log_prob_averages_over_free_frames() -> None:
    x_next = torch.tensor([[1.0, 100.0], [3.0, 0.0]]).view(2, 1, 2, 1, 1)
    free = torch.tensor([[1.0, 0.0], [1.0, 1.0]]).view(2, 1, 2, 1, 1)
    prob = log_prob(x_next, torch.zeros_like(x_next), 1.0, free)
    constant = 0.5 * math.log(2 * math.pi)
    assert prob.tolist() == pytest.approx([-0.5 - constant, -2.25 - constant])
    torch.testing.assert_close(log_prob(x_next, torch.zeros_like(x_next), 1.0, torch.ones_like(free))[1], prob[1])
