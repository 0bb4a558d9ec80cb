"""Phases of a training step on one GPU: forward and backward at their peak, and the optimizer step."""

from __future__ import annotations

from dataclasses import dataclass

from dsreason.config.schema_grpo import GRPOConfig
from dsreason.families import get_family
from dsreason.models.logprobs import MAX_LOGITS, MAX_LOGITS_ON_GPU
from dsreason.tools.planning.phases import MemoryItem, PlannedPhase, find_largest
from dsreason.tools.planning.request import PlanRequest
from dsreason.tools.planning.states import FP32, States, compute_gathered


@dataclass(frozen=True)
class Activations:
    """Bytes of a row's activations on one rank."""

    inputs: int
    """Tensors that text layers keep for the backward pass: only their inputs, or all of them without gradient checkpointing."""
    around: int
    """Tensors outside the layers: embeddings, last hidden states, hidden states of trained tokens, final norm."""
    tower: int
    """Tensors that the vision tower keeps for its backward pass; 0 if it is frozen."""
    pixels: int
    features: int
    """Tensors that the mergers keep for their backward pass; at least their outputs, the features of media tokens."""
    deeper: int
    """Tensors that the mergers of the DeepStack layers keep until the backward pass reaches their block."""
    layer: int
    block: int
    head: int
    logits: int
    """Number of tokens (not bytes) whose logits exist at the same time."""
    on_host: int = 0
    """Bytes that are offloaded to the host until the backward pass."""


def compute_activations(request: PlanRequest) -> Activations:
    config, shape, pieces = request.config, request.shape, request.pieces
    tokens, width = request.tokens, request.width
    hidden = tokens * shape.hidden * width
    layer = pieces.trace_text_layer(tokens)
    recomputing = config.model.gradient_checkpointing
    inputs = shape.layers * (hidden if recomputing else layer.kept)
    moved = inputs if config.train.activation_offload else 0
    tower, pixels, features, deeper, block = compute_vision_bytes(request)
    chunk = compute_logits_chunk(request)
    trained = tokens if request.trained_tokens is None else request.trained_tokens
    head = pieces.trace_head(
        trained, chunk, with_entropy=isinstance(config, GRPOConfig), trained=is_head_trained(request)
    )
    return Activations(
        inputs=hidden if moved else inputs,
        # Embeddings with and without media, the last layer's output, and the hidden states of trained tokens.
        around=4 * hidden + pieces.trace_final_norm(tokens).kept,
        tower=tower,
        pixels=pixels,
        features=features,
        deeper=deeper,
        layer=(layer.peak if recomputing else layer.peak - layer.kept) + compute_exchanged(request),
        block=block,
        head=head.peak,
        logits=min(chunk, trained),
        on_host=moved,
    )


