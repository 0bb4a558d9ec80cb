"""Scoring completions with several weighted rewards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from dsreason.config.schema_grpo import GRPOConfig, RewardConfig
from dsreason.data.types import Sample
from dsreason.rewards.functions import REMOTE, reward_labels
from dsreason.rewards.pool import Call, Pool
from dsreason.rewards.remote import RemoteReward

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Scores:
    """What `n` completions are worth.

    Example: `Scores(total=[1.5, 0.0], by_function={"format": [1, 0], "judge": [0.5, 0]}, metrics={"judge/words": 7.5})`.
    """

    total: Floats  # [n]
    """The weighted sum."""
    by_function: dict[str, Floats]  # [n] each
    """Unweighted, by the functions' short names."""
    metric_sums: dict[str, tuple[float, int]] = field(default_factory=dict)
    """`<function>/<metric>` → its sum and how many calls gave it; these add up over ranks."""

    @property
    def metrics(self) -> dict[str, float]:
        """The mean of every metric over the calls that gave it."""
        return {name: total / count for name, (total, count) in self.metric_sums.items()}


class Scorer:
    """Scores completions; a context manager, since it holds worker processes.

        with Scorer({"single_choice": 1.0, "rewards.py:judge": 0.5}, time_limit=30) as scorer:
            scores = scorer.score(completions, samples)

    `functions` maps names (see `find_reward`) to weights; a name `remote:<score>` takes that score from the reward server.
    `options` has keyword arguments by function name. Every call may take `time_limit` seconds. A function that raises,
    returns anything but a finite number, takes longer or kills its process is a RewardError that names it and the sample;
    the workers, the hanging one included, are gone by then. Entering raises ConfigError when a function cannot be found.
    """

    def __init__(
        self,
        functions: Mapping[str, float],
        *,
        options: Mapping[str, Mapping[str, Any]] | None = None,
        workers: int = 2,
        time_limit: float = 30.0,
        start_limit: float = 120.0,
        remote: RemoteReward | None = None,
    ) -> None:
        self.names, self.weights = list(functions), list(functions.values())
        self.labels = reward_labels(self.names)
        options = options or {}
        labelled = list(zip(self.names, self.labels, strict=True))
        self._local = [(name, label) for name, label in labelled if not name.startswith(REMOTE)]
        self._served = {name.removeprefix(REMOTE): label for name, label in labelled if name.startswith(REMOTE)}
        self._remote = remote or (RemoteReward.from_environment() if self._served else None)
        found = [(name, options.get(name, {})) for name, _ in self._local]
        self._pool = Pool(found, workers=workers, time_limit=time_limit, start_limit=start_limit)

    def __enter__(self) -> Self:
        self._pool.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._pool.close()

    def score(self, completions: Sequence[str], samples: Sequence[Sample]) -> Scores:
        """Scores `completions[i]` against `samples[i]`; for `overlong` see `text.with_length`."""
        pairs = list(zip(completions, samples, strict=True))
        calls = [Call(number, *pair) for number in range(len(self._local)) for pair in pairs]
        results = self._pool.run(calls)
        values = {label: np.zeros(len(pairs)) for label in self.labels}
        sums: dict[str, tuple[float, int]] = {}
        for position, (call, result) in enumerate(zip(calls, results, strict=True)):
            _, label = self._local[call.function]
            values[label][position % len(pairs)] = result.score
            for name, value in result.metrics.items():
                _add(sums, f"{label}/{name}", [value])
        if self._remote is not None and self._served:
            for name, scores in self._remote.score(completions, samples, list(self._served)).items():
                if name in self._served:
                    values[self._served[name]][:] = scores
                else:  # scores that no function is named after are metrics
                    _add(sums, f"remote/{name}", scores)
        total = sum(
            (w * values[label] for w, label in zip(self.weights, self.labels, strict=True)), np.zeros(len(pairs))
        )
        return Scores(total, values, sums)


def open_scorer(config: GRPOConfig) -> Scorer:
    """The scorer that `[reward]` asks for. Nothing runs before it is entered."""
    reward = config.reward
    return Scorer(
        reward.functions,
        options=reward.options,
        workers=reward.workers,
        time_limit=reward.time_limit,
        remote=open_remote(reward),
    )


def open_remote(reward: RewardConfig) -> RemoteReward | None:
    """The server of the rewards named `remote:…`; its token comes from the environment alone. No request is made."""
    if not any(name.startswith(REMOTE) for name in reward.functions):
        return None
    return RemoteReward.from_environment(**reward.remote.model_dump(exclude_none=True))


def _add(sums: dict[str, tuple[float, int]], name: str, values: Sequence[float]) -> None:
    total, count = sums.get(name, (0.0, 0))
    sums[name] = (total + sum(values), count + len(values))
