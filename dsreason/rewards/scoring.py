"""Scoring of completions with several weighted rewards."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from dsreason.config.schema_grpo import RewardConfig
from dsreason.data.labels import get_value
from dsreason.data.types import Sample
from dsreason.rewards.functions import REMOTE, find_reward, list_accepted, make_reward_labels
from dsreason.rewards.pool import Pool, RewardCall
from dsreason.rewards.remote import RemoteReward
from dsreason.rewards.worker import FunctionKind, check_score

Floats = NDArray[np.float64]
KIND = FunctionKind(find_reward, check_score)


@dataclass(frozen=True)
class FunctionScore:
    """Score of a completion by one function."""

    value: float | None
    """Unweighted score; None if the function returned None, because it does not apply to the sample."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    """Duration of the call, which may have scored several completions."""


@dataclass(frozen=True)
class CompletionScores:
    """Scores of `n` completions. NaN stands for a score that does not exist.

    Example: `CompletionScores(total=[1.5, 0.0], by_function={"format": [1, 0], "judge": [0.5, 0]},
    metric_sums={"judge/words": (15, 2)})`.
    """

    total: Floats  # [n]
    """Weighted sum of the scores of all functions that apply to the sample; NaN if none applies."""
    by_function: dict[str, Floats]  # [n] each
    """Unweighted scores: short name of the function → scores; NaN if it does not apply to the sample."""
    metric_sums: dict[str, tuple[float, int]] = field(default_factory=dict)
    """`<function>/<metric>` → sum of the metric and number of calls that returned it; both can be summed over ranks."""


class Scorer:
    """A scorer of completions; it is a context manager, because it holds worker processes.

        with Scorer(RewardConfig(functions={"single_choice": 1.0, "rewards.py:judge": 0.5})) as scorer:
            scores = scorer.score(completions, samples)

    If a function raises an error, returns anything but a finite number, exceeds `time_limit`, or ends its process, all workers
    are killed, including hanging ones, and a RewardError names the function and the sample. Entering the context raises
    ConfigError if a function cannot be found.

    A function that scores several completions in one call (those of TRL and ms-swift) is called once for adjacent completions of
    the same sample, such as the group of a prompt; the time limit applies to this call. A function with an entry in
    `reward.only` scores only the samples that the entry selects. A built-in reward that compares with the answer gives the
    best score over all accepted answers.

    Args:
        start_limit: seconds within which a worker must have imported the functions.
    """

    def __init__(self, config: RewardConfig, *, start_limit: float = 120.0) -> None:
        names = list(config.functions)
        self.labels, self.weights = make_reward_labels(names), list(config.functions.values())
        labelled = list(zip(names, self.labels, strict=True))
        self._local = [(name, label) for name, label in labelled if not name.startswith(REMOTE)]
        self._served = {name.removeprefix(REMOTE): label for name, label in labelled if name.startswith(REMOTE)}
        self._remote, self._only = open_remote(config), config.only
        local_functions = [(name, config.options.get(name, {})) for name, _ in self._local]
        self._pool = Pool(
            KIND, local_functions, workers=config.workers, time_limit=config.time_limit, start_limit=start_limit
        )

    def __enter__(self) -> Self:
        self._pool.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._pool.close()

    def score(
        self,
        completions: Sequence[str],
        samples: Sequence[Sample],
        completion_ids: Sequence[Sequence[int]] | None = None,
    ) -> CompletionScores:
        """Score `completions[i]` as an answer to `samples[i]`. For `overlong`, prepare the samples with `text.add_length`."""
        scores, metrics = self.score_by_function(completions, samples, completion_ids)
        values = {label: to_array(scores[label]) for label in self.labels}
        for label in self.labels:
            for score in scores[label]:
                for name, value in score.metrics.items() if score else ():
                    metrics[f"{label}/{name}"].append(value)
        return CompletionScores(
            self.sum_scores(scores) if self.labels else np.zeros(len(completions)),
            values,
            {name: (sum(values_of_metric), len(values_of_metric)) for name, values_of_metric in metrics.items()},
        )

    def score_by_function(
        self,
        completions: Sequence[str],
        samples: Sequence[Sample],
        completion_ids: Sequence[Sequence[int]] | None = None,
    ) -> tuple[dict[str, list[FunctionScore | None]], dict[str, list[float]]]:
        """Return the scores of each function by its label, and the metrics of the reward server.

        The score of a sample that `reward.only` excludes is None.

        Args:
            completion_ids: tokens of the completions, for functions that need them.
        """
        scores: dict[str, list[FunctionScore | None]] = {label: [None] * len(completions) for label in self.labels}
        calls, targets = list[RewardCall](), list[list[int]]()
        for number, ((name, _), trait) in enumerate(zip(self._local, self._pool.traits, strict=True)):
            rows = [i for i, sample in enumerate(samples) if applies(self._only, name, sample)]
            if trait.is_batched:
                for _, group in groupby(rows, lambda i: (samples[i].id, samples[i].messages)):
                    batch = list(group)
                    ids = None if completion_ids is None else [completion_ids[i] for i in batch]
                    arguments: tuple[Any, ...] = ([completions[i] for i in batch], [samples[i] for i in batch], ids)
                    calls.append(RewardCall(number, arguments, f'sample "{samples[batch[0]].id}"'))
                    targets.append(batch)
                continue
            for i in rows:
                for accepted in list_accepted(name, samples[i]):
                    calls.append(RewardCall(number, (completions[i], accepted), f'sample "{samples[i].id}"'))
                    targets.append([i])
        for call, batch, result in zip(calls, targets, self._pool.run(calls), strict=True):
            label_scores = scores[self._local[call.function][1]]
            batch_values = result.score if isinstance(result.score, list) else [result.score] * len(batch)
            for i, value in zip(batch, batch_values, strict=True):
                score = FunctionScore(value, result.metrics, result.seconds)
                label_scores[i] = choose_better(label_scores[i], score)
        return scores, self._score_remotely(completions, samples, scores)

    def sum_scores(self, scores: Mapping[str, Sequence[FunctionScore | None]]) -> Floats:
        """Return the weighted sum `[n]` of the functions' scores by label; NaN if no function applies to the sample."""
        values = {label: to_array(scores[label]) for label in self.labels}
        total = sum(w * np.nan_to_num(values[label]) for w, label in zip(self.weights, self.labels, strict=True))
        return np.where(np.isnan(list(values.values())).all(axis=0), np.nan, total)

    def _score_remotely(
        self, completions: Sequence[str], samples: Sequence[Sample], scores: dict[str, list[FunctionScore | None]]
    ) -> dict[str, list[float]]:
        """Add the reward server's scores to `scores`; return the values of those that the configuration does not name."""
        metrics: dict[str, list[float]] = defaultdict(list)
        applicable = {
            name: [i for i, sample in enumerate(samples) if applies(self._only, REMOTE + name, sample)]
            for name in self._served
        }
        rows = sorted({i for indices in applicable.values() for i in indices})
        if self._remote is None or not rows:
            return metrics
        started = time.perf_counter()
        served = self._remote.score([completions[i] for i in rows], [samples[i] for i in rows], list(self._served))
        seconds = time.perf_counter() - started
        for name, values in served.items():
            if name in self._served:
                by_row = dict(zip(rows, values, strict=True))
                for i in applicable[name]:
                    scores[self._served[name]][i] = FunctionScore(by_row[i], seconds=seconds)
            else:
                metrics[f"remote/{name}"] += values
        return metrics


