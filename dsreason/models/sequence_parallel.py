"""Sequence parallelism: the ranks of a group compute one packed row together (Ulysses, arXiv 2309.14509).

Each rank has a part of the row's tokens, from the embedding to the log-probabilities of the targets that its tokens predict.
For attention the ranks exchange tokens for heads, and back: each attends over the whole row with its share of the heads. Of
the media each rank encodes a part; the features go to the ranks whose tokens show them. Log-probabilities are gathered, so
that every rank has those of the whole row and computes the same loss, but keeps only the gradient of its own. The gradients
of the ranks are shares: their **sum** is that of the row.
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
"""A process group of torch; mypy knows none if torch is built without them."""


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: Sequence[int], received: Sequence[int], group: Group) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        received_rows = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(received_rows, rows.contiguous(), list(received), list(sent), group=group)
        return received_rows

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return exchange(gradients[0], ctx.received, ctx.sent, ctx.group), None, None, None


def exchange(rows: Tensor, sent: Sequence[int], received: Sequence[int], group: Group) -> Tensor:
    """Rows for each rank, one rank's behind the other's, in; those from each rank out. The gradient goes back the same way."""
    exchanged: Tensor = _Exchange.apply(rows, sent, received, group)  # type: ignore[no-untyped-call]
    return exchanged


def to_heads(query: Tensor, key: Tensor, value: Tensor, group: Group) -> tuple[Tensor, Tensor, Tensor]:
    """Of this rank's tokens all heads in, of all tokens this rank's share of the heads out.

    `query` `[1, H, T / n, d]` → `[1, H / n, T, d]`; keys and values alike, repeated where they have too few heads.
    """
    size = dist.get_world_size(group)
    times = size // gcd(size, key.shape[1])
    key, value = (heads if times == 1 else heads.repeat_interleave(times, dim=1) for heads in (key, value))
    tokens = query.shape[2]
    # [n, T / n, heads / n, d] of each; one exchange for all three
    parts = [heads[0].unflatten(0, (size, -1)).transpose(1, 2) for heads in (query, key, value)]
    counts = [part.shape[2] for part in parts]
    exchanged = exchange(torch.cat(parts, dim=2).flatten(0, 1), [tokens] * size, [tokens] * size, group)
    query, key, value = (heads.transpose(0, 1)[None] for heads in exchanged.split(counts, dim=1))
    return query, key, value


def to_tokens(attended: Tensor, group: Group) -> Tensor:
    """Of all tokens this rank's heads in, `[1, T, H / n, d]`; of its own tokens all heads out, `[1, T / n, H, d]`."""
    size = dist.get_world_size(group)
    tokens = attended.shape[1] // size
    exchanged = exchange(attended[0], [tokens] * size, [tokens] * size, group)
    return torch.cat(list(exchanged.split(tokens)), dim=1)[None]


def exchange_features(features: list[Tensor], part: MediaPart, group: Group) -> list[Tensor]:
    """Features `[encoded here, D]` of several layers in, `[shown here, D]` of each out."""
    widths = [feature.shape[1] for feature in features]
    sent = torch.cat(features, dim=1).index_select(0, part.sent)
    received = exchange(sent, part.sent_counts, part.received_counts, group)
    return list(received.index_select(0, part.order).split(widths, dim=1))


def gather_values(values: Sequence[Tensor], places: Tensor, count: int, group: Group) -> list[Tensor]:
    """Of each of `values` `[M]`, this rank's, the `[count]` of all ranks; `places` `[M]` says where this rank's are.

    The gradient of the others' is left to them.
    """
    own_values = torch.stack([value.detach() for value in values])
    everyone = own_values.new_zeros(len(own_values), count).index_copy(1, places, own_values)
    dist.all_reduce(everyone, group=group)
    return [all_values.index_copy(0, places, value) for all_values, value in zip(everyone, values, strict=True)]
