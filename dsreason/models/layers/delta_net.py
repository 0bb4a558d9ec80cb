"""Gated delta nets, which some models have instead of attention in most layers, within the samples of a packed row.

A delta net has a short convolution and a recurrent state. Both run along the row, so that a sample would depend on the samples
before it: transformers passes the arguments of a forward call to the two functions that compute them, but its versions of these
functions ignore sample boundaries. This module wraps both functions. If they get a `DeltaLayout`, they start anew at each sample,
or, for a completion, at the end of its prompt. The rest of the layer treats each token separately.

The delta rule works in chunks of 64 tokens. Samples with the same number of chunks form a batch, which costs no additional work.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from dsreason.data.types import Segment, copy_to_device
from dsreason.families.layer_types import CHUNK

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LAYOUT = "delta_layout"
"""Name of the forward argument that holds the `DeltaLayout` of a packed row."""


@dataclass(frozen=True)
class DeltaBatch:
    """Segments of a packed row that the delta rule computes together."""

    tokens: Tensor  # [segments, longest] int64: indices into the row; padding has the index T
    parents: (
        Tensor | None
    )  # [segments] int64: indices of the parents among the row's roots; None if the segments are roots


@dataclass(frozen=True)
class DeltaLayout:
    """Layout of a packed row of `T` tokens for its delta nets, computed once per forward pass."""

    batches: tuple[DeltaBatch, ...]
    """All batches of roots (segments without a parent), and then all batches of children."""
    num_root_batches: int
    order: Tensor  # [T] int64: index of each token in the concatenated, padded batches
    context: Tensor  # [T + segments x (kernel - 1)] int64: the tokens of each segment, and before them those that it continues
    places: Tensor  # [T] int64: index of each token in `context`


def build_delta_layout(segments: Sequence[Segment], kernel: int, device: torch.device) -> DeltaLayout:
    """Build the layout of a row on `device`; `kernel` is the number of tokens that the convolution sees."""
    length, move = segments[-1].end, partial(copy_to_device, device=device)

    def build_batch(members: Sequence[Segment], parents: Tensor | None) -> DeltaBatch:
        tokens = pad_sequence(list(map(list_tokens, members)), batch_first=True, padding_value=length)
        return DeltaBatch(move(tokens), parents if parents is None else move(parents))

    root_batches = batch_by_chunks([segment for segment in segments if segment.parent is None])
    child_batches = batch_by_chunks([segment for segment in segments if segment.parent is not None and segment.length])
    ranks = {root: rank for rank, root in enumerate(root for batch in root_batches for root in batch)}
    batches = [build_batch(batch, None) for batch in root_batches]
    for batch in child_batches:
        batches.append(build_batch(batch, torch.tensor([ranks[segments[child.parent or 0]] for child in batch])))
    order = torch.cat([batch.tokens.flatten() for batch in batches]).argsort()[:length]
    context, places = build_context(segments, kernel)
    return DeltaLayout(tuple(batches), len(root_batches), move(order), move(context), move(places))


def batch_by_chunks(segments: Sequence[Segment]) -> list[list[Segment]]:
    """Divide segments into batches with equal numbers of chunks."""

    def count_chunks(segment: Segment) -> int:
        return -(-segment.length // CHUNK)

    return [list(batch) for _, batch in groupby(sorted(segments, key=count_chunks), key=count_chunks)]


def build_context(segments: Sequence[Segment], kernel: int) -> tuple[Tensor, Tensor]:
    """Return `context` and `places` of a `DeltaLayout`."""
    context, places, start = [], [], 0
    for segment in segments:
        tokens = list_tokens(segment)
        before = tokens[:0] if segment.parent is None else list_tokens(segments[segment.parent])
        before = pad(before, (kernel - 1, 0), value=segments[-1].end)[1 - kernel :]
        context += [before, tokens]
        places.append(start + len(before) + torch.arange(segment.length))
        start += len(before) + segment.length
    return torch.cat(context), torch.cat(places)


def list_tokens(segment: Segment) -> Tensor:
    return torch.arange(segment.start, segment.end)


def convolve(
    function: Callable[..., Tensor], hidden_states: Tensor, *args: Any, delta_layout: DeltaLayout | None, **kwargs: Any
) -> Tensor:
    """Compute a layer's convolution with transformers' `function`, `[1, C, T]` → `[1, C, T]`, within each sample."""
    if delta_layout is None:
        return function(hidden_states, *args, **kwargs)
    context = pad(hidden_states, (0, 1)).index_select(2, delta_layout.context)
    return function(context, *args, **kwargs).index_select(2, delta_layout.places)


def apply_delta_rule(
    function: Callable[..., tuple[Tensor, Tensor | None]],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    g: Tensor,
    beta: Tensor,
    delta_layout: DeltaLayout | None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute the delta rule with transformers' `function` within each sample of a packed row.

    Padding neither decays the state (`g` = 0) nor adds to it (`key`, `value` and `beta` = 0), so that a sample's final state is
    the state after its last token.

    Args:
        query: `[1, T, H, d]`, as are `key` and `value`.
        g: `[1, T, H]`, logarithm of the decay, as is `beta`, the strength of the update.
    """
    if delta_layout is None:
        return function(query, key, value, g=g, beta=beta, **kwargs)
    query, key, value = (pad(heads[0], (0, 0, 0, 0, 0, 1)) for heads in (query, key, value))
    g, beta = (pad(gates[0], (0, 0, 0, 1)) for gates in (g, beta))
    outputs: list[Tensor] = []
    states: list[Any] = []
    prompt_states: Any = None
    for number, batch in enumerate(delta_layout.batches):
        if number == delta_layout.num_root_batches:
            prompt_states = torch.cat(states)
        kwargs["initial_state"] = None if batch.parents is None else prompt_states[batch.parents]
        kwargs["output_final_state"] = delta_layout.num_root_batches < len(delta_layout.batches)
        i = batch.tokens
        output, state = function(query[i], key[i], value[i], g=g[i], beta=beta[i], **kwargs)
        outputs.append(output.flatten(0, 1))
        states.append(state)
    return torch.cat(outputs).index_select(0, delta_layout.order)[None], None


def separate_samples(model: PreTrainedModel) -> None:
    """Make the delta nets of a model process the samples of a packed row separately."""
    wrap_functions(type(model.get_decoder()).__module__)


@cache
def wrap_functions(module_name: str) -> None:
    """Wrap the two token-mixing functions in a module of transformers; without a layout, they work as before."""
    module: Any = sys.modules[module_name]
    module.causal_conv1d_fn = partial(convolve, module.causal_conv1d_fn, delta_layout=None)
    module.torch_chunk_gated_delta_rule = partial(
        apply_delta_rule, module.torch_chunk_gated_delta_rule, delta_layout=None
    )
