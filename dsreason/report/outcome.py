"""A run's outcome: its measures at the start and at the end, with confidence intervals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dsreason.evaluation.report.score import compute_clustered_interval, compute_wilson_interval
from dsreason.report.curves import get_points
from dsreason.report.run_files import Row, RunFiles

Interval = tuple[float, float]
UNBOUNDED = (float("-inf"), float("inf"))
HIGHER_IS_BETTER = {
    "val/accuracy": True,
    "val/reward/mean": True,
    "val/preference_accuracy": True,
    "val/loss": False,
}


@dataclass(frozen=True)
class Measurement:
    """A measure at one step. `interval` is its 95 % confidence interval; None if it cannot be computed."""

    step: int
    value: float
    interval: Interval | None = None


@dataclass(frozen=True)
class Outcome:
    """A measure at the start, at its best and at the end of the run."""

    name: str
    source: str
    """Rows or prompts on which the measure is based, such as `256 held-out rows`."""
    start: Measurement
    best: Measurement
    end: Measurement
    higher_is_better: bool

    @property
    def verdict(self) -> str:
        """`unclear` if the intervals at the start and the end overlap; otherwise `better` or `worse`, or `unchanged` if the
        values are equal."""
        start, end = self.start, self.end
        if start.value == end.value:
            return "unchanged"
        if start.interval and end.interval:
            is_clear = start.interval[1] < end.interval[0] or end.interval[1] < start.interval[0]
            if not is_clear:
                return "unclear"
        return "better" if (end.value > start.value) == self.higher_is_better else "worse"


def measure_outcomes(run: RunFiles) -> list[Outcome]:
    """Return the first, best and last measurement of each measure; measures on held-out data come first."""
    outcomes = [
        outcome
        for name, higher in HIGHER_IS_BETTER.items()
        if (outcome := measure_validation(run, name, higher_is_better=higher)) is not None
    ]
    if (outcome := measure_rollouts(run)) is not None:
        outcomes.append(outcome)
    if not outcomes and (points := get_points(run.metrics, "train/loss")):
        first, last = Measurement(*to_step(points[0])), Measurement(*to_step(points[-1]))
        best = Measurement(*to_step(min(points, key=lambda point: point[1])))
        outcomes.append(Outcome("loss", "training rows of a step", first, best, last, higher_is_better=False))
    return outcomes


def measure_validation(run: RunFiles, name: str, *, higher_is_better: bool) -> Outcome | None:
    points = get_points(run.metrics, name)
    if not points:
        return None
    choose = max if higher_is_better else min
    best = choose(points, key=lambda point: point[1])
    intervals = {"val/accuracy": compute_accuracy_interval, "val/reward/mean": compute_reward_interval}
    compute = intervals.get(name)
    start, highest, end = (measure(run, point, compute) for point in (points[0], best, points[-1]))
    rows = len(run.read_answers(end.step)) if compute else 0
    source = f"{rows} held-out rows" if rows else "held-out rows"
    return Outcome(name.removeprefix("val/").removesuffix("/mean"), source, start, highest, end, higher_is_better)


def measure(
    run: RunFiles, point: tuple[float, float], compute: Callable[[Sequence[Row]], Interval | None] | None
) -> Measurement:
    step, value = to_step(point)
    return Measurement(step, value, compute(run.read_answers(step)) if compute else None)


def to_step(point: tuple[float, float]) -> tuple[int, float]:
    return int(point[0]), point[1]


def compute_accuracy_interval(answers: Sequence[Row]) -> Interval | None:
    graded = [answer["correct"] for answer in answers if answer["correct"] is not None]
    return compute_wilson_interval(sum(graded), len(graded)) if graded else None


def compute_reward_interval(answers: Sequence[Row]) -> Interval | None:
    rewards = [value for answer in answers if (value := answer["rewards"].get("")) is not None]
    return compute_clustered_interval(rewards, range(len(rewards)), bounds=UNBOUNDED) if rewards else None


def measure_rollouts(run: RunFiles) -> Outcome | None:
    """Measure the total reward of completions in the first and the last rollout, with intervals clustered by prompt."""
    steps = run.list_steps("rollouts")
    points = [(int(step) - 1, value) for step, value in get_points(run.metrics, "reward/mean")]
    if not steps or not points:
        return None
    best = max(points, key=lambda point: point[1])
    start, end = measure_rollout(run, steps[0]), measure_rollout(run, steps[-1])
    if start is None or end is None:
        return None
    prompts = len(run.read_rollouts(steps[-1]))
    return Outcome("reward in training", f"{prompts} prompts of a rollout", start, Measurement(*best), end, True)


def measure_rollout(run: RunFiles, step: int) -> Measurement | None:
    groups = run.read_rollouts(step)
    scored = [(row["reward"], number) for number, group in enumerate(groups) for row in group]
    scored = [(reward, number) for reward, number in scored if reward is not None]
    if not scored:
        return None
    rewards, clusters = zip(*scored, strict=True)
    interval = compute_clustered_interval(rewards, clusters, bounds=UNBOUNDED)
    return Measurement(step, sum(rewards) / len(rewards), interval)