def compute_logits_chunk(request: PlanRequest) -> int:
    """Return the number of tokens whose logits exist at a time."""
    most = MAX_LOGITS_ON_GPU if request.machine.device == "cuda" else MAX_LOGITS
    return max(1, most // request.shape.vocabulary)


def compute_vision_bytes(request: PlanRequest) -> tuple[int, int, int, int, int]:
    """Return the fields tower, pixels, features, deeper and block of `Activations`."""
    shape, width, pieces = request.shape, request.width, request.pieces
    if not shape.vision_depth:
        return 0, 0, 0, 0, 0
    trained = is_tower_trained(request)
    tokens = count_media_tokens(request)
    patches = shape.count_patches(tokens)
    block = pieces.trace_vision_block(patches, training=trained)
    tower = 0
    if trained:
        recomputing = request.config.model.gradient_checkpointing
        each = patches * shape.vision_hidden * width if recomputing else block.kept
        tower = shape.vision_depth * each
    copied = FP32 if request.machine.device == "cuda" else 0  # on a CPU, the float32 pixels are not copied
    pixels = patches * shape.patch_values * (copied + width)
    modules = get_family(request.architecture.config.model_type).modules
    merger_trained = any(modules.is_vision(parameter.name) for parameter in request.parameters.trained)
    merger = pieces.trace_merger(patches, training=merger_trained)
    features = shape.mergers * max(merger.kept, tokens * shape.hidden * width)
    deeper = (shape.mergers - 1) * merger.kept
    return tower, pixels, features, deeper, max(block.peak, merger.peak)


def count_media_tokens(request: PlanRequest) -> int:
    """Return the maximum number of media tokens in a row on one rank."""
    if request.media_tokens is not None:
        return request.media_tokens
    budget, _ = request.config.token_budget
    if budget is not None:
        return request.tokens
    return min(
        request.tokens, count_sampled_media_tokens(request, request.row_tokens // request.config.model.max_length)
    )


def count_sampled_media_tokens(request: PlanRequest, samples: int) -> int:
    """Return the maximum number of media tokens in `samples` samples: all tokens, or fewer if `[data.vision]` limits them."""
    cell = request.shape.token_pixels
    limits = []
    for vision in (source.vision for source in request.config.data.list_sources()):
        token_limits = [request.config.model.max_length]
        if vision.total_pixels:
            token_limits.append(-(-vision.total_pixels // cell))
        if vision.nframes and vision.max_pixels:
            token_limits.append(-(-vision.nframes // request.shape.frames_per_patch) * -(-vision.max_pixels // cell))
        limits.append(min(token_limits))
    return samples * max(limits)


def compute_exchanged(request: PlanRequest) -> int:
    """Return the bytes of queries, keys and values that a rank exchanges with the other ranks of a row for attention."""
    shape, ranks = request.shape, request.config.ranks_per_row
    if ranks == 1:
        return 0
    heads = shape.heads + 2 * max(shape.kv_heads, ranks)
    return 2 * request.tokens * heads * shape.head_size * request.width


def is_tower_trained(request: PlanRequest) -> bool:
    modules = get_family(request.architecture.config.model_type).modules
    return any(modules.is_in_tower(parameter.name) for parameter in request.parameters.trained)


def find_head_name(request: PlanRequest) -> str:
    """Return the name of the output layer's weight, which is the embedding if the two are tied."""
    names = {parameter.name for parameter in request.parameters.all}
    head_weight = f"{get_family(request.architecture.config.model_type).modules.head}.weight"
    return head_weight if head_weight in names else next(name for name in names if name.endswith("embed_tokens.weight"))


def is_head_trained(request: PlanRequest) -> bool:
    return find_head_name(request) in {parameter.name for parameter in request.parameters.trained}


def is_tied(request: PlanRequest) -> bool:
    return find_head_name(request).endswith("embed_tokens.weight")


def compute_reduction(request: PlanRequest) -> tuple[int, int]:
    """Return the bytes of gradient copies during a reduction: for a bucket, and for the largest gradient that exceeds it.

    Gradients that share the bucket are reordered in a copy of it. A gradient larger than the bucket is reduced separately, with
    one copy in its data type and one in fp32. The output layer's gradient is reduced when the last layer's first gradient is
    computed.
    """
    bucket = request.zero.number("reduce_bucket_size")
    large = max((parameter.numel for parameter in request.parameters.trained if parameter.numel > bucket), default=0)
    small = sum(parameter.numel for parameter in request.parameters.trained if parameter.numel <= bucket)
    copies = FP32 if request.width == FP32 else request.width + FP32
    return FP32 * min(bucket, small), copies * large


def list_held_items(states: States, extra: tuple[MemoryItem, ...]) -> tuple[MemoryItem, ...]:
    """Return what a GPU holds while the policy is trained or evaluated: DeepSpeed's memory and the items in `extra`."""
    return (
        MemoryItem("weights", states.weights + states.persistent),
        MemoryItem("gradients, fp32", states.gradients),
        MemoryItem("optimizer: master weights and moments, fp32", states.optimizer),
        MemoryItem("bucket for reducing gradients", states.bucket),
        *extra,
    )


def plan_training(request: PlanRequest, held: tuple[MemoryItem, ...]) -> list[PlannedPhase]:
    """Plan the phases of a training step on one GPU; the items in `held` are on the GPU throughout."""
    return [plan_forward_backward(request, held), plan_optimizer_step(request, held)]


def plan_optimizer_step(request: PlanRequest, held: tuple[MemoryItem, ...]) -> PlannedPhase:
    copied = 0
    if not request.zero.offloads("optimizer"):
        num_values = request.parameters.count_trained_share(request.machine.gpus)
        copied = FP32 * min(num_values, request.zero.number("sub_group_size"))
    return PlannedPhase("optimizer step", (*held, MemoryItem("concatenated gradients of a sub-group", copied)))


def compute_block_gradients(request: PlanRequest) -> MemoryItem:
    """Return the gradients of the largest block: ZeRO-3 reduces all gradients of a block together, after its backward pass."""
    trained = request.parameters.trained_blocks if request.zero.stage == 3 else {}
    return MemoryItem("gradients of a block until they are reduced", request.width * max(trained.values(), default=0))


def plan_forward_backward(request: PlanRequest, held: tuple[MemoryItem, ...]) -> PlannedPhase:
    """Plan forward and backward at the moment of highest memory use."""
    activations = compute_activations(request)
    at_work, ahead = compute_gathered(request)
    small_buckets, one_large = compute_reduction(request)
    held = (*held, MemoryItem("gathered weights in use", at_work), MemoryItem("prefetched weights", ahead))
    media = (
        MemoryItem("vision tower, kept for its backward pass", activations.tower),
        MemoryItem("pixels", activations.pixels),
    )
    layers = "inputs of the text layers" if request.config.model.gradient_checkpointing else "text layers"
    waiting = (
        MemoryItem(layers, activations.inputs, f"{request.tokens:,} tokens"),
        MemoryItem("hidden states outside the layers", activations.around),
        *media,
        MemoryItem("media features", activations.features),
    )
    tied = 0  # bytes of the output layer's gradient, which waits for the input embedding's
    if is_tied(request) and is_head_trained(request):
        tied = request.width * request.shape.vocabulary * request.shape.hidden
    embedding = MemoryItem("gradient of the tied embedding", tied)
    logits = f"logits of {activations.logits:,} tokens at a time"
    moving = "copies of gradients being reduced"
    moments = {
        "output layer": (*waiting, MemoryItem("output layer and loss", activations.head, logits)),
        "a text layer": (
            *waiting,
            embedding,
            MemoryItem(moving, max(small_buckets, 0 if tied else one_large)),
            MemoryItem("activations of one text layer", activations.layer),
            compute_block_gradients(request),
        ),
        "vision tower": (
            *media,
            MemoryItem("media features", activations.deeper),
            embedding,
            MemoryItem(moving, small_buckets),
            MemoryItem("activations of one vision block", activations.block),
        ),
        "embedding": (embedding, MemoryItem(moving, max(small_buckets, one_large))),
    }
    return find_largest(
        [PlannedPhase(f"forward and backward ({name})", (*held, *items)) for name, items in moments.items()]
    )
