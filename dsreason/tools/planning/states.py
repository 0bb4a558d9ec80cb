"""Memory that DeepSpeed 0.19.8 allocates on each GPU and its host for weights, gradients and optimizer state."""

from __future__ import annotations

from dataclasses import dataclass

from dsreason.tools.planning.request import PlanRequest

FP32 = 4
MOMENTS = 2


@dataclass(frozen=True)
class States:
    """Bytes of one rank's training state; the `host_` fields are in host memory, all others on the GPU."""

    weights: int
    persistent: int
    """Bytes of small parameters, which ZeRO-3 does not shard."""
    gradients: int
    masters: int
    moments: int
    bucket: int
    """Bytes of the bucket for reducing gradients."""
    host_weights: int = 0
    host_gradients: int = 0
    host_masters: int = 0
    host_moments: int = 0

    @property
    def optimizer(self) -> int:
        return self.masters + self.moments

    @property
    def host(self) -> int:
        return self.host_weights + self.host_gradients + self.host_masters + self.host_moments


def compute_states(request: PlanRequest) -> States:
    return compute_sharded(request) if request.zero.stage == 3 else compute_replicated(request)


def compute_sharded(request: PlanRequest) -> States:
    """Compute the states of ZeRO-3, which shards everything across the ranks."""
    zero, ranks, parameters = request.zero, request.machine.gpus, request.parameters
    weights = sum(parameter.share(ranks) for parameter in parameters.all)
    trained = parameters.count_trained_share(ranks)
    off, params_off = zero.offloads("optimizer"), zero.offloads("param")
    persistent = 0
    if ranks > 1 or params_off:
        threshold = zero.number("stage3_param_persistence_threshold")
        persistent = sum(parameter.nbytes for parameter in parameters.all if parameter.elements <= threshold)
    gradients, masters, moments = FP32 * trained, FP32 * trained, MOMENTS * FP32 * trained
    contiguous = bool(zero.section.get("contiguous_gradients", True))
    bucket = FP32 * zero.number("reduce_bucket_size") if contiguous else 0
    pinned = round_pinned_size if zero.pins("optimizer") else int
    return States(
        weights=0 if params_off else weights,
        persistent=persistent,
        gradients=0 if off else gradients,
        masters=0 if off else masters,
        moments=0 if off else moments,
        bucket=bucket,
        host_weights=weights if params_off else 0,
        # Micro-batches accumulate gradients in one buffer, and the optimizer reads them from another.
        host_gradients=2 * pinned(gradients) if off else 0,
        host_masters=masters if off else 0,
        host_moments=moments if off else 0,
    )


def compute_replicated(request: PlanRequest) -> States:
    """Compute the states of stages 1 and 2: weights are replicated; the optimizer and, at stage 2, gradients are sharded."""
    zero, ranks, parameters = request.zero, request.machine.gpus, request.parameters
    trained = parameters.num_trained
    share, off = -(-trained // ranks), zero.offloads("optimizer")
    gradients = FP32 * (share if zero.stage == 2 else trained)
    masters, moments = FP32 * share, MOMENTS * FP32 * share
    return States(
        weights=sum(parameter.nbytes for parameter in parameters.all),
        persistent=0,
        gradients=0 if off else gradients,
        masters=0 if off else masters,
        moments=0 if off else moments,
        bucket=FP32 * zero.number("reduce_bucket_size"),
        host_gradients=gradients if off else 0,
        host_masters=masters if off else 0,
        host_moments=moments if off else 0,
    )


def round_pinned_size(nbytes: int) -> int:
    """Round up to a power of two, as torch does for blocks of pinned memory."""
    return 1 << max(0, nbytes - 1).bit_length() if nbytes else 0


def compute_gathered(request: PlanRequest) -> tuple[int, int]:
    """Return how many bytes of weights ZeRO-3 gathers at a time: those in use, and those that are prefetched.

    The weights in use are one block, such as a decoder layer, or one parameter outside the blocks. Between forward and backward,
    ZeRO-3 also keeps the weights of the last layers if `stage3_max_reuse_distance` covers their use in both passes; if these
    weights are larger, they count instead. Prefetched weights count twice, because the gather copies them.
    """
    zero, parameters = request.zero, request.parameters
    is_on_device = request.machine.device == "cpu" or not zero.offloads("param")
    if zero.stage != 3 or (request.machine.gpus == 1 and is_on_device):
        return 0, 0
    everything = sum(parameter.nbytes for parameter in parameters.all)
    reused_bytes = min(everything, request.width * zero.number("stage3_max_reuse_distance") // 2)
    other_sizes = [
        parameter.nbytes
        for parameter in parameters.all
        if parameter.numel < request.shape.vocabulary * request.shape.hidden
    ]
    ahead = request.width * zero.number("stage3_prefetch_bucket_size") + max(other_sizes, default=0)
    at_work = max(reused_bytes, parameters.whole_bytes)
    return at_work, min(2 * ahead, everything)
