"""Context parallelism: the ranks of a group shard each clip's tokens (Ulysses, arXiv 2309.14509).

Outside of self-attention, each rank processes only its own tokens. For self-attention, ranks exchange tokens for heads and
back, so that each rank attends over all tokens with its share of the heads. The output is gathered at the end, so every rank
in the group has the same velocity and computes the same loss. A rank's gradients cover only its own tokens; their **sum** over
the group is the full gradient. DeepSpeed averages over ranks, so the loss is multiplied by the size of the group.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dsreason.errors import ConfigError

if TYPE_CHECKING:
    from dsreason.world.families.family import WorldFamily

Group = Any
"""A torch process group; typed as Any, because torch lacks the type if it is built without distributed support."""
KEY = "train.context_parallel_size"


def share_tokens(transformer: nn.Module, family: WorldFamily, group: Group) -> None:
    """Shard each clip's tokens across the ranks of `group`. Call this before DeepSpeed wraps the transformer.

    All ranks of the group must call this with the same arguments, after `check_sizes`.
    """
    family.parallelise(transformer, group)


def check_sizes(config: Mapping[str, Any], shape: tuple[int, ...], size: int) -> None:
    """Raise ConfigError if a model's heads or a clip's tokens cannot be divided evenly among `size` ranks.

    Args:
        config: configuration of the transformer.
        shape: shape of a clip's latents, `(C, t, h, w)`.
    """
    heads = config["num_attention_heads"]
    if heads % size:
        raise ConfigError(
            f"{KEY} ({size}) does not divide the model's {heads} attention heads; set it to a divisor of {heads}"
        )
    frames, height, width = (length // side for length, side in zip(shape[-3:], config["patch_size"], strict=True))
    tokens = frames * height * width
    if tokens % size:
        raise ConfigError(
            f"{KEY} ({size}) does not divide a clip's {tokens} tokens ({frames} x {height} x {width}); change data.frames, "
            f"data.height or data.width, or set {KEY} to a divisor of {tokens}"
        )


def take_local_part(tensor: Tensor, dim: int, group: Group) -> Tensor:
    """Return this rank's share along axis `dim`.

    Raises:
        ValueError: the axis cannot be divided evenly; `chunk` would return unequal parts.
    """
    size = dist.get_world_size(group)
    if tensor.shape[dim] % size:
        raise ValueError(f"{tensor.shape[dim]} tokens or heads cannot be divided evenly among {size} ranks")
    return tensor.chunk(size, dim)[dist.get_rank(group)]


class _HeadExchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, scatter: int, gather: int, group: Group) -> Tensor:
        ctx.scatter, ctx.gather, ctx.group = scatter, gather, group
        sent = torch.stack(tensor.chunk(dist.get_world_size(group), scatter))
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        return torch.cat(received.unbind(0), gather)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return exchange(gradients[0], ctx.gather, ctx.scatter, ctx.group), None, None, None


def exchange(tensor: Tensor, scatter: int, gather: int, group: Group) -> Tensor:
    """All-to-all: send parts along axis `scatter` to the ranks, and concatenate the received parts along axis `gather`."""
    exchanged: Tensor = _HeadExchange.apply(tensor, scatter, gather, group)  # type: ignore[no-untyped-call]
    return exchanged


def attend_over_group(query: Tensor, key: Tensor, value: Tensor, group: Group) -> Tensor:
    """Attend over the tokens of all ranks with this rank's share of the heads.

    Shapes: query, key and value are `[B, heads, local tokens, head size]`; the result is `[B, local tokens, heads x head size]`.
    """
    query, key, value = (exchange(part, 1, 2, group) for part in (query, key, value))
    attended = nn.functional.scaled_dot_product_attention(query, key, value)
    return exchange(attended, 2, 1, group).transpose(1, 2).flatten(2)


class _Gather(torch.autograd.Function):
    """An all-gather. The loss is the same on all ranks, so the backward pass keeps only the gradient of the rank's own part."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, group: Group) -> Tensor:
        ctx.dim, ctx.group = dim, group
        parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, tensor.contiguous(), group=group)
        return torch.cat(parts, dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return take_local_part(gradients[0], ctx.dim, ctx.group), None, None


def gather_tokens(tensor: Tensor, dim: int, group: Group) -> Tensor:
    """Gather the tokens from all ranks in the group along axis `dim`."""
    gathered: Tensor = _Gather.apply(tensor, dim, group)  # type: ignore[no-untyped-call]
    return gathered
