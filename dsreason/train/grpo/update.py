"""A GRPO optimizer step: rollouts → micro-batches → log-probabilities → loss → gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from deepspeed import DeepSpeedEngine
from torch import Tensor

from dsreason.config.schema_grpo import GRPOConfig
from dsreason.data.chat import Encoder
from dsreason.data.collate import group_by_parent, join_parent
from dsreason.data.micro_batches import align_micro_batches, cut_samples
from dsreason.engine.engine import add_gradient
from dsreason.engine.reference import KLReference
from dsreason.engine.router import RouterTerm
from dsreason.job.part_of import WHOLE, PartOf
from dsreason.job.ranks import World, gather_objects
from dsreason.losses.distillation import compute_distillation_advantages
from dsreason.losses.kl import k3
from dsreason.losses.objective import build_objective
from dsreason.losses.policy import GlobalCounts, LossInputs
from dsreason.phases import record_phase
from dsreason.train.grpo.mismatch import Mismatch, compute_mismatch_metrics, drop_most_texts, measure_mismatches
from dsreason.train.grpo.rollouts import Rollout, RolloutMicroBatch, build_training_sample, flatten
from dsreason.train.grpo.teacher import Teacher


def split_into_micro_batches(
    rollouts: Sequence[Rollout], config: GRPOConfig, encoder: Encoder, part: PartOf = WHOLE
) -> list[RolloutMicroBatch]:
    """Divide a step's rollouts into micro-batches. Collective.

    All ranks get the same number of micro-batches, each of which contains media if the model accepts them.

    Args:
        part: part of each row that this rank computes; ranks that compute rows together pass the same rollouts.
    """
    samples = [build_training_sample(rollout) for rollout in rollouts]
    if not config.shares_prompts:
        samples = [join_parent(sample) for sample in samples]
    groups = [group_by_parent(group) for group in cut_samples(samples, config)]
    batches = align_micro_batches(groups, encoder, gather_objects, packing=config.train.packing, part=part)
    cut_rollouts = [[sample.rollout for sample in group] for group in groups]
    cut_rollouts += [[]] * (len(batches) - len(groups))
    return [RolloutMicroBatch(*parts) for parts in zip(batches, cut_rollouts, strict=True)]


@torch.no_grad()
def compute_current_logprobs(
    engine: DeepSpeedEngine, micro_batches: Sequence[RolloutMicroBatch], temperature: float, banned_ids: Tensor
) -> list[Tensor]:
    """Compute log-probabilities under the engine's current weights, `[N]` per micro-batch. Collective."""
    return [engine(micro_batch.batch.to(engine.device), temperature, banned_ids) for micro_batch in micro_batches]


def add_fixed_logprobs(
    steps: Sequence[list[RolloutMicroBatch]],
    engine: DeepSpeedEngine,
    reference: KLReference | None,
    teacher: Teacher | None,
    config: GRPOConfig,
    banned_ids: Tensor,
) -> list[list[RolloutMicroBatch]]:
    """Add the log-probabilities under the old policy, the reference and the teacher, as far as the loss needs them. Collective.

    This must happen before the first optimizer step changes the policy.
    """

    def add_logprobs(add: Callable[[RolloutMicroBatch, Tensor], RolloutMicroBatch]) -> list[list[RolloutMicroBatch]]:
        completed_steps = []
        for step in steps:
            logprobs = compute_current_logprobs(engine, step, config.rollout.temperature, banned_ids)
            completed_steps.append(
                [add(micro_batch, values) for micro_batch, values in zip(step, logprobs, strict=True)]
            )
        return completed_steps

    if len(steps) > 1:  # with a single step, the policy has not changed since it sampled the tokens
        with record_phase("old_logprobs"):
            steps = add_logprobs(lambda micro_batch, values: replace(micro_batch, old_logprobs=values))
    if reference is not None:
        with record_phase("ref_logprobs"), reference.in_place():
            steps = add_logprobs(lambda micro_batch, values: replace(micro_batch, ref_logprobs=values))
    if teacher is not None:
        with record_phase("teacher_logprobs"):
            steps = [
                [
                    replace(micro_batch, teacher_logprobs=values)
                    for micro_batch, values in zip(step, teacher.compute_logprobs(step), strict=True)
                ]
                for step in steps
            ]
    return list(steps)


