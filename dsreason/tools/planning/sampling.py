"""Phases in which completions are sampled, by vLLM or by a separate copy of the model in plain transformers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import get_args

from dsreason.config.schema_grpo import GRPOConfig, OffloadMode
from dsreason.engine.rollout_memory import EVERYTHING, NOTHING, RolloutMemory, choose_amount
from dsreason.errors import ConfigError
from dsreason.rollout.vllm_arguments import BATCHED_TOKENS, MAX_SEQUENCES, MEDIA_BYTES_PER_TOKEN, MIN_SEQUENCES
from dsreason.tools.planning.phases import GIB, MemoryItem, PlannedPhase
from dsreason.tools.planning.request import PlanRequest
from dsreason.tools.planning.states import FP32, States

BLOCK = 16
"""Tokens per block of vLLM's KV cache."""
GRAPHS = GIB
"""Allowance in bytes for compiled graphs and vLLM's buffers, which are kept while vLLM sleeps. It has not been measured."""
EAGER = GIB // 4
"""The same allowance if `rollout.enforce_eager` is set."""
SAMPLER_COPIES = 3
"""Number of float32 copies of the logits that exist while tokens are sampled."""
FINGERPRINT = 2 * 2**24 * 8
"""Bytes of the float64 copies that a weight sync compares."""


