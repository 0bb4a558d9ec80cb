"""Mean rewards with confidence intervals, and paired differences between two models."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dsreason.errors import DataError
from dsreason.evaluation.report.score import CONFIDENCE, Interval
from dsreason.world.evaluation.results import ClipResult

DRAWS = 10_000
"""Number of bootstrap samples."""


@dataclass(frozen=True)
class Estimate:
    """A mean over clips with its 95 % confidence interval, which is None if there is only one prompt."""

    mean: float
    interval: Interval | None


@dataclass(frozen=True)
class ClipSummary:
    clips: int
    prompts: int
    values: dict[str, Estimate]
    """Estimates of `reward` (the weighted sum), `reward/<name>`, `brightness` and `motion`."""
    diversity: float
    """Standard deviation across the clips at a low resolution, averaged over pixels; pixel values range from 0 to 1."""


@dataclass(frozen=True)
class Difference:
    """The difference between the evaluated model and the baseline, on the same prompts and noise."""

    estimate: Estimate
    better: int
    """Number of clips with a higher value than in the baseline."""
    worse: int


@dataclass(frozen=True)
class ClipComparison:
    clips: int
    values: dict[str, Difference]
    only_one: int
    """Number of clips that exist in only one of the two evaluations, and are therefore not compared."""


def summarise(clips: Sequence[ClipResult]) -> ClipSummary:
    """Summarise the clips. Raise DataError if there are none."""
    if not clips:
        raise DataError("the evaluation has no clips yet; run dsreason eval")
    prompts = [clip.prompt for clip in clips]
    pictures = np.array([clip.picture for clip in clips]) / 255
    return ClipSummary(
        clips=len(clips),
        prompts=len(set(prompts)),
        values={
            name: estimate([measure(clip) for clip in clips], prompts) for name, measure in list_measures(clips).items()
        },
        diversity=float(pictures.std(axis=0).mean()),
    )


def compare(this: Sequence[ClipResult], baseline: Sequence[ClipResult]) -> ClipComparison:
    """Compare the clips of two evaluations, paired by number.

    Raises:
        DataError: the evaluations have no clip number in common, or have different prompts under the same number.
    """
    before = {clip.number: clip for clip in baseline}
    pairs = [(clip, before[clip.number]) for clip in this if clip.number in before]
    if not pairs:
        raise DataError("the two evaluations have no clips in common; evaluate both on the same prompts")
    for a, b in pairs:
        if a.prompt != b.prompt:
            raise DataError(
                f"clip {a.number} has the prompt {a.prompt!r:.80} in one evaluation, but {b.prompt!r:.80} in the other; "
                "evaluate both on the same prompts"
            )
    prompts = [a.prompt for a, _ in pairs]
    common = list_measures([b for _, b in pairs])
    values = {}
    for name, measure in list_measures([a for a, _ in pairs]).items():
        if name in common:
            differences = [measure(a) - measure(b) for a, b in pairs]
            signs = np.sign(differences)
            values[name] = Difference(estimate(differences, prompts), int((signs > 0).sum()), int((signs < 0).sum()))
    return ClipComparison(len(pairs), values, len(this) + len(baseline) - 2 * len(pairs))


def list_measures(clips: Sequence[ClipResult]) -> dict[str, Callable[[ClipResult], float]]:
    """Return the metrics: name → function that reads the metric from a clip. Rewards that some clips lack are omitted."""
    names = [name for name in clips[0].rewards if all(name in clip.rewards for clip in clips)]

    def reward(name: str) -> Callable[[ClipResult], float]:
        return lambda clip: clip.rewards[name]

    rewards: Mapping[str, Callable[[ClipResult], float]] = {name_reward(name): reward(name) for name in names}
    return {**rewards, "brightness": lambda clip: clip.brightness, "motion": lambda clip: clip.motion}


def name_reward(name: str) -> str:
    """Return the name of a reward's metric: `reward` for the weighted sum "", `reward/colour` for "colour"."""
    return f"reward/{name}" if name else "reward"


def estimate(values: Sequence[float], clusters: Sequence[str]) -> Estimate:
    return Estimate(float(np.mean(values)), compute_interval(values, clusters))


def compute_interval(
    values: Sequence[float], clusters: Sequence[str], *, draws: int = DRAWS, seed: int = 0
) -> Interval | None:
    """Return the 95 % confidence interval of the mean, or None if there is only one cluster.

    The interval comes from a percentile bootstrap over clusters, because clips of the same prompt are correlated.
    Source: Efron and Tibshirani, An Introduction to the Bootstrap (1993), chapter 13, and chapter 8 for resampling clusters.
    """
    names = {name: number for number, name in enumerate(dict.fromkeys(clusters))}
    if len(names) < 2:
        return None
    sums, counts = np.zeros(len(names)), np.zeros(len(names))
    for value, cluster in zip(values, clusters, strict=True):
        sums[names[cluster]] += value
        counts[names[cluster]] += 1
    drawn = np.random.default_rng(seed).multinomial(len(names), np.full(len(names), 1 / len(names)), size=draws)
    means = (drawn @ sums) / (drawn @ counts)
    low, high = np.quantile(means, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)
