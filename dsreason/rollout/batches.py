"""How many prompts an engine is given at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch

from dsreason.monitor.flops import head_size
from dsreason.monitor.memory import GIB

T = TypeVar("T")

MAX_ROWS = 256
"""Of a batch: beyond that the time of a step grows with the rows."""


def merged(
    groups: Iterable[list[T]],
    size: Callable[[T], int],
    *,
    memory_gib: float,
    least: int,
    any_rank: Callable[[bool], bool],
) -> Iterator[list[T]]:
    """The groups in as few lists as memory allows: an engine waits for its longest completion once a list.

    A list ends after the group with which it takes more than `memory_gib`, unless it then has fewer than `least` items.
    `size` is an item's, in bytes. `any_rank` tells whether something is true on any rank that has to make as many lists;
    such ranks have as many groups, some of them empty.
    """
    batch: list[T] = []
    num_bytes = 0
    for group in groups:
        batch += group
        num_bytes += sum(map(size, group))
        if any_rank(num_bytes > memory_gib * GIB and len(batch) >= least):
            yield batch
            batch, num_bytes = [], 0
    if any_rank(bool(batch)):
        yield batch


def cut_batches(lengths: Mapping[int, int], batch_size: int, batch_tokens: int) -> list[list[int]]:
    """Prompts by their lengths in tokens, so that like ones share a batch, which spares padding.

    A batch has `batch_size` prompts, or up to `MAX_ROWS` of which none makes it larger than `batch_tokens`, padding
    included.

    Example: lengths {0: 30, 1: 10, 2: 20}, batches of 1 or 40 tokens → [[1, 2], [0]].
    """
    batches: list[list[int]] = []
    for i in sorted(lengths, key=lengths.__getitem__):
        room = max(batch_size, min(MAX_ROWS, batch_tokens // lengths[i]))
        if not batches or len(batches[-1]) >= room:
            batches.append([])
        batches[-1].append(i)
    return batches


def tokens_that_fit(config: Any, dtype: torch.dtype, memory: int) -> int:
    """Tokens of a batch whose keys, values and widest activations take `memory` bytes; `config` is the model's."""
    text = config.get_text_config()
    cached = 2 * text.num_hidden_layers * text.num_key_value_heads * head_size(text)
    activations = 3 * text.intermediate_size + 8 * text.hidden_size  # gate, up and their product; the residual stream
    return int(memory // ((cached + activations) * dtype.itemsize))