@dataclass
class VLLM:
    """Memory that vLLM needs on one GPU, in bytes."""

    request: PlanRequest
    config: GRPOConfig

    @property
    def parallel(self) -> int:
        return self.config.rollout.tensor_parallel_size

    @property
    def share(self) -> int:
        """Bytes of the GPU that vLLM may use while it is awake."""
        return int(self.request.machine.gpu_bytes * self.config.rollout.gpu_memory_utilization)

    @cached_property
    def weights(self) -> int:
        """Bytes of the weights on one GPU: adapters are merged, and 4-bit weights are expanded to the run's precision."""
        return -(-self.request.parameters.numel * self.request.width // self.parallel)

    @property
    def overhead(self) -> int:
        return EAGER if self.config.rollout.enforce_eager else GRAPHS

    @property
    def longest(self) -> int:
        """Maximum number of tokens in a prompt and its completion together."""
        return self.config.model.max_length + self.config.validation.max_completion_length

    @property
    def max_sequences(self) -> int:
        """Maximum number of completions that the engine samples at the same time."""
        engines = self.request.machine.gpus // self.parallel
        num_completions = -(-self.config.grpo.prompts_per_step // engines) * self.config.grpo.num_generations
        max_num_seqs = self.config.rollout.engine_options.get("max_num_seqs")
        return int(max_num_seqs or min(MAX_SEQUENCES, max(num_completions, MIN_SEQUENCES)))

    @cached_property
    def working(self) -> int:
        """Peak bytes of a forward pass, which vLLM measures at startup to determine the size of the KV cache."""
        shape, pieces = self.request.shape, self.request.pieces
        batched = int(self.config.rollout.engine_options.get("max_num_batched_tokens", BATCHED_TOKENS))
        layer = pieces.trace_text_layer(batched, training=False).peak // self.parallel
        logits = SAMPLER_COPIES * self.max_sequences * shape.vocabulary * 4
        block = (
            pieces.trace_vision_block(shape.count_patches(batched), training=False).peak if shape.vision_depth else 0
        )
        features = batched * shape.hidden * shape.mergers * self.request.width
        return max(layer, logits, block) + features

    @property
    def cache(self) -> int:
        """Bytes that remain for the KV cache; negative if the share is too small."""
        return self.share - self.weights - self.working - self.overhead - self.states

    @property
    def states(self) -> int:
        """Bytes of the float32 states that the delta nets keep for the sequences that are sampled at the same time."""
        return FP32 * self.max_sequences * self.request.shape.state_values // self.parallel

    @property
    def token_bytes(self) -> int:
        """Bytes of keys and values per token."""
        shape = self.request.shape
        heads = max(1, shape.kv_heads // self.parallel)
        return 2 * shape.attention_layers * heads * shape.head_size * self.request.width

    @property
    def cache_tokens(self) -> int:
        return max(0, self.cache // (self.token_bytes * BLOCK) * BLOCK)

    @property
    def whole_sequences(self) -> float:
        """Number of sequences of maximum length that the KV cache holds at the same time."""
        return self.cache_tokens / self.longest

    @property
    def asleep(self) -> MemoryItem:
        return MemoryItem("graphs and buffers of vLLM while it sleeps", self.overhead, "allowance")

    @property
    def host(self) -> int:
        """Bytes of host memory per rank: processed media and, at sleep level 1, a copy of vLLM's weights."""
        media = max(1.0, 2 * self.longest * MEDIA_BYTES_PER_TOKEN / GIB) * GIB
        return int(media) + (self.weights if self.config.rollout.sleep_level == 1 else 0)

    def to_json(self) -> dict[str, float]:
        return {
            "share_bytes": self.share,
            "weights_bytes": self.weights,
            "working_bytes": self.working + self.overhead,
            "kv_cache_bytes": max(0, self.cache),
            "kv_cache_tokens": self.cache_tokens,
            "longest_sequence_tokens": self.longest,
            "whole_sequences": round(self.whole_sequences, 1),
            "sequences_drawn_together": self.max_sequences,
        }


def compute_sync_bucket(vllm: VLLM) -> int:
    """Return how many bytes of unsharded weights a weight sync gathers at a time."""
    largest = max(parameter.numel for parameter in vllm.request.parameters.all) * vllm.request.width
    return max(int(vllm.config.rollout.sync_bucket_mb * 2**20), largest)


@dataclass(frozen=True)
class RolloutOffload:
    moved: int
    """Bytes per rank that move to the host and back for each rollout."""
    staying: tuple[MemoryItem, ...]
    note: str = ""


def plan_offload(
    request: PlanRequest, states: States, vllm: VLLM | None, extra: tuple[MemoryItem, ...]
) -> RolloutOffload:
    """Plan which training state moves to the host for a rollout.

    Only GRPO can choose: the other trainers move everything to the host when validation generates answers.

    Args:
        extra: items on the GPU that are not part of DeepSpeed's memory.

    Raises:
        ConfigError: `rollout.offload` is "never", and vLLM's share does not fit.
    """
    mode: OffloadMode = request.config.rollout.offload if isinstance(request.config, GRPOConfig) else "always"
    if vllm is None:
        amount, note = NOTHING if mode == "never" else EVERYTHING, ""
    else:
        memory = build_rollout_memory(vllm, states, extra)
        amount, note = choose_amount(mode, memory), describe_modes(mode, memory)
    moved = min(amount.move_bytes, states.optimizer)
    staying = (
        MemoryItem("optimizer state that stays", states.optimizer - moved),
        MemoryItem("gradient buffers that stay", 0 if amount.drop_gradients else states.gradients + states.bucket),
    )
    return RolloutOffload(moved, staying, note)


def build_rollout_memory(vllm: VLLM, states: States, extra: tuple[MemoryItem, ...]) -> RolloutMemory:
    outside = sum(item.nbytes for item in extra if item.note == "allowance")
    return RolloutMemory(
        total=vllm.request.machine.gpu_bytes,
        vllm=vllm.share,
        fixed=states.weights + states.persistent + sum(item.nbytes for item in extra) - outside,
        gradients=states.gradients + states.bucket,
        moments=states.moments,
        masters=states.masters,
        sync=2 * compute_sync_bucket(vllm),
        outside=outside,
    )


def describe_modes(mode: OffloadMode, memory: RolloutMemory) -> str:
    """Return a note that compares the offload modes by the GiB that they move."""
    moves = ", ".join(f'"{name}" {describe_amount(name, memory)}' for name in get_args(OffloadMode))
    return f'rollout.offload = "{mode}"; state that moves to the host and back for each rollout, per GPU: {moves}'


def describe_amount(mode: OffloadMode, memory: RolloutMemory) -> str:
    try:
        amount = choose_amount(mode, memory)
    except ConfigError:
        return "does not fit"
    return f"{amount.move_bytes / GIB:.1f} GiB"


def plan_vllm_phases(vllm: VLLM, states: States, extra: tuple[MemoryItem, ...]) -> list[PlannedPhase]:
    request = vllm.request
    held = (MemoryItem("policy's weights", states.weights + states.persistent), *extra)
    largest = max(parameter.numel for parameter in request.parameters.all) * request.width
    bucket = compute_sync_bucket(vllm)
    sync = PlannedPhase(
        "weight sync",
        (
            *held,
            MemoryItem("vLLM's weights", vllm.weights),
            vllm.asleep,
            MemoryItem(
                "bucket of gathered weights",
                2 * bucket,
                f"rollout.sync_bucket_mb = {vllm.config.rollout.sync_bucket_mb:g}",
            ),
            MemoryItem("tensors in transfer, and fingerprints", largest + FINGERPRINT),
        ),
    )
    cache = f"{vllm.cache_tokens:,} tokens, {vllm.whole_sequences:.1f} sequences of {vllm.longest:,}"
    awake = PlannedPhase(
        "rollout: vLLM awake",
        (
            *held,
            MemoryItem("vLLM's weights", vllm.weights, f"tensor parallel {vllm.parallel}"),
            MemoryItem("vLLM's activations, logits and graphs", vllm.working + vllm.overhead),
            MemoryItem("states of linear attention", vllm.states, f"{vllm.max_sequences:,} sequences"),
            MemoryItem("KV cache", max(0, vllm.cache), cache),
        ),
    )
    return [sync, awake]


def plan_transformers_sampling(
    request: PlanRequest, states: States, batch: int, completion: int, extra: tuple[MemoryItem, ...]
) -> PlannedPhase:
    """Plan sampling with plain transformers: each GPU has a full copy of the model, which completes `batch` prompts at a time."""
    shape, width = request.shape, request.width
    longest = request.config.model.max_length + completion
    token = 2 * shape.attention_layers * shape.kv_heads * shape.head_size * width
    cached = batch * (longest * token + FP32 * shape.state_values)
    prefill = request.pieces.trace_text_layer(request.config.model.max_length, training=False).peak * batch
    return PlannedPhase(
        "sampling with transformers",
        (
            MemoryItem("policy's weights", states.weights + states.persistent),
            *extra,
            MemoryItem("full copy of the model", request.parameters.numel * width),
            MemoryItem("keys and values", cached, f"{batch} prompts of {longest:,} tokens"),
            MemoryItem("activations of a layer, and logits", prefill + batch * shape.vocabulary * 4 * SAMPLER_COPIES),
        ),
    )
