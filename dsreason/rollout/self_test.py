"""Self-test at start-up: perturb the weights, sleep, wake, sync, and check that the log-probabilities are restored.

The test detects a faulty sync or sleep before the first step. Without it, the only symptom would be that rewards never rise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dsreason.data.chat import EncodedPrompt
from dsreason.job.ranks import gather_objects
from dsreason.problems import join_first
from dsreason.rollout.protocol import Completion, RolloutEngine, Sampling, SyncError, TensorFingerprints
from dsreason.rollout.weight_sync import find_changed

REAL, PERTURBED = -1, -2
"""Version numbers of the weights in the self-test, which no training step uses."""
TOLERANCES = {torch.float32: 1e-4}
COARSE_TOLERANCE = 0.1
"""Tolerance for differences between log-probabilities. The same weights, prompts and kernels should reproduce the values exactly;
if they do not, rounding changes a logit by 1e-6 in float32, and by 0.06 in bfloat16 if the logit is between 8 and 16."""


class Round(NamedTuple):
    """Results of one round, in which the engine wakes, generates and sleeps."""

    completions: list[Completion]
    """Greedy completions of this rank's prompts, one per prompt."""
    tensors: TensorFingerprints


def run_self_test(
    engine: RolloutEngine,
    weights: Callable[[], Iterator[tuple[str, Tensor]]],
    prompts: Sequence[EncodedPrompt],
    *,
    max_completion_length: int,
) -> Round:
    """Run three rounds of wake, sync, generate and sleep: with the policy's weights, perturbed weights, and the policy's again.

    If the engine keeps its weights during sleep, a fourth round omits the sync. Afterwards, the engine is asleep and holds the
    policy's weights under a version that no step requests. All ranks must call this function together, with the same number of
    prompts.

    Args:
        weights: function that returns a new iterator over the policy's full weights.
        prompts: prompts to complete, which should include one with media and one without. Each prompt is completed separately,
            to find faults that affect only one kind of prompt.

    Returns:
        The first round.

    Raises:
        SyncError: at least one rank found a fault; all ranks raise the error. The message names the tensors that did not receive
            the perturbed values or were not restored.
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
    moved = run(PERTURBED, iter_perturbed(weights()))
    raise_on_all_ranks(find_unmoved(real, moved, tolerance))
    restored = run(REAL, weights())
    raise_on_all_ranks(find_not_restored(real, restored, tolerance, "after perturbing, sleeping, waking and syncing"))
    if engine.keeps_weights:
        restored = run(REAL, None)
        raise_on_all_ranks(find_not_restored(real, restored, tolerance, "after sleeping and waking without a sync"))
    return real


def iter_perturbed(weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor times 0.5 plus 0.01, which changes even zeros and ones, but keeps activations finite."""
    for name, tensor in weights:
        yield name, tensor * 0.5 + 0.01


def find_unmoved(real: Round, moved: Round, tolerance: float) -> str | None:
    """Return an error message if a sync of perturbed weights changed not every tensor, or no completion; otherwise None."""
    before, after = real.tensors.parameters, moved.tensors.parameters
    different = set(find_changed(before, after))
    if stuck := [name for name in before if name not in different and before[name][0] > 0]:
        return f"a sync of changed weights left {len(stuck)} of {len(before)} tensors unchanged: {join_first(stuck)}"
    if compute_largest_difference(real.completions, moved.completions) <= tolerance:
        return "every tensor has the changed values, but the completions are the same: the engine does not use these tensors"
    return None


def find_not_restored(real: Round, again: Round, tolerance: float, when: str) -> str | None:
    """Return an error message if tensors or completions differ after the policy's weights were restored; otherwise None."""
    pairs = zip(real.tensors, again.tensors, strict=True)
    if different := [name for before, after in pairs for name in find_changed(before, after)]:
        return f"{when}, {len(different)} tensors changed: {join_first(different)}"
    difference = compute_largest_difference(real.completions, again.completions)
    if difference <= tolerance:
        return None
    symptom = "completions differ" if difference == math.inf else f"log-probabilities differ by {difference:.2g}"
    return f"{when}, {symptom}, although every parameter and buffer is unchanged: the engine does not use these tensors"


def compute_largest_difference(first: Sequence[Completion], second: Sequence[Completion]) -> float:
    """Return the largest absolute difference between log-probabilities; infinity if tokens differ or a value is NaN."""
    if [completion.ids for completion in first] != [completion.ids for completion in second]:
        return math.inf
    pairs = zip(first, second, strict=True)
    differences = [abs(x - y) for a, b in pairs for x, y in zip(a.logprobs, b.logprobs, strict=True)]
    return max(differences, default=0.0) if not any(map(math.isnan, differences)) else math.inf


def raise_on_all_ranks(problem: str | None) -> None:
    """Raise SyncError on every rank if any rank has a problem."""
    problem_by_rank = gather_objects(problem)
    ranks_by_problem = {
        text: [rank for rank, rank_text in enumerate(problem_by_rank) if rank_text == text]
        for text in problem_by_rank
        if text
    }
    if ranks_by_problem:
        problems = "; ".join(f"{text} (rank {', '.join(map(str, ranks))})" for text, ranks in ranks_by_problem.items())
        raise SyncError(f"the self-test of the rollout engine failed: {problems}")
