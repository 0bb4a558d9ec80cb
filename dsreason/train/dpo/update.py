"""A DPO optimizer step (pairs → log-probabilities → loss → gradients) and its metrics."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import torch
from deepspeed import DeepSpeedEngine
from torch import Tensor

from dsreason.config.schema_dpo import PreferenceConfig
from dsreason.engine.engine import add_gradient
from dsreason.engine.router import RouterTerm
from dsreason.job.ranks import World, gather_objects, share_errors
from dsreason.losses.preference import Pairs, PairSettings, build_pairs, compute_preference_loss
from dsreason.phases import record_phase
from dsreason.train.dpo.loader import PairMicroBatch, StepPairs
from dsreason.train.dpo.reference import PairReference

WINDOW = 20
"""Number of recent steps to watch; the later half of them is compared with the earlier half."""


@dataclass
class Baseline:
    """The mean reward (β · log-ratio) of the answers in all previous steps, which BCO regards as neutral.

    The current step is excluded, because its gradient would otherwise depend on the order of its micro-batches.
    """

    total: float = 0.0
    count: int = 0

    @property
    def mean(self) -> float:
        return self.total / max(self.count, 1)

    def add(self, pairs: Pairs, beta: float) -> None:
        """Add the rewards of a step's pairs; if any of them is not finite, add nothing."""
        rewards = beta * torch.cat([pairs.chosen_ratio, pairs.rejected_ratio])
        if bool(rewards.isfinite().all()):
            self.total = math.fsum([self.total, *rewards.tolist()])
            self.count += len(rewards)


def build_settings(config: PreferenceConfig, baseline: Baseline) -> PairSettings:
    return PairSettings(config.beta, config.label_smoothing, baseline.mean)


def compute_reference_logprobs(
    engine: DeepSpeedEngine, reference: PairReference, micro_batches: Sequence[PairMicroBatch], part: str
) -> list[Tensor]:
    """Return the reference log-probabilities, `[P, 2]` per micro-batch. Collective.

    An error on any rank is raised on all ranks.
    """
    with record_phase("ref_logprobs"), share_errors(), torch.no_grad():
        return [reference.compute_logprobs(engine, micro_batch, part) for micro_batch in micro_batches]


def accumulate_gradients(
    engine: DeepSpeedEngine,
    batches: StepPairs,
    reference: PairReference,
    config: PreferenceConfig,
    world: World,
    baseline: Baseline,
) -> tuple[Pairs, dict[str, float]]:
    """Run the forward and backward passes of all micro-batches. Collective.

    The gradient does not depend on how the global batch is divided.

    Returns:
        The pairs of all ranks, on the CPU, and, for a mixture of experts, metrics of the routing.
    """
    router = RouterTerm(engine.module, batches.num_tokens)
    micro_batches, settings = batches.parts, build_settings(config, baseline)
    all_pairs = []
    # All ranks have the same number of micro-batches, because the forward pass is collective.
    for i, (micro_batch, ref) in enumerate(
        zip(micro_batches, compute_reference_logprobs(engine, reference, micro_batches, "training"), strict=True)
    ):
        with record_phase("forward"):
            pairs = build_pairs(engine(micro_batch.batch.to(engine.device)), micro_batch.lengths.to(engine.device), ref)
            loss = compute_preference_loss(
                pairs, settings, config.weights, config.sft, num_pairs=max(1, batches.num_samples)
            )
        total = router.add_to(loss.float(), micro_batch.batch)
        add_gradient(engine, total, world.size, last=i == len(micro_batches) - 1)
        all_pairs.append(pairs)
    return gather_pairs(all_pairs, world), router.compute_metrics(world)


def gather_pairs(local_pairs: Sequence[Pairs], world: World) -> Pairs:
    """Gather the pairs of all ranks, detached and on the CPU. Collective."""
    local_values = [
        torch.cat([getattr(pairs, name).detach().double().cpu() for pairs in local_pairs]).tolist() for name in NAMES
    ]
    ranks = world.select_group_values(gather_objects(local_values))
    columns = [torch.tensor(sum((rank[i] for rank in ranks), []), dtype=torch.float64) for i in range(len(NAMES))]
    return Pairs(*columns)


NAMES = [item.name for item in fields(Pairs)]


def compute_pair_metrics(pairs: Pairs, config: PreferenceConfig, settings: PairSettings) -> dict[str, float]:
    """Compute metrics as means over the pairs; at least one pair is required.

    `accuracy` is the fraction of pairs with a positive margin, in which the policy prefers the chosen answer more strongly
    than the reference does. `ranking` is the fraction of pairs in which the chosen answer is more probable than the rejected
    one. `chosen` and `rejected` are log-ratios.
    """
    count = len(pairs.chosen)
    total = compute_preference_loss(pairs, settings, config.weights, config.sft, num_pairs=count)
    preference = compute_preference_loss(pairs, settings, config.weights, 0.0, num_pairs=count)
    return {
        "total": float(total),
        "loss": float(preference),
        "margin": float((settings.beta * pairs.margin).mean()),
        "accuracy": float((pairs.margin > 0).double().mean()),
        "ranking": float((pairs.chosen > pairs.rejected).double().mean()),
        "chosen": float(pairs.chosen_ratio.mean()),
        "rejected": float(pairs.rejected_ratio.mean()),
        "chosen_nll": float((-pairs.chosen / pairs.chosen_length).mean()),
        "chosen_length": float(pairs.chosen_length.double().mean()),
        "rejected_length": float(pairs.rejected_length.double().mean()),
    }


@dataclass
class ChosenWatch:
    """A detector for a known failure of preference losses: both answers become less probable, the rejected one faster."""

    recent: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=WINDOW))
    """(Mean log-ratio of the chosen answers, accuracy) for each recent step."""
    has_warned: bool = False

    def record(self, chosen: float, accuracy: float) -> str | None:
        """Record a step; return a warning the first time that `chosen` falls while `accuracy` rises over the window."""
        if not math.isfinite(chosen):
            return None
        self.recent.append((chosen, accuracy))
        if self.has_warned or len(self.recent) < WINDOW:
            return None
        half = WINDOW // 2
        earlier, later = (
            [sum(values) / half for values in zip(*steps, strict=True)]
            for steps in (list(self.recent)[:half], list(self.recent)[half:])
        )
        if not (later[0] < min(earlier[0], 0.0) and later[1] > earlier[1]):
            return None
        self.has_warned = True
        return (
            f"dpo/chosen fell from {earlier[0]:.3f} to {later[0]:.3f} while dpo/accuracy rose from {earlier[1]:.1%} to "
            f"{later[1]:.1%} (means of {half} steps): the chosen answers also become less probable, in favour of answers that "
            "are in no row; raise dpo.sft_weight (0.2 to 1 is usual), raise dpo.beta, or lower optim.lr"
        )
