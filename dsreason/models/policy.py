"""Policy model, which maps a batch to the log-probabilities of the trained tokens, and gradient checkpointing for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from dsreason.data.collate import join_pixels
from dsreason.data.types import Batch
from dsreason.families import get_family
from dsreason.models.attention import build_attention_inputs
from dsreason.models.logprobs import LogprobHead
from dsreason.models.media_features import build_batch_inputs, build_token_inputs, encode_media
from dsreason.models.sequence_parallel import Group, exchange_features, gather_values

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.modeling_outputs import BaseModelOutputWithPast

NO_OPTIONS: Mapping[str, bool] = {}
"""No additional arguments for the decoder's forward."""


def run_decoder(
    model: PreTrainedModel, batch: Batch, *, use_cache: bool, options: Mapping[str, bool] = NO_OPTIONS
) -> BaseModelOutputWithPast:
    """Run the model without its output layer on a batch; media that occur several times in the batch are encoded once."""
    inputs = build_batch_inputs(model, batch) | build_attention_inputs(model, batch)
    output: BaseModelOutputWithPast = model.get_decoder()(use_cache=use_cache, **inputs, **options)
    return output


def run_decoder_on_part(
    model: PreTrainedModel, batch: Batch, group: Group, options: Mapping[str, bool] = NO_OPTIONS
) -> BaseModelOutputWithPast:
    """Run the model without its output layer on this rank's part of a row, which the ranks of `group` compute together."""
    part = batch.part
    assert part is not None
    local = slice(part.start, part.end)
    inputs = build_attention_inputs(model, batch, group)
    inputs["position_ids"] = inputs["position_ids"][..., local]
    input_ids = batch.input_ids[:, local]
    if part.media is None:
        inputs["input_ids"] = input_ids
    else:
        features = encode_media(model, join_pixels(batch), part.media.grids)
        features = exchange_features(features, part.media, group)
        inputs |= build_token_inputs(model, input_ids, part.media.indices, features)
    output: BaseModelOutputWithPast = model.get_decoder()(use_cache=False, **inputs, **options)
    return output


@dataclass(frozen=True)
class RouterOutput:
    """Output of the routers of a mixture of experts in one forward pass."""

    logits: Sequence[Tensor]
    """Each layer's logits `[tokens, experts]`."""
    counted: Tensor
    """Bool `[tokens]`: whether a token belongs to a sample."""
    num_tokens: Tensor
    """Number of the samples' tokens, on all ranks of the group."""
    group: Group
    """Ranks that compute the row together, each with a part of the tokens; None for a single rank."""


class Policy(nn.Module):
    """Wrapper of a Hugging Face model (`.model`) that returns log-probabilities.

    Args:
        group: ranks that compute a row together, if the batch has a `part`.
        router_loss_weight: weight of the router loss, which the training loop adds; with 0, `router_output` has no gradient.
    """

    def __init__(self, model: PreTrainedModel, group: Group = None, router_loss_weight: float = 0.0) -> None:
        super().__init__()
        self.model = model
        self.group = group
        modules = get_family(model.config.model_type).modules
        self.head = modules.head
        self.top_k = model.config.get_text_config().num_experts_per_tok if modules.experts else 0
        """Number of experts to which a token is sent; 0 for a dense model."""
        self.router_loss_weight = router_loss_weight
        self.router_output: RouterOutput | None = None
        """Output of the routers in the last forward pass with gradients; None for a dense model."""
        head = model.get_submodule(self.head)
        if type(head) is not nn.Linear or head.bias is not None:
            raise TypeError(f"{self.head} must be an nn.Linear without bias; got {head}")
        head.__class__ = LogprobHead

    def forward(
        self, batch: Batch, temperature: float = 1.0, banned_ids: Tensor | None = None, with_entropy: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Compute the float32 log-probabilities `[N]` of the tokens `batch.targets`.

        If `with_entropy` is set, the entropies `[N]` of the tokens' distributions are returned as well. `banned_ids` have
        probability 0, because the rollout engine never samples them, and policy and engine must use the same distribution.
        For a batch without trained tokens, the result is empty but still part of the autograd graph, because under ZeRO-3 every
        rank must run the same layers forward and backward.

        If several ranks compute a row together, each rank returns all values, but gradients flow only to those it computed.
        """
        part, predictors, places = batch.part, batch.predictors, batch.targets
        options = {"output_router_logits": True} if self.top_k and torch.is_grad_enabled() else NO_OPTIONS
        if part is None:
            output = run_decoder(self.model, batch, use_cache=False, options=options)
        else:
            output = run_decoder_on_part(self.model, batch, self.group, options)
            predictors, places = part.predictors, places[part.targets]
        if options:
            self.router_output = self._build_router_output(batch, output.router_logits)
        hidden = output.last_hidden_state.flatten(0, 1)  # [B * T, H]
        count = predictors.shape[0]
        selected, targets = hidden[predictors], batch.input_ids.flatten()[places]
        if count == 0:
            selected, targets = hidden[:1], batch.input_ids[0, :1]
        head_outputs = self.model.get_submodule(self.head)(selected, targets, temperature, banned_ids, with_entropy)
        values = [value[:count] for value in (head_outputs if with_entropy else (head_outputs,))]
        if part is not None:
            values = gather_values(values, part.targets, batch.targets.shape[0], self.group)
        return (values[0], values[1]) if with_entropy else values[0]

    def _build_router_output(self, batch: Batch, logits: Sequence[Tensor]) -> RouterOutput:
        if not self.router_loss_weight:
            logits = [layer.detach() for layer in logits]
        mask = batch.mask_samples().flatten()
        counted = mask if batch.part is None else mask[batch.part.start : batch.part.end]
        group = None if batch.part is None else self.group
        return RouterOutput([layer.flatten(0, -2) for layer in logits], counted, mask.sum(), group)


def enable_gradient_checkpointing(model: PreTrainedModel, *, offload: bool = False) -> None:
    """Make the backward pass recompute each decoder layer and vision block.

    If `offload` is set, the saved inputs of the layers stay in host memory until the backward pass.

    transformers also makes the outputs of the embeddings require gradients. This function undoes that, because only reentrant
    checkpointing needs these gradients, which would cause a useless backward pass through a frozen vision tower.
    """
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.disable_input_require_grads()
    if offload:
        for module in model.modules():
            if "_gradient_checkpointing_func" in vars(module):
                module._gradient_checkpointing_func = run_checkpoint_in_host_memory


def run_checkpoint_in_host_memory(function: Any, *args: Any) -> Any:
    """Call `torch.utils.checkpoint`, and save its inputs in host memory unless a frozen part of the model computed them."""
    trained_args = [arg for arg in args if isinstance(arg, Tensor) and arg.requires_grad]
    if not trained_args:
        return checkpoint(function, *args, use_reentrant=False)
    with save_on_cpu(pin_memory=trained_args[0].is_cuda):
        return checkpoint(function, *args, use_reentrant=False)
