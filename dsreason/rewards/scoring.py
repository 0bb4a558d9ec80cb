"""Scoring of completions with several weighted rewards."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np
from numpy.typing import NDArray

from dsreason.config.schema_grpo import RewardConfig
from dsreason.data.types import Sample
from dsreason.rewards.functions import REMOTE, find_reward, make_reward_labels
from dsreason.rewards.pool import Pool, RewardCall
from dsreason.rewards.remote import RemoteReward
from dsreason.rewards.worker import FunctionKind, check_score

Floats = NDArray[np.float64]
KIND = FunctionKind(find_reward, check_score)


@dataclass(frozen=True)
class CompletionScores:
    """Scores of `n` completions.

    Example: `CompletionScores(total=[1.5, 0.0], by_function={"format": [1, 0], "judge": [0.5, 0]},
    metric_sums={"judge/words": (15, 2)})`.
    """

    total: Floats  # [n]
    """Weighted sum of the scores."""
    by_function: dict[str, Floats]  # [n] each
    """Unweighted scores: short name of the function → scores."""
    metric_sums: dict[str, tuple[float, int]] = field(default_factory=dict)
    """`<function>/<metric>` → sum of the metric and number of calls that returned it; both can be summed over ranks."""


class Scorer:
    """A scorer of completions; it is a context manager, because it holds worker processes.

        with Scorer(RewardConfig(functions={"single_choice": 1.0, "rewards.py:judge": 0.5})) as scorer:
            scores = scorer.score(completions, samples)

    If a function raises an error, returns anything but a finite number, exceeds `time_limit`, or ends its process, all workers
    are killed, including hanging ones, and a RewardError names the function and the sample. Entering the context raises
    ConfigError if a function cannot be found.

    Args:
        start_limit: seconds within which a worker must have imported the functions.
    """

    def __init__(self, config: RewardConfig, *, start_limit: float = 120.0) -> None:
        names = list(config.functions)
        self.labels, self.weights = make_reward_labels(names), list(config.functions.values())
        labelled = list(zip(names, self.labels, strict=True))
        self._local = [(name, label) for name, label in labelled if not name.startswith(REMOTE)]
        self._served = {name.removeprefix(REMOTE): label for name, label in labelled if name.startswith(REMOTE)}
        self._remote = open_remote(config)
        local_functions = [(name, config.options.get(name, {})) for name, _ in self._local]
        self._pool = Pool(
            KIND, local_functions, workers=config.workers, time_limit=config.time_limit, start_limit=start_limit
        )

    def __enter__(self) -> Self:
        self._pool.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._pool.close()

    def score(self, completions: Sequence[str], samples: Sequence[Sample]) -> CompletionScores:
        """Score `completions[i]` as an answer to `samples[i]`. For `overlong`, prepare the samples with `text.add_length`."""
        pairs = list(zip(completions, samples, strict=True))
        calls = [
            RewardCall(number, pair, f'sample "{pair[1].id}"') for number in range(len(self._local)) for pair in pairs
        ]
        results = self._pool.run(calls)
        values = {label: np.zeros(len(pairs)) for label in self.labels}
        metrics: dict[str, list[float]] = defaultdict(list)
        for position, (call, result) in enumerate(zip(calls, results, strict=True)):
            _, label = self._local[call.function]
            values[label][position % len(pairs)] = result.score
            for name, value in result.metrics.items():
                metrics[f"{label}/{name}"].append(value)
        if self._remote is not None:
            for name, scores in self._remote.score(completions, samples, list(self._served)).items():
                if name in self._served:
                    values[self._served[name]][:] = scores
                else:  # scores that the configuration does not name are metrics
                    metrics[f"remote/{name}"] += scores
        total = sum(
            (w * values[label] for w, label in zip(self.weights, self.labels, strict=True)), np.zeros(len(pairs))
        )
        return CompletionScores(
            total,
            values,
            {name: (sum(values_of_metric), len(values_of_metric)) for name, values_of_metric in metrics.items()},
        )


def open_remote(config: RewardConfig) -> RemoteReward | None:
    """Return a client for rewards named `remote:…`, or None if the configuration has none; send no request."""
    return RemoteReward(config.remote) if any(name.startswith(REMOTE) for name in config.functions) else None
