"""Noise levels, windows of trained steps, and noise that does not depend on the rank that draws it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dsreason.world.families import FAMILIES
from dsreason.world.noise import compute_linear_sigmas, draw_noise, draw_window

KEY = {"seed": 1, "step": 2, "prompt": 3, "clip": 4, "purpose": "start"}


def test_linear_schedule_matches_hand_computed_values() -> None:
    assert compute_linear_sigmas(4, 1.0).tolist() == [1.0, 0.75, 0.5, 0.25, 0.0]
    assert compute_linear_sigmas(4, 3.0).tolist() == pytest.approx([1.0, 0.9, 0.75, 0.5, 0.0])
    assert compute_linear_sigmas(4, 3.0).dtype == torch.float64


COSMOS_10 = [0.99502, 0.99084, 0.98217, 0.96313, 0.91888, 0.81433, 0.59398, 0.28448, 0.07417, 0.0099, 0.0]


def test_schedule_is_read_from_model_folder(tiny_worlds: dict[str, Path]) -> None:
    assert FAMILIES["cosmos_predict2_5"].sigmas(tiny_worlds["cosmos_predict2_5"], 10).tolist() == pytest.approx(
        COSMOS_10, abs=1e-5
    )
    sigmas = FAMILIES["wan"].sigmas(tiny_worlds["wan"], 4)  # alphas .999 apart, shifted by 3
    base = [1.0, 0.75025, 0.5005, 0.25075]
    assert sigmas.tolist() == pytest.approx([3 * s / (1 + 2 * s) for s in base] + [0], abs=2e-6)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("steps", [1, 2, 10, 35, 50])
def test_schedules_decrease_to_zero(tiny_worlds: dict[str, Path], name: str, steps: int) -> None:
    sigmas = FAMILIES[name].sigmas(tiny_worlds[name], steps)
    assert sigmas.shape == (steps + 1,)
    assert sigmas[0] <= 1
    assert sigmas[-1] == 0
    assert (sigmas.diff() < 0).all()


def test_windows_cover_only_the_first_half() -> None:
    drawn = {tuple(draw_window(2, 10, seed=0, step=step)) for step in range(100)}
    assert drawn == {(0, 1), (1, 2), (2, 3), (3, 4)}
    assert draw_window(2, 10, seed=0, step=7) == draw_window(2, 10, seed=0, step=7)
    assert [draw_window(2, 10, seed=1, step=s).start for s in range(20)] != [
        draw_window(2, 10, seed=0, step=s).start for s in range(20)
    ]


def test_window_longer_than_first_half_is_rejected() -> None:
    with pytest.raises(ValueError, match="size=6"):
        draw_window(6, 10, seed=0, step=0)


@pytest.mark.parametrize("changed", [{"seed": 5}, {"step": 5}, {"prompt": 5}, {"clip": 5}, {"purpose": "step 0"}])
def test_noise_depends_on_every_part_of_key(changed: dict[str, object]) -> None:
    first = draw_noise((2, 3), **KEY)  # type: ignore[arg-type]
    assert torch.equal(first, draw_noise((2, 3), **KEY))  # type: ignore[arg-type]
    assert not torch.equal(first, draw_noise((2, 3), **KEY | changed))  # type: ignore[arg-type]
    assert first.dtype == torch.float32


def test_noise_is_standard_normal() -> None:
    values = draw_noise((100_000,), **KEY)  # type: ignore[arg-type]
    assert values.mean().item() == pytest.approx(0, abs=0.02)
    assert values.std().item() == pytest.approx(1, abs=0.02)
