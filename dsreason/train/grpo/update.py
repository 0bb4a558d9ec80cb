"""One optimizer step of GRPO: rollouts → micro-batches → log-probabilities → loss → gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from deepspeed import DeepSpeedEngine
from torch import Tensor

from dsreason.config.schema_grpo import GRPOConfig
from dsreason.data.chat import Encoder
from dsreason.data.micro_batches import align_micro_batches, cut_by_count, cut_by_tokens
from dsreason.data.types import Batch
from dsreason.losses.kl import k3
from dsreason.losses.objective import objective_of
from dsreason.losses.policy import GlobalCounts
from dsreason.runtime.reference import ReferencePolicy
from dsreason.runtime.world import World, gather_objects
from dsreason.train.grpo.mismatch import Mismatch, metrics_of, mismatches, tally, worst
from dsreason.train.grpo.rollouts import Rollout, flatten, rollouts_of, training_sample


@dataclass(frozen=True)
class Part:
    """The rollouts of one optimizer step on this rank, cut into micro-batches, with what is known before the step.

    Every rank has as many micro-batches, with the same kinds of media.
    """

    rollouts: list[Rollout]
    batches: list[Batch]
    old_logprobs: list[Tensor] | None = None
    """Of the policy that sampled, by micro-batch; None: the policy is still the same."""
    ref_logprobs: list[Tensor] | None = None
    """Of the reference, by micro-batch; None where there is no KL."""


@dataclass
class Update:
    """What a step found out, over all ranks."""

    metrics: dict[str, float]
    worst: list[Mismatch] = field(default_factory=list)
    """Completions whose log-probabilities differ most between engine and trainer."""


def cut(rollouts: list[Rollout], config: GRPOConfig, encoder: Encoder) -> Part:
    """The rollouts as micro-batches. Collective."""
    samples = [training_sample(rollout, i) for i, rollout in enumerate(rollouts)]
    if config.train.max_tokens_per_micro_batch is None:
        groups = cut_by_count(samples, config.train.micro_batch_size or 1)
    else:
        groups = cut_by_tokens(samples, config.train.max_tokens_per_micro_batch)
    return Part(rollouts, align_micro_batches(groups, encoder, gather_objects))


@torch.no_grad()
def present_logprobs(
    engine: DeepSpeedEngine, batches: Sequence[Batch], temperature: float, banned_ids: Tensor
) -> list[Tensor]:
    """Log-probabilities of the weights that the engine holds now, by micro-batch. Collective."""
    return [engine(batch.to(engine.device), temperature, banned_ids) for batch in batches]


def add_fixed_logprobs(
    parts: list[Part],
    engine: DeepSpeedEngine,
    reference: ReferencePolicy | None,
    config: GRPOConfig,
    banned_ids: Tensor,
) -> list[Part]:
    """The parts with what must be measured before the first of their steps. Collective."""
    temperature = config.rollout.temperature

    def measure() -> list[list[Tensor]]:
        return [present_logprobs(engine, part.batches, temperature, banned_ids) for part in parts]

    olds: Sequence[list[Tensor] | None] = [None] * len(parts)
    refs: Sequence[list[Tensor] | None] = [None] * len(parts)
    if len(parts) > 1:  # with one step alone the policy that sampled is the one that is trained
        olds = measure()
    if reference is not None:
        with reference.in_place():
            refs = measure()
    return [Part(p.rollouts, p.batches, old, ref) for p, old, ref in zip(parts, olds, refs, strict=True)]


def accumulate_gradients(
    engine: DeepSpeedEngine, part: Part, config: GRPOConfig, world: World, banned_ids: Tensor
) -> Update:
    """Forward and backward of every micro-batch; the gradient is that of the global batch, however it was cut."""
    objective = objective_of(config.grpo)
    counts = GlobalCounts(
        num_tokens=sum(gather_objects(sum(len(rollout.completion.ids) for rollout in part.rollouts))),
        num_sequences=sum(gather_objects(len(part.rollouts))),
        max_length=config.rollout.max_completion_length,
    )
    sums = {"train/loss": 0.0, "policy/entropy": 0.0, "policy/clip_fraction": 0.0}
    if part.ref_logprobs is not None:
        sums["policy/kl"] = 0.0
    found: list[Mismatch] = []
    for i, batch in enumerate(part.batches):  # every rank runs the same number: forwards are collectives
        last = i == len(part.batches) - 1
        logprobs, entropy = engine(batch.to(engine.device), config.rollout.temperature, banned_ids, True)
        flat = flatten(batch, part.rollouts, engine.device)
        old = logprobs.detach() if part.old_logprobs is None else part.old_logprobs[i]
        ref = None if part.ref_logprobs is None else part.ref_logprobs[i]
        correction = None
        if objective.correction is not None:
            correction = objective.correction(old - flat.rollout_logprobs, flat.sequence)
        result = objective.loss(
            logprobs,
            old,
            flat.advantages,
            flat.sequence,
            counts=counts,
            correction=correction,
            penalty=objective.penalty(logprobs, ref, old, entropy),
        )
        engine.set_gradient_accumulation_boundary(last)
        # DeepSpeed averages gradients over ranks; the loss is a share of the global one already, so undo that.
        engine.backward(result.loss * world.size, scale_wrt_gas=False)
        if not last:
            engine.step()
        sums["train/loss"] += result.loss.item()
        sums["policy/clip_fraction"] += float(result.clipped.sum())
        sums["policy/entropy"] += float(entropy.detach().sum())
        if ref is not None:
            sums["policy/kl"] += float(k3(logprobs.detach(), ref).sum())
        found += mismatches(rollouts_of(batch, part.rollouts), old)
    everywhere = gather_objects((sums, tally(found), worst(found)))
    totals = {name: sum(part_sums[name] for part_sums, *_ in everywhere) for name in sums}
    per_token = {name: value / max(counts.num_tokens, 1) for name, value in totals.items() if name != "train/loss"}
    metrics = {"train/loss": totals["train/loss"], **per_token, **metrics_of([part for _, part, _ in everywhere])}
    return Update(metrics, worst([one for *_, part in everywhere for one in part]))