Only = Mapping[str, Mapping[str, Sequence[str | float | bool]]]
"""Value of `reward.only`: name of a reward → field of the rows → values."""


def applies(only: Only, name: str, sample: Sample) -> bool:
    """Return whether `reward.only` allows the function with this name to score the sample."""
    fields = only.get(name, {})
    return all(str(get_value(sample.meta, field)) in map(str, values) for field, values in fields.items())


def to_array(scores: Sequence[FunctionScore | None]) -> Floats:
    """Return the values of scores as an array [n]; NaN for those without a value."""
    return np.array([None if score is None else score.value for score in scores], dtype=np.float64)


def to_optional(value: np.float64) -> float | None:
    """Return a score of `CompletionScores` as a number, or None for NaN."""
    return None if np.isnan(value) else float(value)


def choose_better(first: FunctionScore | None, second: FunctionScore) -> FunctionScore:
    """Return the score with the higher value; any value is higher than None."""
    if first is None or first.value is None:
        return second
    return second if second.value is not None and second.value > first.value else first


def open_remote(config: RewardConfig) -> RemoteReward | None:
    """Return a client for rewards named `remote:…`, or None if the configuration has none; send no request."""
    return RemoteReward(config.remote) if any(name.startswith(REMOTE) for name in config.functions) else None
