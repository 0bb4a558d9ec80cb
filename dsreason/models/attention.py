"""Attention within the samples of a packed row, and within the windows and frames of the vision tower.

The module registers its attention with transformers under two names, one for the text layers and one for the vision tower. On a
GPU, it calls torch's variable-length flash attention once or twice per layer; on other devices, it calls scaled-dot-product
attention once per sample, window or frame. Neither implementation needs a mask for the entire row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from inspect import signature
from itertools import accumulate, groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from dsreason.data.types import Batch, Segment, copy_to_device
from dsreason.errors import CheckpointError, ConfigError
from dsreason.families import Family, get_family
from dsreason.families.layer_types import get_layer_types, has_delta_nets
from dsreason.models.layers.delta_net import LAYOUT, build_delta_layout
from dsreason.models.sequence_parallel import Group, to_heads, to_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TEXT, VISION = "segments", "flash_segments"
"""Names under which the attention is registered; transformers passes window and frame starts only to names with "flash"."""
SUPPORTED = ("full_attention", "linear_attention")
"""Types of text layers that can keep the samples of a packed row apart; linear attention: `dsreason.models.layers.delta_net`."""


@dataclass(frozen=True)
class KernelCall:
    """Arguments for one call of the variable-length kernel: query and key tokens, and the parts into which both are divided."""

    queries: Tensor | None  # [Q] int64; None: all tokens of the row, in order
    keys: Tensor | None  # [K] int64
    query_starts: Tensor  # [parts + 1] int32
    key_starts: Tensor  # [parts + 1] int32
    longest_query: int
    longest_key: int

    def to(self, device: torch.device) -> KernelCall:
        return replace(
            self,
            queries=None if self.queries is None else copy_to_device(self.queries, device),
            keys=None if self.keys is None else copy_to_device(self.keys, device),
            query_starts=copy_to_device(self.query_starts, device),
            key_starts=copy_to_device(self.key_starts, device),
        )


@dataclass(frozen=True)
class RowLayout:
    """Layout of a packed row: the positions of its samples, computed once per forward pass and used by every layer."""

    segments: tuple[Segment, ...]
    calls: tuple[KernelCall, ...] = ()
    """Kernel calls; empty on devices without the kernel."""
    order: Tensor | None = None
    """Permutation `[T]` that sorts the concatenated results of several calls into row order; None for a single call."""
    group: Group = None
    """Ranks that compute the row together, each with a part of the tokens; None if this rank has all tokens."""


def build_row_layout(segments: Sequence[Segment], device: torch.device, group: Group = None) -> RowLayout:
    """Build the layout of a row whose tensors are on `device`."""
    if device.type != "cuda":
        return RowLayout(tuple(segments), group=group)
    calls = build_kernel_calls(segments)
    order = None
    if len(calls) > 1:
        query_lists = [call.queries for call in calls if call.queries is not None]
        order = copy_to_device(torch.cat(query_lists).argsort(), device)
    return RowLayout(tuple(segments), tuple(call.to(device) for call in calls), order, group)


def build_kernel_calls(segments: Sequence[Segment]) -> list[KernelCall]:
    """Build one kernel call for samples without a parent, and one for samples with a parent, which also attend to its keys."""
    roots = [segment for segment in segments if segment.parent is None]
    children = [segment for segment in segments if segment.parent is not None and segment.length]
    sizes = [root.length for root in roots]
    tokens = torch.cat([list_token_indices(root) for root in roots])
    starts = compute_starts(sizes)
    if not children:
        return [KernelCall(None, None, starts, starts, max(sizes), max(sizes))]
    visible = [[segments[child.parent], child] for child in children if child.parent is not None]
    key_sizes = [sum(segment.length for segment in parts) for parts in visible]
    return [
        KernelCall(tokens, tokens, starts, starts, max(sizes), max(sizes)),
        KernelCall(
            queries=torch.cat([list_token_indices(child) for child in children]),
            keys=torch.cat([list_token_indices(segment) for parts in visible for segment in parts]),
            query_starts=compute_starts([child.length for child in children]),
            key_starts=compute_starts(key_sizes),
            longest_query=max(child.length for child in children),
            longest_key=max(key_sizes),
        ),
    ]


def list_token_indices(segment: Segment) -> Tensor:
    return torch.arange(segment.start, segment.end)


def compute_starts(lengths: Sequence[int]) -> Tensor:
    """Compute the start of each of several consecutive parts, and the end, `[parts + 1]` int32: lengths 3 and 2 → 0, 3, 5."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def attend_text(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    layout: RowLayout | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute causal attention in a packed row if `layout` is set, or otherwise in padded rows with a mask, as transformers does.

    `query` is `[1, H, T, d]`, `key` and `value` are `[1, K, T, d]`, and the result is `[1, T, H, d]`. If several ranks compute
    the row together, `T` is the number of tokens on this rank.
    """
    if layout is None:
        output: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return output
    if layout.group is not None:
        query, key, value = to_heads(query, key, value, layout.group)
    if layout.calls and has_kernel(query):
        attended = attend_by_kernel(query, key, value, layout, scaling)
    else:
        attended = attend_by_segment(query, key, value, layout.segments, scaling)
    return (attended if layout.group is None else to_tokens(attended, layout.group)), None


def attend_by_segment(
    query: Tensor, key: Tensor, value: Tensor, segments: Sequence[Segment], scaling: float | None
) -> Tensor:
    """Compute a packed row's attention by calling scaled-dot-product attention once per segment."""
    grouped = query.shape[1] != key.shape[1]
    attended = []
    for segment in segments:
        own_tokens = slice(segment.start, segment.end)
        queries, keys, values, mask = query[:, :, own_tokens], key[:, :, own_tokens], value[:, :, own_tokens], None
        if segment.parent is not None:
            parent_tokens = slice(segments[segment.parent].start, segments[segment.parent].end)
            keys, values = (
                torch.cat([key[:, :, parent_tokens], keys], dim=2),
                torch.cat([value[:, :, parent_tokens], values], dim=2),
            )
            # The causal mask is aligned to the lower right, so that the first token attends to the entire parent and to itself.
            mask = torch.ones(queries.shape[2], keys.shape[2], dtype=torch.bool, device=query.device)
            mask = mask.tril(keys.shape[2] - queries.shape[2])
        attended.append(
            scaled_dot_product_attention(
                queries, keys, values, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=grouped
            )
        )
    return torch.cat(attended, dim=2).transpose(1, 2).contiguous()


