"""Media features: one call of the vision tower encodes all distinct images and videos of a batch, each exactly once.

The modules of a model therefore run in the same order for all batches, which ZeRO-3 records for prefetching. No function in this
module waits for the GPU, because the layout of the media is computed on the host and then copied to the GPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from dsreason.data.collate import find_media_tokens, join_pixels
from dsreason.data.types import Batch, copy_to_device
from dsreason.families import get_family

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def encode_media(model: PreTrainedModel, pixels: Tensor, grids: Tensor) -> list[Tensor]:
    """Encode the concatenated media `pixels` `[patches, dim]` to a list of feature tensors, each `[tokens, D]`.

    The first tensor replaces the embeddings of the placeholders; any further tensors (DeepStack) are added to the outputs of
    the first decoder layers. `grids` `[media, 3]` must be on the host.
    """
    family = get_family(model.config.model_type)
    assert family.modules.vision_tower is not None
    tower = model.get_submodule(family.modules.vision_tower)
    layout = family.tower_layout(tower.config, grids)
    for name, value in layout.items():
        if isinstance(value, Tensor) and name not in family.host_arguments:
            layout[name] = copy_to_device(value, pixels.device)
    output = tower(pixels.type(tower.dtype), **layout)
    if family.modules.projects_outside_tower:
        return [model.get_submodule(family.modules.projector)(output.last_hidden_state)]
    return [output.pooler_output, *(output.get("deepstack_features") or [])]


def build_batch_inputs(model: PreTrainedModel, batch: Batch) -> dict[str, Any]:
    """Build the language model's inputs for the tokens and media of a batch."""
    media = find_media_tokens(batch)
    if media is None:
        return {"input_ids": batch.input_ids}
    features = encode_media(model, join_pixels(batch), media.grids)
    return build_token_inputs(
        model, batch.input_ids, media.indices, [media.repeat_features(layer) for layer in features]
    )


def build_token_inputs(
    model: PreTrainedModel, input_ids: Tensor, indices: Tensor, features: list[Tensor]
) -> dict[str, Any]:
    """Embed `input_ids` `[B, T]`, with the media `features` `[M, D]` at `indices` `[M]`, which index the flattened rows."""
    embeddings = model.get_input_embeddings()(input_ids)
    first, *deeper = (layer.to(embeddings.device, embeddings.dtype) for layer in features)
    indices = copy_to_device(indices, embeddings.device)
    inputs = {"inputs_embeds": embeddings.flatten(0, 1).index_copy(0, indices, first).view_as(embeddings)}
    if deeper:
        inputs |= {"visual_pos_masks": indices, "deepstack_visual_embeds": deeper}
    return inputs


class PatchProduct(nn.Conv3d):
    """Convolution whose stride equals its kernel size, computed as a matrix product because cuDNN is slow at it in bf16."""

    def forward(self, patches: Tensor) -> Tensor:
        """Embed patches of the kernel's size: `[N, channels, frames, height, width]` → `[N, D, 1, 1, 1]`."""
        return linear(patches.flatten(1), self.weight.flatten(1), self.bias)[..., None, None, None]


def patch_vision(model: PreTrainedModel) -> None:
    """Make a model object embed patches with a matrix product, and add DeepStack features at indices instead of with a mask.

    A mask, which transformers uses, makes the host wait for the GPU.
    """
    name = get_family(model.config.model_type).modules.vision_tower
    if name is None:
        return
    for module in model.get_submodule(name).modules():
        if type(module) is nn.Conv3d and module.kernel_size == module.stride:
            module.__class__ = PatchProduct
    model.get_decoder()._deepstack_process = add_at_indices


def add_at_indices(hidden: Tensor, positions: Tensor, features: Tensor) -> Tensor:
    """Add `features` `[M, D]` to `hidden` `[B, T, D]` at `positions`: indices into the flattened rows, or transformers' mask."""
    indices = positions.flatten().nonzero().flatten() if positions.dtype == torch.bool else positions
    features = features.to(hidden.device, hidden.dtype)
    return hidden.flatten(0, 1).index_add(0, indices.to(hidden.device), features).view_as(hidden)
