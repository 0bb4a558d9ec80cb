"""Memory that a piece of a model needs in forward and backward, traced on the meta device from the lifetimes of all tensors.

Nothing is computed. Temporary memory that kernels allocate internally is not counted.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from dsreason.errors import ConfigError

ATTENTION = "flash_planned"
"""Name of `trace_attention` in transformers; because it contains "flash", vision towers pass a complete media item at a time."""
EXPERTS = "planned"
"""Name of `trace_experts` in transformers."""
MOST_TOKENS = 10**9
"""Maximum number of tokens per forward pass; with more tokens, byte counts would overflow 64 bits."""


class LiveBytes(TorchDispatchMode):
    """Counter of the bytes of live tensors created in this context: the current number `now`, and its maximum `peak`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        input_storages = {get_storage_id(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and get_storage_id(leaf) not in self.known | input_storages:
                self._add(leaf)
        return result

    def _add(self, tensor: Tensor) -> None:
        storage, number = tensor.untyped_storage(), get_storage_id(tensor)
        size = storage.nbytes()
        self.known.add(number)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._drop, number, size)

    def _drop(self, number: int, size: int) -> None:
        self.known.discard(number)
        self.now -= size


def get_storage_id(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


class FlashAttention(torch.autograd.Function):
    """Attention that saves queries, keys, values and output, as torch's flash kernel does: `[1, H, T, d]` → `[1, T, H, d]`."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        attended = torch.empty_like(query.transpose(1, 2).contiguous())
        ctx.save_for_backward(query, key, value, attended)
        return attended

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        query, key, value, _ = ctx.saved_tensors
        return tuple(torch.empty_like(tensor) for tensor in (query, key, value))


def trace_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *other: Any, **options: Any
) -> tuple[Tensor, None]:
    attended: Tensor = FlashAttention.apply(query, key, value)  # type: ignore[no-untyped-call]
    return attended, None


def trace_experts(experts: Any, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Compute experts that all get the same number of tokens, with tensors as large as those of torch's grouped products.

    torch cannot trace its grouped products in float32. `hidden` is `[T, H]`, and the other tensors are `[T, k]`.
    """
    rows = hidden.repeat_interleave(top_k_weights.shape[1], dim=0)
    more = -len(rows) % experts.num_experts
    padded = torch.nn.functional.pad(rows, (0, 0, 0, more)) if more else rows
    inner = experts._apply_gate(padded.unflatten(0, (experts.num_experts, -1)) @ experts.gate_up_proj.mT)
    outputs = (inner @ experts.down_proj.mT).flatten(0, 1)[: len(rows)] * top_k_weights.flatten()[:, None]
    total: Tensor = outputs.unflatten(0, (len(hidden), -1)).sum(dim=1)
    return total


AttentionInterface.register(ATTENTION, trace_attention)
ALL_EXPERTS_FUNCTIONS.register(EXPERTS, trace_experts)


class Traced(NamedTuple):
    """Traced memory in bytes, not counting the input and the parameters."""

    kept: int
    """Bytes that are kept for the backward pass, including the output."""
    peak: int
    """Peak bytes in forward and backward; parameter gradients are freed once computed, because DeepSpeed takes them over."""


def trace(
    run: Callable[[Tensor], Tensor],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    *,
    training: bool = True,
) -> Traced:
    """Trace `run` on an input of this shape.

    Args:
        training: trace forward and backward, including the input's gradient; if False, only a forward pass that keeps nothing.

    Raises:
        ConfigError: the input has more than `MOST_TOKENS` tokens.
    """
    if shape[-2] > MOST_TOKENS:
        raise ConfigError(
            f"one forward pass would have {shape[-2]:.3g} tokens or patches, but a plan supports at most {MOST_TOKENS:.3g}; "
            "lower model.max_length, micro_batch_size, max_tokens_per_micro_batch or max_completion_length"
        )
    inputs = torch.empty(shape, dtype=dtype, device="meta", requires_grad=training)
    live = LiveBytes()
    with live, torch.set_grad_enabled(training):
        output = run(inputs)
        kept_bytes = live.now if output.requires_grad else 0
        if output.requires_grad:
            output.backward(torch.empty_like(output))
    return Traced(kept_bytes, live.peak)


def free_gradients_early(module: nn.Module) -> None:
    """Free the gradient of each parameter as soon as it is computed."""

    def drop_gradient(parameter: Tensor) -> None:
        parameter.grad = None

    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(drop_gradient)