def gather_counts(micro_batches: Sequence[RolloutMicroBatch], config: GRPOConfig, world: World) -> GlobalCounts:
    """Return the sizes of the step's global batch. Collective."""
    lengths = [rollout.completion.num_sampled for micro_batch in micro_batches for rollout in micro_batch.rollouts]
    return GlobalCounts(
        num_tokens=sum(world.select_group_values(gather_objects(sum(lengths)))),
        num_sequences=sum(world.select_group_values(gather_objects(len(lengths)))),
        max_length=config.rollout.max_completion_length,
    )


def accumulate_gradients(
    engine: DeepSpeedEngine,
    micro_batches: Sequence[RolloutMicroBatch],
    config: GRPOConfig,
    world: World,
    banned_ids: Tensor,
) -> tuple[dict[str, float], list[Mismatch]]:
    """Run the forward and backward passes of all micro-batches. Collective.

    The gradient does not depend on how the global batch is divided.

    Returns:
        The metrics, and the mismatch between rollout engine and trainer for the completions on all ranks.
    """
    objective = build_objective(config.grpo)
    counts = gather_counts(micro_batches, config, world)
    router = RouterTerm(engine.module, counts.num_tokens)
    # Metric → one value per micro-batch. The values are read after the loop, because reading waits for the GPU.
    terms: dict[str, list[Tensor]] = {"train/loss": [], "policy/entropy": [], "policy/clip_fraction": []}
    terms |= {"policy/kl": []} if micro_batches[0].ref_logprobs is not None else {}
    terms |= {"distill/kl": []} if micro_batches[0].teacher_logprobs is not None else {}
    trainer_logprobs: list[Tensor] = []
    # All ranks have the same number of micro-batches, because the forward pass is collective.
    for i, micro_batch in enumerate(micro_batches):
        with record_phase("forward"):
            logprobs, entropy = engine(
                micro_batch.batch.to(engine.device), config.rollout.temperature, banned_ids, True
            )
        flat = flatten(micro_batch.rollouts, engine.device)
        old = logprobs.detach() if micro_batch.old_logprobs is None else micro_batch.old_logprobs
        correction = None
        if objective.correction is not None:
            correction = objective.correction(old - flat.rollout_logprobs, flat.sequence)
        penalty = objective.compute_penalty(logprobs, micro_batch.ref_logprobs, old, entropy)
        advantages = flat.advantages
        if micro_batch.teacher_logprobs is not None:
            teacher_advantages = compute_distillation_advantages(
                micro_batch.teacher_logprobs, old, flat.sequence, discount=config.distill.discount
            )
            advantages = advantages + config.distill.coef * teacher_advantages
        inputs = LossInputs(logprobs, old, advantages, flat.sequence, counts, correction, penalty)
        result = objective.loss(inputs)
        loss = router.add_to(result.loss, micro_batch.batch)
        add_gradient(engine, loss, world.size, last=i == len(micro_batches) - 1)
        terms["train/loss"].append(result.loss.detach())
        terms["policy/clip_fraction"].append(result.clipped.sum())
        terms["policy/entropy"].append(entropy.detach().sum())
        if micro_batch.ref_logprobs is not None:
            terms["policy/kl"].append(k3(logprobs.detach(), micro_batch.ref_logprobs).sum())
        if micro_batch.teacher_logprobs is not None:
            terms["distill/kl"].append((old - micro_batch.teacher_logprobs).sum())
        trainer_logprobs.append(old)
    sums = {name: sum(map(float, values)) for name, values in terms.items()}
    local_mismatches = [
        item
        for micro_batch, values in zip(micro_batches, trainer_logprobs, strict=True)
        for item in measure_mismatches(micro_batch.rollouts, values)
    ]
    ranks = world.select_group_values(gather_objects((sums, drop_most_texts(local_mismatches))))
    totals = {name: sum(rank_sums[name] for rank_sums, _ in ranks) for name in sums}
    all_mismatches = [mismatch for _, rank_mismatches in ranks for mismatch in rank_mismatches]
    per_token = {name: value / max(counts.num_tokens, 1) for name, value in totals.items() if name != "train/loss"}
    means = {"train/loss": totals["train/loss"], **per_token} | router.compute_metrics(world)
    return means | compute_mismatch_metrics(all_mismatches), all_mismatches
