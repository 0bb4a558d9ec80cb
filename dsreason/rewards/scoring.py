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
    """A completion's score from one function."""

    value: float | None
    """Unweighted score; None if the function returned None because it does not apply to the sample."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    """Duration of the call, which may have scored several completions."""


@dataclass(frozen=True)
class CompletionScores:
    """Scores for `n` completions. NaN stands for a missing score.

    Example: `CompletionScores(total=[1.5, 0.0], by_function={"format": [1, 0], "judge": [0.5, 0]},
    metric_sums={"judge/words": (15, 2)})`.
    """

    total: Floats  # [n]
    """Weighted sum of the scores from all functions that apply to the sample; NaN if none applies."""
    by_function: dict[str, Floats]  # [n] each
    """Short name of the function → unweighted scores; NaN if the function does not apply to the sample."""
    metric_sums: dict[str, tuple[float, int]] = field(default_factory=dict)
    """`<function>/<metric>` → (sum of the metric, number of calls that returned it); both can be summed over ranks."""


class Scorer:
    """A scorer for completions. It is a context manager, because it owns worker processes.

        with Scorer(RewardConfig(functions={"single_choice": 1.0, "rewards.py:judge": 0.5})) as scorer:
            scores = scorer.score(completions, samples)

    If a function raises an error, returns an invalid result, exceeds `time_limit`, or ends its process, all workers are killed,
    including hanging ones, and a RewardError names the function and the sample. Entering the context raises ConfigError if a
    function cannot be found.

    A function that scores several completions per call, as in TRL and ms-swift, is called once for adjacent completions of the
    same sample, such as a prompt's group; the time limit applies to this call. A function listed in `reward.only` scores only
    the samples selected there. A built-in reward that compares with the answer gives the best score over all accepted answers.

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
        """Return each function's scores by label, and the metrics from the reward server.

        If `reward.only` excludes a sample from a function, its score is None.

        Args:
            completion_ids: the completions' token ids, for functions that need them.
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
        """Return the weighted sum of `scores` over the functions, `[n]`; NaN if no function applies to the sample."""
        values = {label: to_array(scores[label]) for label in self.labels}
        total = sum(w * np.nan_to_num(values[label]) for w, label in zip(self.weights, self.labels, strict=True))
        return np.where(np.isnan(list(values.values())).all(axis=0), np.nan, total)

    def _score_remotely(
        self, completions: Sequence[str], samples: Sequence[Sample], scores: dict[str, list[FunctionScore | None]]
    ) -> dict[str, list[float]]:
        """Add the reward server's scores to `scores`. Scores that the configuration does not name are returned as metrics."""
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
"""Type of `reward.only`: name of a reward → row field → values that select a row."""


def applies(only: Only, name: str, sample: Sample) -> bool:
    """Return whether, according to `reward.only`, the function with this name scores the sample."""
    fields = only.get(name, {})
    return all(str(get_value(sample.meta, field)) in map(str, values) for field, values in fields.items())


def to_array(scores: Sequence[FunctionScore | None]) -> Floats:
    """Return the scores' values as an array `[n]`, with NaN for missing ones."""
    return np.array([None if score is None else score.value for score in scores], dtype=np.float64)


def to_optional(value: np.float64) -> float | None:
    """Convert a score from `CompletionScores` to a number, or to None if it is NaN."""
    return None if np.isnan(value) else float(value)


def choose_better(first: FunctionScore | None, second: FunctionScore) -> FunctionScore:
    """Return the score with the higher value; any value beats None."""
    if first is None or first.value is None:
        return second
    return second if second.value is not None and second.value > first.value else first


def open_remote(config: RewardConfig) -> RemoteReward | None:
    """Return a client for rewards named `remote:…`, or None if the configuration has no such rewards. No request is sent."""
    return RemoteReward(config.remote) if any(name.startswith(REMOTE) for name in config.functions) else None
