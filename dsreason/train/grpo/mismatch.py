"""Where the engine that samples and the trainer give the same tokens different probabilities."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from dsreason.config.schema_grpo import RolloutConfig
from dsreason.errors import DsReasonError
from dsreason.files.step_names import step_name
from dsreason.losses.kl import k3
from dsreason.train.common.answers import modality_of, write_rows
from dsreason.train.grpo.rollouts import Rollout

log = logging.getLogger(__name__)

NUM_WORST = 8


class MismatchError(DsReasonError):
    """The engine does not sample from the policy that is trained."""


@dataclass(frozen=True)
class Mismatch:
    """Of one completion: the sum over its tokens of KL(engine ‖ trainer) by k3, and the largest |Δ log-probability|.

    Example: `Mismatch("7", "video", "left", num_tokens=2, kl=2.1e-13, largest=9.5e-7, at=1)`.
    """

    id: str
    modality: str
    completion: str
    num_tokens: int
    kl: float
    largest: float
    at: int
    """Number of the sampled token that `largest` is of."""

    @property
    def mean(self) -> float:
        return self.kl / max(self.num_tokens, 1)


def mismatches(rollouts: Sequence[Rollout], logprobs: Tensor) -> list[Mismatch]:
    """One for each rollout of a micro-batch, whose tokens have the trainer's `logprobs` `[N]`, rollout after rollout."""
    mismatches, start = [], 0
    logprobs = logprobs.double().cpu()
    for rollout in rollouts:
        engine = torch.tensor(rollout.completion.logprobs, dtype=torch.float64)
        trainer = logprobs[start : start + len(engine)]
        start += len(engine)
        apart = (trainer - engine).abs()
        mismatches.append(
            Mismatch(
                id=rollout.prompt.sample.id,
                modality=modality_of(rollout.prompt.sample),
                completion=rollout.completion.text,
                num_tokens=len(engine),
                kl=float(k3(engine, trainer).sum()),
                largest=float(apart.max()) if len(engine) else 0.0,
                at=int(apart.argmax()) if len(engine) else 0,
            )
        )
    return mismatches


def metrics_of(found: Sequence[Mismatch]) -> dict[str, float]:
    """`mismatch/kl` (mean over tokens) and `mismatch/max_abs_logprob` of every rank's completions, both also by modality."""
    parts = {
        f"/{name}": [mismatch for mismatch in found if mismatch.modality == name]
        for name in sorted({m.modality for m in found})
    }
    metrics = {}
    for suffix, ones in {**parts, "": found}.items():
        num_tokens = sum(mismatch.num_tokens for mismatch in ones)
        metrics[f"mismatch/kl{suffix}"] = sum(mismatch.kl for mismatch in ones) / max(num_tokens, 1)
        metrics[f"mismatch/max_abs_logprob{suffix}"] = max((mismatch.largest for mismatch in ones), default=0.0)
    return metrics


def with_few_texts(found: Sequence[Mismatch]) -> list[Mismatch]:
    """For other ranks: only this rank's worst can be among the worst of all, so only they keep their text."""
    worst_ids = set(map(id, worst(found)))
    return [mismatch if id(mismatch) in worst_ids else replace(mismatch, completion="") for mismatch in found]


def worst(found: Sequence[Mismatch]) -> list[Mismatch]:
    """Those that differ most on average, the worst first; NaN comes before all others."""
    return sorted(found, key=lambda one: math.inf if math.isnan(one.mean) else one.mean, reverse=True)[:NUM_WORST]


def check(
    metrics: dict[str, float], found: Sequence[Mismatch], config: RolloutConfig, step: int, folder: Path | None
) -> None:
    """Warn or stop on the mean over tokens, and write the worst completions of `found` to `folder/step_N.jsonl`.

    Not with top_p or top_k: the engine's probabilities are then renormalised over the tokens that remain.

    Raises:
        MismatchError: `mismatch/kl` is above `rollout.mismatch_stop`, or not a number.
    """
    kl = metrics["mismatch/kl"]
    if kl <= config.mismatch_warn or not config.samples_all_tokens:
        return
    worst_ones, place = worst(found), ""
    if folder is not None:
        file = folder / f"{step_name(step)}.jsonl"
        write_rows(file, map(vars, worst_ones))
        place = f"; the worst are in {file}"
    names = ", ".join(f"{mismatch.id!r} ({mismatch.modality}, {mismatch.mean:.3g})" for mismatch in worst_ones[:3])
    text = f"step {step}: mismatch/kl is {kl:.3g} between engine and trainer, worst in samples {names}{place}"
    if not kl <= config.mismatch_stop:
        raise MismatchError(
            f"{text}. That is above rollout.mismatch_stop ({config.mismatch_stop}): the completions are not those of the policy "
            "that is trained; look at mismatch/kl/<modality>, and whether precision, processor and positions of both sides agree"
        )
    log.warning("%s (rollout.mismatch_warn is %s)", text, config.mismatch_warn)
