"""Sequence parallelism: the ranks of a group compute one packed row together (Ulysses, arXiv 2309.14509).

Each rank has a part of the row's tokens, from the embedding to the log-probabilities of the targets that its tokens predict.
For attention the ranks exchange tokens for heads and back, so each attends over the whole row with its share of the heads. Each
rank encodes a part of the media and sends the features to the ranks whose tokens show them. Log-probabilities are gathered, so
every rank has those of the whole row and computes the same loss, but keeps only the gradient of its part. The gradients of the
ranks are shares: their **sum** is the gradient of the row.
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
"""A process group of torch. It is Any because mypy finds no such class if torch is built without distributed support."""


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
    """All-to-all of rows, sorted by receiving rank → sorted by sending rank. The gradient takes the way back."""
    exchanged: Tensor = _RowExchange.apply(rows, sent, received, group)  # type: ignore[no-untyped-call]
    return exchanged


def to_heads(query: Tensor, key: Tensor, value: Tensor, group: Group) -> tuple[Tensor, Tensor, Tensor]:
    """All-to-all: `[local tokens, all heads]` → `[all tokens, local heads]`.

    `query` `[1, H, T / n, d]` → `[1, H / n, T, d]`; likewise keys and values, which are repeated if they have too few heads.
    """
    size = dist.get_world_size(group)
    times = size // gcd(size, key.shape[1])
    key, value = (heads if times == 1 else heads.repeat_interleave(times, dim=1) for heads in (key, value))
    tokens = query.shape[2]
    # Each part is [n, T / n, heads / n, d], and one exchange serves all three.
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
    """Exchange the features of several layers: `[tokens encoded here, D]` → `[tokens shown here, D]`."""
    widths = [feature.shape[1] for feature in features]
    sent = torch.cat(features, dim=1).index_select(0, part.sent)
    received = exchange_rows(sent, part.sent_counts, part.received_counts, group)
    return list(received.index_select(0, part.order).split(widths, dim=1))


def gather_values(values: Sequence[Tensor], places: Tensor, count: int, group: Group) -> list[Tensor]:
    """Gather each of the local `values` `[M]` from all ranks → `[count]`.

    `places` `[M]` are the indices of the local values. Only these get a gradient; the other ranks compute theirs.
    """
    local_values = torch.stack([value.detach() for value in values])
    gathered = local_values.new_zeros(len(local_values), count).index_copy(1, places, local_values)
    dist.all_reduce(gathered, group=group)
    return [all_values.index_copy(0, places, value) for all_values, value in zip(gathered, values, strict=True)]
