"""Functions that divide prompts into batches for rollout engines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch

from dsreason.monitor.flops import get_head_size
from dsreason.monitor.memory import GIB

T = TypeVar("T")

MAX_ROWS = 256
"""Maximum number of rows in a batch; in larger batches, the time per decoding step grows with the number of rows."""


def merge_groups(
    groups: Iterable[list[T]],
    size: Callable[[T], int],
    *,
    memory_gib: float,
    least: int,
    any_rank: Callable[[bool], bool],
) -> Iterator[list[T]]:
    """Merge groups into as few lists as memory allows, because an engine waits for the longest completion of every list.

    A list ends with the group that raises its size above `memory_gib` on any rank, provided that the list then has at least
    `least` items on that rank.

    Args:
        groups: groups of items, some of which may be empty; ranks that need the same number of lists must pass the same number
            of groups.
        size: function that returns the size of an item in bytes.
        any_rank: collective function that returns whether its argument is true on at least one of these ranks.
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
    """Sort prompts by length and divide them into batches, so that prompts of similar length share a batch.

    A batch has at most `batch_size` prompts, or up to `MAX_ROWS` if they fit into `batch_tokens` including padding.

    Args:
        lengths: prompt index → length in tokens.

    Example: lengths {0: 30, 1: 10, 2: 20}, batch_size 1 and batch_tokens 40 → [[1, 2], [0]].
    """
    batches: list[list[int]] = []
    for i in sorted(lengths, key=lengths.__getitem__):
        capacity = max(batch_size, min(MAX_ROWS, batch_tokens // lengths[i]))
        if not batches or len(batches[-1]) >= capacity:
            batches.append([])
        batches[-1].append(i)
    return batches


def count_tokens_that_fit(config: Any, dtype: torch.dtype, memory: int) -> int:
    """Return the number of tokens whose keys, values and widest activations fit into `memory` bytes.

    Args:
        config: Hugging Face configuration of the model.
    """
    text = config.get_text_config()
    cached = 2 * text.num_hidden_layers * text.num_key_value_heads * get_head_size(text)
    activations = 3 * text.intermediate_size + 8 * text.hidden_size  # gate, up and their product; the residual stream
    return int(memory // ((cached + activations) * dtype.itemsize))