def attend_by_kernel(query: Tensor, key: Tensor, value: Tensor, layout: RowLayout, scaling: float | None) -> Tensor:
    """Compute a packed row's attention with torch's variable-length kernel, which aligns causal masks to the lower right."""
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))  # [T, heads, d]
    attended = []
    for call in layout.calls:
        queries = query if call.queries is None else query[call.queries]
        keys, values = (tensor if call.keys is None else tensor[call.keys] for tensor in (key, value))
        attended.append(call_varlen_kernel(queries, keys, values, call, scaling, causal=True))
    return (attended[0] if layout.order is None else torch.cat(attended)[layout.order])[None]


def attend_vision(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention between patches of the same frame or window, `[1, H, N, d]` → `[1, N, H, d]`; starts: `cu_seq_lens_q`."""
    assert cu_seq_lens_q is not None
    if has_kernel(query):
        assert max_length_q is not None
        starts = cu_seq_lens_q.int()
        call = KernelCall(None, None, starts, starts, int(max_length_q), int(max_length_q))
        queries, keys, values = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        return call_varlen_kernel(queries, keys, values, call, scaling, causal=False)[None], None
    lengths = cu_seq_lens_q.diff().tolist()
    attended, start = [], 0
    for length, run in groupby(lengths):  # consecutive parts of equal length form a batch
        end = start + length * len(list(run))
        q, k, v = (t[0, :, start:end].unflatten(1, (-1, length)).transpose(0, 1) for t in (query, key, value))
        attended.append(scaled_dot_product_attention(q, k, v, scale=scaling).transpose(1, 2).flatten(0, 1))
        start = end
    return torch.cat(attended)[None], None


def has_kernel(query: Tensor) -> bool:
    """Return whether torch's flash attention supports `query`: a half-precision tensor on an Ampere or newer GPU."""
    return (
        query.is_cuda
        and query.dtype in (torch.bfloat16, torch.float16)
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
    )


def call_varlen_kernel(
    query: Tensor, key: Tensor, value: Tensor, call: KernelCall, scaling: float | None, *, causal: bool
) -> Tensor:
    """Call the variable-length kernel: `query` `[Q, H, d]`, `key` and `value` `[K, kv heads, d]` → output `[Q, H, d]`."""
    from torch.nn.attention.varlen import varlen_attn

    options: dict[str, Any] = {"scale": scaling, "window_size": (-1, 0) if causal else (-1, -1)}
    repeats = query.shape[1] // key.shape[1]
    if "enable_gqa" in signature(varlen_attn).parameters:
        options["enable_gqa"] = repeats > 1
    else:  # torch 2.11 lacks this argument
        key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    starts, longest = (call.query_starts, call.key_starts), (call.longest_query, call.longest_key)
    attended = varlen_attn(query, key, value, *starts, *longest, **options)
    assert isinstance(attended, Tensor)  # the kernel returns a tuple only on request
    return attended


def build_mask(*, q_length: int, kv_length: int, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor | None:
    """Build the mask of padded rows. A packed row needs none, because `attend_text` separates its samples by the layout.

    transformers would build a mask for all pairs of the row's tokens if the positions that it gets restart or jump.
    """
    if attention_mask is None and q_length == kv_length:
        return None
    mask: Tensor | None = sdpa_mask(q_length=q_length, kv_length=kv_length, attention_mask=attention_mask, **kwargs)
    return mask


def use_segments(model: PreTrainedModel) -> None:
    """Make the text layers and the vision tower of a built model use this module's attention.

    Raises:
        CheckpointError: some text layers use sliding-window attention, which this module does not support.
    """
    text = model.config.get_text_config()
    sliding = [number for number, kind in enumerate(get_layer_types(text)) if kind not in SUPPORTED]
    if sliding:
        raise CheckpointError(
            f'{model.name_or_path}: {len(sliding)} text layers use sliding-window attention, which model.attention = "auto" '
            'does not support; set model.attention = "sdpa" and train.packing = false'
        )
    # The names are set on the built model, because transformers would require the flash-attention package if the second name
    # were passed when the model is built.
    text._attn_implementation = TEXT
    if get_family(model.config.model_type).vision is not None:
        model.config.vision_config._attn_implementation = VISION


def check_attention(family: Family, attention: str, *, packing: bool = False) -> None:
    """Raise ConfigError if `model.attention` names an implementation that takes media tokens for the starts of samples."""
    if family.has_text_positions or attention == "auto":
        return
    if attention.startswith("flash"):
        scope, remedy = "", ""
    elif packing:
        scope, remedy = " with packed rows", ", or train.packing = false"
    else:
        return
    raise ConfigError(
        f'model.attention = "{attention}" does not work for {family.name}{scope}, because transformers takes media tokens for '
        f'the starts of samples; set model.attention = "auto"{remedy}'
    )


def has_segment_attention(model: PreTrainedModel) -> bool:
    return bool(model.config.get_text_config()._attn_implementation == TEXT)


def to_model_positions(model: PreTrainedModel, position_ids: Tensor) -> Tensor:
    """Convert positions `[3, B, T]` to the shape that the model expects, which is `[B, T]` for text-only models."""
    return position_ids if get_family(model.config.model_type).vision is not None else position_ids[0]


def build_attention_inputs(model: PreTrainedModel, batch: Batch, group: Group = None) -> dict[str, Any]:
    """Build the forward arguments that separate a batch's samples: a mask, positions, and the layout of a packed row.

    If the model does not use this module's attention, it needs four rows of positions and no mask: transformers then starts a new
    sample wherever the first row of positions restarts.

    Args:
        group: ranks that compute a row together, if the batch has one part per rank.

    Raises:
        ValueError: transformers would silently let samples attend to each other, or could not make a completion attend to its
            prompt.
    """
    if not batch.segments:
        return {"attention_mask": batch.attention_mask, "position_ids": to_model_positions(model, batch.position_ids)}
    if batch.attention_mask is not None:
        raise ValueError(
            "a packed row has an attention mask, which would make transformers ignore the sample boundaries and let samples "
            "attend to each other; remove the mask"
        )
    if batch.position_ids.shape[0] != 3:
        raise ValueError(
            f"a packed row must have positions on 3 axes (temporal, height, width); got {batch.position_ids.shape[0]}"
        )
    text, device = model.config.get_text_config(), batch.input_ids.device
    inputs: dict[str, Any] = {"attention_mask": None}
    if has_delta_nets(text):
        inputs[LAYOUT] = build_delta_layout(batch.segments, text.linear_conv_kernel_dim, device)
    if has_segment_attention(model):
        layout = build_row_layout(batch.segments, device, group if batch.part is not None else None)
        return inputs | {"position_ids": to_model_positions(model, batch.position_ids), "layout": layout}
    if any(segment.parent is not None for segment in batch.segments):
        raise ValueError('the samples of a packed row share a prompt, which only model.attention = "auto" supports')
    family = get_family(model.config.model_type)
    if not family.has_text_positions:
        raise ValueError(f'packed rows of {family.name} need model.attention = "auto"')
    if family.vision is None:  # one row of positions suffices: it restarts with each sample
        return inputs | {"position_ids": batch.position_ids[0]}
    counts = torch.cat([torch.arange(segment.length) for segment in batch.segments])[None, None]
    return inputs | {"position_ids": torch.cat([counts.to(device), batch.position_ids])}


AttentionInterface.register(TEXT, attend_text)
AttentionMaskInterface.register(TEXT, build_mask)
AttentionInterface.register(VISION, attend_vision)
