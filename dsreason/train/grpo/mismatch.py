"""Differences between the log-probabilities that the rollout engine and the trainer compute for the same tokens."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from dsreason.config.schema_grpo import RolloutConfig
from dsreason.errors import MismatchError
from dsreason.files.step_names import format_step
from dsreason.losses.kl import k3
from dsreason.train.common.answers import get_modality, write_rows
from dsreason.train.grpo.rollouts import Rollout

log = logging.getLogger(__name__)

NUM_WORST = 8


@dataclass(frozen=True)
class Mismatch:
    """The mismatch between rollout engine and trainer in one completion.

    `kl` is the k3 estimate of KL(engine ‖ trainer), summed over the tokens; `largest` is the largest |Δ log-probability|.

    Example: `Mismatch("7", "video", "left", num_tokens=2, kl=2.1e-13, largest=9.5e-7, at=1)`.
    """

    id: str
    modality: str
    completion: str
    num_tokens: int
    kl: float
    largest: float
    at: int
    """Index of the sampled token with the largest difference."""

    @property
    def mean(self) -> float:
        return self.kl / max(self.num_tokens, 1)


def measure_mismatches(rollouts: Sequence[Rollout], logprobs: Tensor) -> list[Mismatch]:
    """Measure the mismatch of each rollout in a micro-batch.

    Args:
        logprobs: the trainer's log-probabilities of the sampled tokens, `[N]`, in the order of the rollouts.
    """
    results, start = [], 0
    logprobs = logprobs.double().cpu()
    for rollout in rollouts:
        engine = torch.tensor(rollout.completion.logprobs, dtype=torch.float64)
        trainer = logprobs[start : start + len(engine)]
        start += len(engine)
        differences = (trainer - engine).abs()
        results.append(
            Mismatch(
                id=rollout.prompt.sample.id,
                modality=get_modality(rollout.prompt.sample),
                completion=rollout.completion.text,
                num_tokens=len(engine),
                kl=float(k3(engine, trainer).sum()),
                largest=float(differences.max()) if len(engine) else 0.0,
                at=int(differences.argmax()) if len(engine) else 0,
            )
        )
    return results


def compute_mismatch_metrics(mismatches: Sequence[Mismatch]) -> dict[str, float]:
    """Compute `mismatch/kl` (mean over tokens) and `mismatch/max_abs_logprob`, overall and per modality."""
    by_modality = {
        f"/{name}": [mismatch for mismatch in mismatches if mismatch.modality == name]
        for name in sorted({mismatch.modality for mismatch in mismatches})
    }
    metrics = {}
    for suffix, group in {**by_modality, "": mismatches}.items():
        num_tokens = sum(mismatch.num_tokens for mismatch in group)
        metrics[f"mismatch/kl{suffix}"] = sum(mismatch.kl for mismatch in group) / max(num_tokens, 1)
        metrics[f"mismatch/max_abs_logprob{suffix}"] = max((mismatch.largest for mismatch in group), default=0.0)
    return metrics


def drop_most_texts(mismatches: Sequence[Mismatch]) -> list[Mismatch]:
    """Drop the texts of all completions except this rank's worst, so that the ranks exchange less data.

    The completions that are worst over all ranks keep their texts, because they are also among the worst on their own rank.
    """
    worst_ids = set(map(id, find_worst(mismatches)))
    return [mismatch if id(mismatch) in worst_ids else replace(mismatch, completion="") for mismatch in mismatches]


def find_worst(mismatches: Sequence[Mismatch]) -> list[Mismatch]:
    """Return the `NUM_WORST` completions with the largest mean KL per token, worst first; NaN counts as infinite."""
    return sorted(
        mismatches, key=lambda mismatch: math.inf if math.isnan(mismatch.mean) else mismatch.mean, reverse=True
    )[:NUM_WORST]


def check(
    metrics: dict[str, float], mismatches: Sequence[Mismatch], config: RolloutConfig, step: int, folder: Path | None
) -> None:
    """Log a warning or raise if the mean KL per token is too large, and write the worst completions to `folder/step_N.jsonl`.

    Nothing is checked if top_p or top_k is set, because the engine then renormalises its probabilities over fewer tokens.

    Args:
        folder: folder for the worst completions; if None, no file is written.

    Raises:
        MismatchError: `mismatch/kl` exceeds `rollout.mismatch_stop` or is NaN.
    """
    kl = metrics["mismatch/kl"]
    if kl <= config.mismatch_warn or not config.samples_all_tokens:
        return
    worst_mismatches, hint = find_worst(mismatches), ""
    if folder is not None:
        file = folder / f"{format_step(step)}.jsonl"
        write_rows(file, map(vars, worst_mismatches))
        hint = f"; the worst completions are in {file}"
    names = ", ".join(
        f"{mismatch.id!r} ({mismatch.modality}, {mismatch.mean:.3g})" for mismatch in worst_mismatches[:3]
    )
    message = f"step {step}: mismatch/kl between engine and trainer is {kl:.3g}, worst in samples {names}{hint}"
    if not kl <= config.mismatch_stop:
        raise MismatchError(
            f"{message}; the maximum is rollout.mismatch_stop ({config.mismatch_stop}), so the engine does not sample from the "
            "trained policy; check mismatch/kl/<modality>, and check that precision, processor and positions are the same in both"
        )
    log.warning("%s; it exceeds rollout.mismatch_warn (%s)", message, config.mismatch_warn)
