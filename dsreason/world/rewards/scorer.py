"""Scoring clips by weighted functions and by a reward service, while the caller goes on sampling."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dsreason.config.schema_world import WorldRewardConfig
from dsreason.errors import ConfigError, DsReasonError, RewardError
from dsreason.rewards.functions import reward_labels
from dsreason.rewards.pool import Call, Pool
from dsreason.rewards.worker import described
from dsreason.world.rewards.functions import BUILT_IN, KIND, check_scores, find_clip_reward
from dsreason.world.types import WorldRow

Values = dict[str, list[float]]


@dataclass(frozen=True)
class Scores:
    """What `B` clips are worth.

    Example: `Scores(total=[1.5, 0.2], by_name={"colour": [1, 0.1], "dance_grpo/overall_reward": [0.5, 0.1]})`.
    """

    total: Tensor
    """`[B]`, float32: the functions' weighted sum plus the services' one."""
    by_name: dict[str, Tensor]
    """`[B]` each, float32, unweighted and not clipped: functions by short name, services as `<name>/<score key>`."""


@dataclass(frozen=True)
class Pending:
    """Scores that are being made."""

    config: WorldRewardConfig
    labels: Sequence[str]
    """Of `config.functions`, in their order."""
    built_in: Values
    own: Future[Values] | None

    def result(self) -> Scores:
        """Waits for the scores. RewardError: a function or the service failed, or took too long."""
        values = self.built_in | (self.own.result() if self.own else {})
        by_name = {label: torch.tensor(values[label], dtype=torch.float32) for label in self.labels}
        weights = self.config.functions.values()
        total = torch.stack([weight * by_name[label] for label, weight in zip(self.labels, weights, strict=True)]).sum(
            0
        )
        return Scores(total, by_name)


class ClipScorer:
    """Scores clips; a context manager, since it holds worker processes.

        with open_scorer(WorldRewardConfig(functions={"colour": 1.0, "rewards.py:judge": 0.5})) as scorer:
            pending = scorer.start(clips, latents, rows, fps=16.0)
            …                           # sample the next clips meanwhile
            scores = pending.result()

    Built-in functions are called at `start`, in this process; the user's own in worker processes (`reward.workers`; 0: at
    `start`, too, and without a time limit). Entering raises ConfigError when a function cannot be found.
    """

    def __init__(self, config: WorldRewardConfig, *, start_limit: float = 120.0) -> None:
        self.config = config
        self.labels = reward_labels(list(config.functions))
        named = dict(zip(config.functions, self.labels, strict=True))
        self._own = [name for name in named if name not in BUILT_IN and config.workers]
        self._label = named
        self._here: dict[str, Callable[..., Any]] = {}
        found = [(name, config.options.get(name, {})) for name in self._own]
        self._pool = Pool(KIND, found, workers=config.workers, time_limit=config.time_limit, start_limit=start_limit)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rewards")
        """Calls of a pool follow each other."""

    def __enter__(self) -> Self:
        self._here = {
            name: find_clip_reward(name, self.config.options.get(name))
            for name in self.config.functions
            if name not in self._own
        }
        self._pool.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._pool.close()

    def start(self, clips: Tensor, latents: Tensor, rows: Sequence[WorldRow], fps: float) -> Pending:
        """Begin to score `clips[i]`, which was sampled for `rows[i]`. The tensors must not be changed before the result is there.

        Args:
            clips: uint8 `[B, 3, T, H, W]` on the CPU.
            latents: float32 `[B, C, T, h, w]`, normalised, of the same clips; read where a service gets latents.
            fps: frames per second of the clips.

        Raises:
            RewardError: a function that is called in this process failed.
        """
        if clips.dtype != torch.uint8 or clips.ndim != 5 or len(clips) != len(rows):
            raise ValueError(
                f"clips must be uint8 [{len(rows)}, 3, T, H, W], are {clips.dtype} {list(clips.shape)} for {len(rows)} rows"
            )
        samples = [replace(row, meta={**row.meta, "fps": fps}) for row in rows]
        pixels = clips.contiguous().numpy()
        here = {self._label[name]: call_here(name, function, pixels, samples) for name, function in self._here.items()}
        own = self._thread.submit(self._call_own, pixels, samples) if self._own else None
        return Pending(self.config, self.labels, here, own)

    def _call_own(self, clips: NDArray[np.uint8], samples: list[WorldRow]) -> Values:
        subject = of_rows(samples)
        calls = [Call(number, (clips, samples), subject) for number in range(len(self._own))]
        results = self._pool.run(calls)
        return {self._label[name]: result.score for name, result in zip(self._own, results, strict=True)}


def open_scorer(config: WorldRewardConfig) -> ClipScorer:
    """A scorer of everything that the configuration names.

    Raises:
        ConfigError: no reward is named.
    """
    if not config.functions:
        raise ConfigError("no reward is named; set reward.functions, such as { follow = 1.0 }")
    return ClipScorer(config)


def call_here(
    name: str, function: Callable[..., Any], clips: NDArray[np.uint8], samples: Sequence[WorldRow]
) -> list[float]:
    """The scores by a function in this process; by a built-in one clip by clip, since a large clip takes gigabytes as float32."""
    size = 1 if name in BUILT_IN else len(samples)
    scores: list[float] = []
    for first in range(0, len(samples), size):
        arguments = (clips[first : first + size], samples[first : first + size])
        subject = f'reward "{name}", {of_rows(arguments[1])}:'
        try:
            result = function(*arguments)
        except DsReasonError:
            raise
        except Exception as error:  # noqa: BLE001  somebody else's code
            raise RewardError(f"{subject} {described(error)}") from error
        try:
            scores += check_scores(result, arguments)[0]
        except ValueError as error:
            raise RewardError(f"{subject} {error}") from None
    return scores


def of_rows(rows: Sequence[WorldRow]) -> str:
    """Which clips, for messages: `clips of "train.txt:1" to "train.txt:4"`."""
    first, last = rows[0].id, rows[-1].id
    return f'clip of "{first}"' if len(rows) == 1 else f'clips of "{first}" to "{last}"'
