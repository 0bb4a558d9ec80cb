"""Memory for computing the loss on held-out rows.

Nothing is kept for a backward pass, but a forward pass may have more tokens than in training.
"""

from __future__ import annotations

from dsreason.tools.planning.phases import MemoryItem, PlannedPhase
from dsreason.tools.planning.request import PlanRequest
from dsreason.tools.planning.states import FP32, compute_gathered
from dsreason.tools.planning.training import compute_logits_chunk, count_sampled_media_tokens


def plan_held_out(request: PlanRequest, held: tuple[MemoryItem, ...]) -> PlannedPhase:
    """Plan the memory for computing the loss on held-out rows.

    Each pass processes `validation.micro_batch_size` rows; the limits in `[train]` do not apply.
    """
    shape, pieces, width = request.shape, request.pieces, request.width
    samples = request.config.validation.micro_batch_size
    tokens = samples * request.config.model.max_length
    layer = pieces.trace_text_layer(tokens, training=False).peak
    logits = min(compute_logits_chunk(request), tokens) * shape.vocabulary * (FP32 + width)
    media_item = MemoryItem("", 0)
    block = 0
    if shape.vision_depth:
        media = count_sampled_media_tokens(request, samples)
        patches = shape.count_patches(media)
        block = pieces.trace_vision_block(patches, training=False).peak
        values = patches * shape.patch_values * (FP32 + width) + shape.mergers * media * shape.hidden * width
        media_item = MemoryItem("pixels and media features", values)
    at_work, ahead = compute_gathered(request)
    return PlannedPhase(
        "validation: loss of held-out rows",
        (
            *held,
            MemoryItem(
                "hidden states",
                4 * tokens * shape.hidden * width,
                f"{samples} samples of {request.config.model.max_length:,} tokens",
            ),
            media_item,
            MemoryItem("gathered weights in use", at_work),
            MemoryItem("prefetched weights", ahead),
            MemoryItem("activations of a layer or vision block, or logits", max(layer, block, logits)),
        ),
    )
