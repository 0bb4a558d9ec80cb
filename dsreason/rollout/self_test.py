"""The start-up self-test: weights are perturbed, put to sleep, woken and synced, and the log-probabilities must come back.

A sync or a sleep that loses something shows here, before the first step, and not as rewards that never rise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dsreason.data.chat import EncodedPrompt
from dsreason.job.ranks import gather_objects
from dsreason.problems import listed
from dsreason.rollout.protocol import Completion, RolloutEngine, Sampling, SyncError, TensorFingerprints
from dsreason.rollout.weight_sync import changed

REAL, PERTURBED = -1, -2
"""Versions that no step has."""
TOLERANCES = {torch.float32: 1e-4}
COARSE_TOLERANCE = 0.1
"""Of a log-probability. The same weights, prompts and kernels should give the very same one. Where one does not, a logit
that is rounded otherwise moves by 1e-6 in float32 and, between 8 and 16, by 0.06 in bfloat16."""


class Round(NamedTuple):
    """What was seen while the engine was awake once."""

    completions: list[Completion]
    """This rank's, greedy, one a prompt."""
    tensors: TensorFingerprints


def self_test(
    engine: RolloutEngine,
    weights: Callable[[], Iterator[tuple[str, Tensor]]],
    prompts: Sequence[EncodedPrompt],
    *,
    max_completion_length: int,
) -> Round:
    """Three rounds of wake, sync, generate and sleep: the policy's `weights`, perturbed ones, the policy's again.

    Where the engine keeps its weights, a fourth round wakes and generates without a sync. Collective: every rank calls
    it, with as many prompts. Each is completed alone, for one may hide what another shows: give one with media and one
    without. The engine is left asleep with the policy's weights, under a version that no step asks for. SyncError on
    every rank where any finds a fault; it names the tensors that did not take the perturbed values, or did not come back.
    Returns the first round.
    """
    sampling = Sampling(temperature=0, max_completion_length=max_completion_length)

    def run(version: int, sent: Iterator[tuple[str, Tensor]] | None) -> Round:
        engine.wake()
        if sent is not None:
            engine.sync(sent, version)
        completions = [engine.generate([prompt], sampling, version=version)[0] for prompt in prompts]
        tensors = engine.fingerprints()
        engine.sleep()
        return Round(completions, tensors)

    tolerance = TOLERANCES.get(engine.dtype, COARSE_TOLERANCE)
    real = run(REAL, weights())
    moved = run(PERTURBED, perturbed(weights()))
    raise_on_all_ranks(unmoved(real, moved, tolerance))
    restored = run(REAL, weights())
    raise_on_all_ranks(not_restored(real, restored, tolerance, "after perturbing, sleeping, waking and syncing"))
    if engine.keeps_weights:
        restored = run(REAL, None)
        raise_on_all_ranks(not_restored(real, restored, tolerance, "after sleeping and waking without a sync"))
    return real


def perturbed(weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Half of every value plus 0.01: tensors of zeros or ones change as well, and activations stay finite."""
    for name, tensor in weights:
        yield name, tensor * 0.5 + 0.01


def unmoved(real: Round, moved: Round, tolerance: float) -> str | None:
    """Return what is wrong where the perturbed weights did not make themselves felt."""
    before, after = real.tensors.parameters, moved.tensors.parameters
    different = set(changed(before, after))
    if stuck := [name for name in before if name not in different and before[name][0] > 0]:
        return f"a sync of changed weights left {len(stuck)} of {len(before)} tensors unchanged: {listed(stuck)}"
    if largest_difference(real.completions, moved.completions) <= tolerance:
        return "every tensor took changed values, but completions stay the same: the engine does not compute with them"
    return None


def not_restored(real: Round, again: Round, tolerance: float, when: str) -> str | None:
    """Return what is wrong where the policy's weights are there again, and not all is as it was."""
    pairs = zip(real.tensors, again.tensors, strict=True)
    if wrong := [name for before, after in pairs for name in changed(before, after)]:
        return f"{when}, {len(wrong)} tensors changed: {listed(wrong)}"
    difference = largest_difference(real.completions, again.completions)
    if difference <= tolerance:
        return None
    by = "completions differ" if difference == math.inf else f"log-probabilities differ by {difference:.2g}"
    return f"{when}, {by}, although every parameter and buffer is unchanged: the engine does not compute with them"


def largest_difference(first: Sequence[Completion], second: Sequence[Completion]) -> float:
    """Largest |difference| of two rounds' log-probabilities; infinite where tokens differ or one is NaN."""
    if [completion.ids for completion in first] != [completion.ids for completion in second]:
        return math.inf
    pairs = zip(first, second, strict=True)
    differences = [abs(x - y) for a, b in pairs for x, y in zip(a.logprobs, b.logprobs, strict=True)]
    return max(differences, default=0.0) if not any(map(math.isnan, differences)) else math.inf


def raise_on_all_ranks(problem: str | None) -> None:
    """SyncError on every rank where any has a problem."""
    by_rank = gather_objects(problem)
    texts = {text: [rank for rank, rank_text in enumerate(by_rank) if rank_text == text] for text in by_rank if text}
    if texts:
        problems = "; ".join(f"{text} (rank {', '.join(map(str, ranks))})" for text, ranks in texts.items())
        raise SyncError(f"self-test of the rollout engine: {problems}")
