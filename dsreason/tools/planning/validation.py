"""The forward that measures held-out rows: nothing waits for a backward pass, but a row may be a longer one."""

from __future__ import annotations

from dsreason.tools.planning.phases import Item, Phase
from dsreason.tools.planning.request import Request
from dsreason.tools.planning.states import FP32, gathered
from dsreason.tools.planning.training import logits_chunk, shown_by


def held_out_phase(request: Request, held: tuple[Item, ...]) -> Phase:
    """`validation.micro_batch_size` rows are one forward, whatever `[train]` says of tokens."""
    shape, pieces, width = request.shape, request.pieces, request.width
    samples = request.config.validation.micro_batch_size
    tokens = samples * request.config.model.max_length
    layer = pieces.text_layer(tokens, training=False).peak
    logits = min(logits_chunk(request), tokens) * shape.vocabulary * (FP32 + width)
    media_item = Item("", 0)
    block = 0
    if shape.vision_depth:
        media = shown_by(request, samples)
        patches = shape.patches(media)
        block = pieces.vision_block(patches, training=False).peak
        values = patches * shape.patch_values * (FP32 + width) + shape.mergers * media * shape.hidden * width
        media_item = Item("pixels and features of media", values)
    at_work, ahead = gathered(request)
    return Phase(
        "validation: loss of held-out rows",
        (
            *held,
            Item(
                "hidden states",
                4 * tokens * shape.hidden * width,
                f"{samples} rows of {request.config.model.max_length:,} tokens",
            ),
            media_item,
            Item("whole weights at work", at_work),
            Item("whole weights fetched ahead", ahead),
            Item("a layer, a vision block or logits at work", max(layer, block, logits)),
        ),
    )
