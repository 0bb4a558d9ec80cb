"""Media features: a single call of the vision tower encodes each distinct image and video of a batch exactly once.

The modules of a model therefore run in the same order for all batches; ZeRO-3 records this order for prefetching. Nothing in this
module waits for the GPU: the layout of the media is computed on the host and copied to the GPU.
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
    """Encode the media that are concatenated in `pixels` `[patches, dim]` to a list of features, each `[tokens, D]`.

    The first tensor replaces the embeddings of the placeholders; any further tensors (DeepStack) are added to the outputs of
    the first decoder layers. `grids` `[media, 3]` must be on the host.
    """
    family = get_family(model.config.model_type)
    assert family.modules.vision_tower is not None
    tower = model.get_submodule(family.modules.vision_tower)
    layout = {
        name: copy_to_device(value, pixels.device) if isinstance(value, Tensor) else value
        for name, value in family.tower_layout(tower.config, grids).items()
    }
    output = tower(pixels.type(tower.dtype), **layout)
    return [output.pooler_output, *(output.get("deepstack_features") or [])]


def build_batch_inputs(model: PreTrainedModel, batch: Batch) -> dict[str, Any]:
    """Return the inputs of the language model for the tokens and media of a batch."""
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
    """Embed `input_ids` `[B, T]`, with `features` `[M, D]` at the positions `indices` `[M]` of the flattened rows."""
    embeddings = model.get_input_embeddings()(input_ids)
    first, *deeper = (layer.to(embeddings.device, embeddings.dtype) for layer in features)
    indices = copy_to_device(indices, embeddings.device)
    inputs = {"inputs_embeds": embeddings.flatten(0, 1).index_copy(0, indices, first).view_as(embeddings)}
    if deeper:
        inputs |= {"visual_pos_masks": indices, "deepstack_visual_embeds": deeper}
    return inputs


class PatchProduct(nn.Conv3d):
    """A convolution whose stride equals its kernel size, computed as a matrix product because cuDNN is slow at it in bf16."""

    def forward(self, patches: Tensor) -> Tensor:
        """Embed patches that are as large as the kernel: `[N, channels, frames, height, width]` → `[N, D, 1, 1, 1]`."""
        return linear(patches.flatten(1), self.weight.flatten(1), self.bias)[..., None, None, None]


def patch_vision(model: PreTrainedModel) -> None:
    """Make this model object embed patches with a matrix product and add DeepStack features by index.

    transformers adds the features with a mask, which makes the host wait for the GPU.
    """
    name = get_family(model.config.model_type).modules.vision_tower
    if name is None:
        return
    for module in model.get_submodule(name).modules():
        if type(module) is nn.Conv3d and module.kernel_size == module.stride:
            module.__class__ = PatchProduct
    model.get_decoder()._deepstack_process = add_at_indices


def add_at_indices(hidden: Tensor, places: Tensor, features: Tensor) -> Tensor:
    """Add `features` `[M, D]` to `hidden` `[B, T, D]` at `places`: indices into the flattened rows, or transformers' mask."""
    indices = places.flatten().nonzero().flatten() if places.dtype == torch.bool else places
    features = features.to(hidden.device, hidden.dtype)
    return hidden.flatten(0, 1).index_add(0, indices.to(hidden.device), features).view_as(hidden)
