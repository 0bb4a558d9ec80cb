"""Background scoring of clips with weighted functions and a reward service, while the caller samples more clips."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dsreason.errors import ConfigError, DsReasonError, RewardError
from dsreason.rewards.functions import make_reward_labels
from dsreason.rewards.pool import Pool, RewardCall
from dsreason.rewards.worker import describe_error
from dsreason.world.rewards.functions import BUILT_IN, KIND, check_functions, check_scores, find_clip_reward
from dsreason.world.rewards.service import RewardService, compute_total
from dsreason.world.schema import WorldRewardConfig
from dsreason.world.types import WorldRow

Values = dict[str, list[float]]


@dataclass(frozen=True)
class ClipScores:
    """Scores of `B` clips.

    Example: `ClipScores(total=[1.5, 0.2], by_name={"colour": [1, 0.1], "dance_grpo/overall_reward": [0.5, 0.1]})`.
    """

    total: Tensor
    """Weighted sum of the functions' scores, plus the services' total (see `compute_total`): `[B]`, float32."""
    by_name: dict[str, Tensor]
    """Scores before weighting and clipping, float32 `[B]`, by the function's short name or the service's `<name>/<score key>`."""


@dataclass(frozen=True)
class Pending:
    """Scores that are being computed."""

    config: WorldRewardConfig
    labels: Sequence[str]
    """Short names of the functions, in the order of `config.functions`."""
    num_clips: int
    here: Values
    """Scores of the functions that were called synchronously in this process."""
    futures: Sequence[Future[Values]]
    """Pending results of the built-in functions, the worker processes and the service."""

    def result(self) -> ClipScores:
        """Wait for the scores. Raise RewardError if a function or the service failed or took too long."""
        values = dict(self.here)
        for future in self.futures:
            values |= future.result()
        by_name = {name: torch.tensor(scores, dtype=torch.float32) for name, scores in values.items()}
        functions = dict(zip(self.labels, self.config.functions.values(), strict=True))
        total = torch.zeros(self.num_clips)
        for label, weight in functions.items():
            total += weight * by_name[label]
        if self.config.services:
            total += torch.from_numpy(compute_total(self.config, values))
        return ClipScores(total, by_name)


class ClipScorer:
    """A scorer of clips. It owns worker processes, so use it as a context manager.

        with open_scorer(WorldRewardConfig(functions={"colour": 1.0, "rewards.py:judge": 0.5})) as scorer:
            pending = scorer.start(clips, latents, rows, fps=16.0)
            …                           # sample the next clips in the meantime
            scores = pending.result()

    Built-in functions are called in a thread, user-defined ones in worker processes. With `reward.workers = 0`, `start` calls
    user-defined functions itself, without a time limit. `__enter__` raises ConfigError if a function cannot be found.
    """

    def __init__(self, config: WorldRewardConfig, *, start_limit: float = 120.0) -> None:
        self.config = config
        self.labels = make_reward_labels(list(config.functions))
        label_of = dict(zip(config.functions, self.labels, strict=True))
        self._own = [name for name in label_of if name not in BUILT_IN and config.workers]
        self._label = label_of
        self._here: dict[str, Callable[..., Any]] = {}
        own_functions = [(name, config.options.get(name, {})) for name in self._own]
        self._pool = Pool(
            KIND, own_functions, workers=config.workers, time_limit=config.time_limit, start_limit=start_limit
        )
        self._service = RewardService(config) if config.services else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rewards")
        """A single thread, so that calls to the pool do not overlap."""
        self._built_in = ThreadPoolExecutor(1, thread_name_prefix="built-in rewards")
        """A thread for built-in functions: they need seconds for a large clip, while the caller can sample the next one."""

    def __enter__(self) -> Self:
        self._here = {
            name: find_clip_reward(name, self.config.options.get(name))
            for name in self.config.functions
            if name not in self._own
        }
        self._pool.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._service is not None:
            self._service.close()
        for thread in (self._thread, self._built_in):
            thread.shutdown(wait=False, cancel_futures=True)
        self._pool.close()

    def start(self, clips: Tensor, latents: Tensor, rows: Sequence[WorldRow], fps: float) -> Pending:
        """Start scoring `clips[i]`, which was sampled for `rows[i]`. The tensors must not change before the result arrives.

        Args:
            clips: uint8 `[B, 3, T, H, W]` on the CPU.
            latents: normalised latents of the same clips, float32 `[B, C, T, h, w]`; used only if the service receives latents.
            fps: frames per second of the clips, which functions see as `samples[i].meta["fps"]`.

        Raises:
            RewardError: a user-defined function that is called in this process failed.
        """
        if clips.dtype != torch.uint8 or clips.ndim != 5 or len(clips) != len(rows):
            raise ValueError(
                f"clips must be uint8 [{len(rows)}, 3, T, H, W] for {len(rows)} rows; got {clips.dtype} {list(clips.shape)}"
            )
        samples = [replace(row, meta={**row.meta, "fps": fps}) for row in rows]
        pixels = clips.contiguous().numpy()
        built_in = [name for name in self._here if name in BUILT_IN]
        here = self._call_here([name for name in self._here if name not in BUILT_IN], pixels, samples)
        futures = [self._thread.submit(self._call_own, pixels, samples)] if self._own else []
        if built_in:
            futures.append(self._built_in.submit(self._call_here, built_in, pixels, samples))
        if self._service is not None:
            # This copies the latents, so the caller may modify its tensor.
            sent = pixels if self.config.media == "video" else latents.detach().to("cpu", torch.float16).numpy()
            prompts = [row.prompt for row in rows]
            futures.append(run_in_background(partial(self._service.score, sent, prompts, fps, name_clips(rows))))
        return Pending(self.config, self.labels, len(rows), here, futures)

    def _call_here(self, names: Sequence[str], clips: NDArray[np.uint8], samples: Sequence[WorldRow]) -> Values:
        return {self._label[name]: call_in_process(name, self._here[name], clips, samples) for name in names}

    def _call_own(self, clips: NDArray[np.uint8], samples: list[WorldRow]) -> Values:
        subject = name_clips(samples)
        calls = [RewardCall(number, (clips, samples), subject) for number in range(len(self._own))]
        results = self._pool.run(calls)
        return {self._label[name]: result.score for name, result in zip(self._own, results, strict=True)}


def open_scorer(config: WorldRewardConfig) -> ClipScorer:
    """Create the scorer for the configured rewards. This imports user code, but sends no request.

    Raises:
        ConfigError: no reward is configured, a function cannot be found or called, or the service's URLs are missing.
    """
    if not config.functions and not config.services:
        raise ConfigError("no reward is configured; set reward.functions, such as { follow = 1.0 }, or reward.services")
    check_functions(config.functions, config.options)
    return ClipScorer(config)


def run_in_background(call: Callable[[], Values]) -> Future[Values]:
    """Run `call` in a daemon thread, so that the process can exit without waiting for a slow service; return its future."""
    future: Future[Values] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001  raised when the result is requested
            future.set_exception(error)

    threading.Thread(target=run, name="reward service", daemon=True).start()
    return future


def call_in_process(
    name: str, function: Callable[..., Any], clips: NDArray[np.uint8], samples: Sequence[WorldRow]
) -> list[float]:
    """Call a function in this process and return its scores.

    Built-in functions are called clip by clip, because a large clip takes gigabytes as float32.
    """
    size = 1 if name in BUILT_IN else len(samples)
    scores: list[float] = []
    for first in range(0, len(samples), size):
        arguments = (clips[first : first + size], samples[first : first + size])
        subject = f'reward "{name}", {name_clips(arguments[1])}:'
        try:
            result = function(*arguments)
        except DsReasonError:
            raise
        except Exception as error:
            raise RewardError(f"{subject} {describe_error(error)}") from error
        try:
            scores += check_scores(result, arguments)[0]
        except ValueError as error:
            raise RewardError(f"{subject} {error}") from None
    return scores


def name_clips(rows: Sequence[WorldRow]) -> str:
    """Describe the clips for messages, such as `clips of "train.txt:1" to "train.txt:4"`."""
    first, last = rows[0].id, rows[-1].id
    return f'clip of "{first}"' if len(rows) == 1 else f'clips of "{first}" to "{last}"'
