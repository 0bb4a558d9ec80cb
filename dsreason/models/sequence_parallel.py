"""Sequence parallelism, in which the ranks of a group compute one packed row together (Ulysses, arXiv 2309.14509).

Each rank processes a part of the row's tokens, from the embedding to the log-probabilities of the targets that these tokens
predict. For attention, the ranks exchange tokens for heads and back, so that each rank attends over the entire row with its share
of the heads. Each rank encodes a part of the media and sends the features to the ranks that hold the placeholders. The
log-probabilities are gathered, so every rank computes the loss of the entire row, but only the gradient of its own part. The
gradient of the row is therefore the **sum** of the ranks' gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dsreason.data.types import MediaPart

Group = Any
"""torch process group; None for a single rank. The type is Any because mypy does not find the class in builds of torch without
distributed support."""


class _RowExchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: Sequence[int], received: Sequence[int], group: Group) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        received_rows = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(received_rows, rows.contiguous(), list(received), list(sent), group=group)
        return received_rows

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return exchange_rows(gradients[0], ctx.received, ctx.sent, ctx.group), None, None, None


def exchange_rows(rows: Tensor, sent: Sequence[int], received: Sequence[int], group: Group) -> Tensor:
    """Exchange rows all-to-all: sorted by receiving rank → sorted by sending rank. Gradients are exchanged in reverse."""
    exchanged: Tensor = _RowExchange.apply(rows, sent, received, group)  # type: ignore[no-untyped-call]
    return exchanged


def to_heads(query: Tensor, key: Tensor, value: Tensor, group: Group) -> tuple[Tensor, Tensor, Tensor]:
    """All-to-all: `[local tokens, all heads]` → `[all tokens, local heads]`.

    `query`: `[1, H, T / n, d]` → `[1, H / n, T, d]`. `key` and `value` are exchanged in the same way; if they have too few heads,
    the heads are repeated.
    """
    size = dist.get_world_size(group)
    times = size // gcd(size, key.shape[1])
    key, value = (heads if times == 1 else heads.repeat_interleave(times, dim=1) for heads in (key, value))
    tokens = query.shape[2]
    # Each part is [n, T / n, heads / n, d]; a single exchange sends all three.
    parts = [heads[0].unflatten(0, (size, -1)).transpose(1, 2) for heads in (query, key, value)]
    counts = [part.shape[2] for part in parts]
    exchanged = exchange_rows(torch.cat(parts, dim=2).flatten(0, 1), [tokens] * size, [tokens] * size, group)
    query, key, value = (heads.transpose(0, 1)[None] for heads in exchanged.split(counts, dim=1))
    return query, key, value


def to_tokens(attended: Tensor, group: Group) -> Tensor:
    """All-to-all: `[all tokens, local heads]` → `[local tokens, all heads]`: `[1, T, H / n, d]` → `[1, T / n, H, d]`."""
    size = dist.get_world_size(group)
    tokens = attended.shape[1] // size
    exchanged = exchange_rows(attended[0], [tokens] * size, [tokens] * size, group)
    return torch.cat(list(exchanged.split(tokens)), dim=1)[None]


def exchange_features(features: list[Tensor], part: MediaPart, group: Group) -> list[Tensor]:
    """Exchange the features of several layers: `[tokens that this rank encoded, D]` → `[placeholders on this rank, D]`."""
    widths = [feature.shape[1] for feature in features]
    sent = torch.cat(features, dim=1).index_select(0, part.sent)
    received = exchange_rows(sent, part.sent_counts, part.received_counts, group)
    return list(received.index_select(0, part.order).split(widths, dim=1))


def gather_values(values: Sequence[Tensor], indices: Tensor, count: int, group: Group) -> list[Tensor]:
    """Gather each tensor in `values` from all ranks: `[M]` local values → `[count]`.

    `indices` `[M]` are the indices of the local values in the result. Gradients flow only to the local values, because the other
    ranks compute the gradients of their own values.
    """
    local_values = torch.stack([value.detach() for value in values])
    gathered = local_values.new_zeros(len(local_values), count).index_copy(1, indices, local_values)
    dist.all_reduce(gathered, group=group)
    return [all_values.index_copy(0, indices, value) for all_values, value in zip(gathered, values, strict=True)]
