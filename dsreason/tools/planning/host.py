"""Memory that the ranks of one host need, and disk space of checkpoints and exports."""

from __future__ import annotations

from dsreason.config.schema_grpo import GRPOConfig
from dsreason.losses.objective import build_objective
from dsreason.tools.planning.phases import GIB, MemoryItem, PlannedPhase
from dsreason.tools.planning.request import PlanRequest
from dsreason.tools.planning.states import States

PROCESS = 4 * GIB
"""Allowance in bytes for each rank: Python, torch and the CUDA libraries. It was not measured on a GPU."""
WORKER = GIB
"""Allowance in bytes for each process that decodes media, including the rows that it holds."""


def has_reference(request: PlanRequest) -> bool:
    """Return whether a copy of the trained weights is kept for the KL penalty; with adapters, the base model is the reference."""
    config = request.config
    return isinstance(config, GRPOConfig) and not config.lora.rank and bool(build_objective(config.grpo).kl_coef)


def plan_host(
    request: PlanRequest, states: States, waiting: int, *, moved: int, vllm: int = 0, teacher: int = 0
) -> PlannedPhase:
    """Plan the memory of one host.

    Args:
        waiting: bytes of activations per rank that are offloaded to the host.
        moved: bytes of optimizer state per rank that are on the host while completions are sampled.
        vllm: bytes per rank for vLLM.
        teacher: bytes per rank for the teacher.
    """
    config, ranks = request.config, request.machine.ranks_per_host
    shares = request.width * request.parameters.count_trained_share(request.machine.gpus)
    items = [
        MemoryItem("weights, gradients and optimizer (offload)", states.host),
        MemoryItem("optimizer state during rollouts, pinned", moved),
        MemoryItem("activations (train.activation_offload)", waiting),
        MemoryItem("copies of reference and policy for swapping, pinned", 2 * shares if has_reference(request) else 0),
        MemoryItem("teacher", teacher),
        MemoryItem("vLLM: processed media, weights at sleep level 1", vllm),
        MemoryItem("process of the rank", PROCESS, "allowance"),
        MemoryItem("data workers", config.data.workers * WORKER, "allowance"),
    ]
    return PlannedPhase(
        "host memory", tuple(MemoryItem(item.name, ranks * item.nbytes, item.note) for item in items)
    ).drop_empty()


def compute_checkpoint_copy(request: PlanRequest) -> int:
    """Return the host memory, in bytes per host, for the copy from which a checkpoint is written in the background.

    If that much memory is not free, training waits until the checkpoint is written.
    """
    checkpoint, machine = request.config.checkpoint, request.machine
    if not checkpoint.background or not (checkpoint.every or checkpoint.last):
        return 0
    return compute_checkpoint_bytes(request) * machine.ranks_per_host // machine.gpus


def compute_checkpoint_bytes(request: PlanRequest) -> int:
    """Return a checkpoint's bytes over all ranks: master weights, moments and weights; with LoRA, those of the adapters only."""
    parameters, width = request.parameters, request.width
    frozen = 0 if request.config.lora.rank else parameters.numel - parameters.num_trained
    return (12 + width) * parameters.num_trained + width * frozen


def export_bytes(request: PlanRequest) -> int:
    dtype = request.config.checkpoint.export_dtype
    width = request.width if dtype == "auto" else {"bf16": 2, "fp32": 4}[dtype]
    if request.config.lora.rank:  # the adapter in addition to the merged model
        return width * (request.parameters.numel + request.parameters.num_trained)
    return width * request.parameters.numel


def plan_disk(request: PlanRequest) -> PlannedPhase:
    """Plan the disk space of the checkpoints to keep, the checkpoint being written, and the export."""
    checkpoint = request.config.checkpoint
    num_kept = max(checkpoint.keep, 1) + checkpoint.keep_best + 1
    writes = checkpoint.every > 0 or checkpoint.last
    each = compute_checkpoint_bytes(request)
    note = f"{each / GIB:.0f} GiB each" + (", and checkpoint.keep = -1 keeps all" if checkpoint.keep == -1 else "")
    return PlannedPhase(
        "disk",
        (
            MemoryItem(f"{num_kept} checkpoints, one of them being written", num_kept * each if writes else 0, note),
            MemoryItem("export", export_bytes(request) if checkpoint.export != "none" else 0),
        ),
    ).drop_empty()
