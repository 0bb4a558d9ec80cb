"""The router loss for an optimizer step, and metrics that show how evenly a mixture of experts is used."""

from __future__ import annotations

import torch
from torch import Tensor

from dsreason.data.types import Batch
from dsreason.job.ranks import World, gather_objects
from dsreason.losses.router import compute_max_load, compute_routing
from dsreason.models.policy import Policy


class RouterTerm:
    """Router losses and loads of a step's micro-batches, weighted by their trained tokens; empty for a dense model.

    Args:
        num_tokens: number of trained tokens in the step, over all ranks and micro-batches.
    """

    def __init__(self, policy: Policy, num_tokens: int) -> None:
        self.policy = policy
        self.num_tokens = num_tokens
        self.parts: list[tuple[Tensor, Tensor]] = []
        """(loss, loads) of each micro-batch. They are read only after the last one, because reading waits for the GPU."""

    def add_to(self, loss: Tensor, batch: Batch) -> Tensor:
        """Return a micro-batch's loss plus its share of the router loss, taken from the forward pass that has just run."""
        output, weight = self.policy.router_output, self.policy.router_loss_weight
        if output is None:
            return loss
        with torch.set_grad_enabled(weight > 0):
            routing = compute_routing(
                output.logits, output.counted, output.num_tokens, self.policy.top_k, group=output.group
            )
        # A batch of padding has no share, but needs the same graph as the others, because ZeRO-3 compares graphs between ranks.
        share = routing.balance_loss * (len(batch.targets) / max(self.num_tokens, 1))
        if len(batch.targets):
            self.parts.append((share.detach(), routing.loads))
        return loss + weight * share if weight else loss

    def compute_metrics(self, world: World) -> dict[str, float]:
        """Return the mean balance loss and the largest load of any expert. Collective, unless the model is dense."""
        if not self.policy.top_k:
            return {}
        local = (sum(float(loss) for loss, _ in self.parts), sum(loads.cpu().double() for _, loads in self.parts))
        ranks = world.select_group_values(gather_objects(local))
        loads = sum(loads for _, loads in ranks)
        if not isinstance(loads, torch.Tensor):  # no rank had any trained tokens
            return {}
        return {"router/balance_loss": sum(loss for loss, _ in ranks), "router/max_load": compute_max_load(loads)}
