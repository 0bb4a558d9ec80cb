"""Means, bootstrap intervals and paired differences of world models' evaluations."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dsreason.errors import ConfigError, DataError
from dsreason.world.evaluation.results import ClipResult, open_results, read_clips, write_clip
from dsreason.world.evaluation.score import compare, compute_interval, summarise


def clip(number: int, reward: float, prompt: str = "", **changes: object) -> ClipResult:
    made = ClipResult(
        number, f"row {number}", prompt or f"prompt {number}", {"": reward, "motion": 0.5}, 0.25, 0.1, [0, 255]
    )
    return replace(made, **changes)


def test_summary_has_reward_means_and_clip_statistics() -> None:
    result = summarise([clip(0, 1.0), clip(1, 0.5, picture=[255, 255]), clip(2, 0.0)])
    assert result.clips == result.prompts == 3
    means = {name: item.mean for name, item in result.values.items()}
    assert means == pytest.approx({"reward": 0.5, "reward/motion": 0.5, "brightness": 0.25, "motion": 0.1})
    assert result.diversity == pytest.approx(np.std([0, 1, 0]) / 2)


def test_interval_matches_normal_distribution() -> None:
    values = np.random.default_rng(1).normal(2.0, 0.5, size=400)
    low, high = compute_interval(list(values), [str(i) for i in range(400)]) or (0, 0)
    reach = 1.96 * values.std() / 20
    assert low == pytest.approx(values.mean() - reach, abs=0.005)
    assert high == pytest.approx(values.mean() + reach, abs=0.005)


def test_clips_of_one_prompt_are_clustered() -> None:
    """Use ten copies of two values, which carry no more information than two; treated as 20, they give too narrow an interval."""
    low, high = compute_interval([0.0] * 10 + [1.0] * 10, ["a"] * 10 + ["b"] * 10) or (1, 0)
    assert (low, high) == (0.0, 1.0)


def test_interval_requires_several_prompts() -> None:
    assert compute_interval([0.0, 1.0], ["a", "a"]) is None


def test_comparison_is_paired_by_clip() -> None:
    """Use clips that differ greatly and models that differ slightly but consistently, which only a paired comparison shows."""
    rewards = np.linspace(0, 1, 20)
    before = [clip(i, float(reward)) for i, reward in enumerate(rewards)]
    after = [clip(i, float(reward) + 0.01) for i, reward in enumerate(rewards)]
    result = compare(after, [*before, clip(99, 0.5)])
    difference = result.values["reward"]
    assert (result.clips, result.only_one, difference.better, difference.worse) == (20, 1, 20, 0)
    assert difference.estimate.mean == pytest.approx(0.01)
    assert difference.estimate.interval == pytest.approx((0.01, 0.01))
    assert result.values["brightness"].better == 0


@pytest.mark.parametrize(
    ("baseline", "message"),
    [([clip(7, 1.0)], "no clips in common"), ([clip(0, 1.0, prompt="another")], "clip 0 has the prompt 'prompt 0'")],
)
def test_evaluations_of_different_prompts_are_not_compared(baseline: list[ClipResult], message: str) -> None:
    with pytest.raises(DataError, match=message):
        compare([clip(0, 1.0)], baseline)


def test_empty_summary_is_rejected() -> None:
    with pytest.raises(DataError, match="no clips yet"):
        summarise([])


def test_results_are_read_in_numeric_order(tmp_path: Path) -> None:
    settings = {"model": {"path": "a"}, "world": {"sampling_steps": 10}}
    open_results(tmp_path, settings, overwrite=False)
    for number in (10, 2):
        write_clip(tmp_path, clip(number, 0.5))
    (tmp_path / "clips" / "notes.json").write_text("{}")  # a file that is not dsreason's
    open_results(tmp_path, settings, overwrite=False)
    assert read_clips(tmp_path) == [clip(2, 0.5), clip(10, 0.5)]


def test_changed_settings_in_folder_are_rejected(tmp_path: Path) -> None:
    open_results(tmp_path, {"world": {"sampling_steps": 10}}, overwrite=False)
    write_clip(tmp_path, clip(0, 0.5))
    with pytest.raises(ConfigError, match=r"a different world\.sampling_steps \(was 10, is now 20\)"):
        open_results(tmp_path, {"world": {"sampling_steps": 20}}, overwrite=False)
    open_results(tmp_path, {"world": {"sampling_steps": 20}}, overwrite=True)
    assert read_clips(tmp_path) == []


def test_error_names_the_damaged_result_file(tmp_path: Path) -> None:
    open_results(tmp_path, {}, overwrite=False)
    (tmp_path / "clips" / "3.json").write_text('{"number": 3}')
    with pytest.raises(DataError, match=r"3\.json: is not the result of a clip"):
        read_clips(tmp_path)
