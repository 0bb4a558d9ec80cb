"""Activations that are not kept where the backward pass needs them: computed again, or waiting in the host's memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def enable_gradient_checkpointing(model: PreTrainedModel, *, offload: bool = False) -> None:
    """Recompute each decoder layer and vision block in the backward pass.

    `offload`: what is kept of each, its input, waits in the host's memory until then.

    transformers also makes the embeddings' outputs require gradients, which only reentrant checkpointing needs; with a
    frozen vision tower it would run a backward pass through it for nothing.
    """
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.disable_input_require_grads()
    if offload:
        for module in model.modules():
            if "_gradient_checkpointing_func" in vars(module):
                module._gradient_checkpointing_func = checkpoint_in_host_memory


def checkpoint_in_host_memory(function: Any, *args: Any) -> Any:
    """`torch.utils.checkpoint`, whose saved inputs are copies on the CPU, unless a frozen part made them."""
    kept = [one for one in args if isinstance(one, Tensor) and one.requires_grad]
    if not kept:
        return checkpoint(function, *args, use_reentrant=False)
    with save_on_cpu(pin_memory=kept[0].is_cuda):
        return checkpoint(function, *args, use_reentrant=False)
