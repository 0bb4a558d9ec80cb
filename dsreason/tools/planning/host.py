"""Memory that the ranks of one host need, and disk space that checkpoints and exports need."""

from __future__ import annotations

from dsreason.config.schema_grpo import GRPOConfig
from dsreason.losses.objective import build_objective
from dsreason.tools.planning.phases import GIB, MemoryItem, PlannedPhase
from dsreason.tools.planning.request import PlanRequest
from dsreason.tools.planning.states import States

PROCESS = 4 * GIB
"""Allowance in bytes per rank for Python, torch and the CUDA libraries; it has not been measured on a GPU."""
WORKER = GIB
"""Allowance in bytes per process that decodes media, including the rows in its queue."""


def has_reference(request: PlanRequest) -> bool:
    """Return whether the KL penalty needs a copy of the weights; with adapters, the base model is the reference."""
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
    """Return the number of bytes that each host needs for the copy from which a checkpoint is written in the background.

    If less memory is free, training waits until the checkpoint is written.
    """
    checkpoint, machine = request.config.checkpoint, request.machine
    if not checkpoint.background or not (checkpoint.every or checkpoint.last):
        return 0
    return compute_checkpoint_bytes(request) * machine.ranks_per_host // machine.gpus


def compute_checkpoint_bytes(request: PlanRequest) -> int:
    """Return the bytes of a checkpoint over all ranks: master weights, moments and weights; with LoRA, only the adapters'."""
    parameters, width = request.parameters, request.width
    frozen = 0 if request.config.lora.rank else parameters.numel - parameters.num_trained
    return (12 + width) * parameters.num_trained + width * frozen


def compute_export_bytes(request: PlanRequest) -> int:
    dtype = request.config.checkpoint.export_dtype
    width = request.width if dtype == "auto" else {"bf16": 2, "fp32": 4}[dtype]
    if request.config.lora.rank:  # LoRA runs export the merged model and the adapter
        return width * (request.parameters.numel + request.parameters.num_trained)
    return width * request.parameters.numel


def plan_disk(request: PlanRequest) -> PlannedPhase:
    """Plan the disk space for the checkpoints that are kept, the checkpoint being written, and the export."""
    checkpoint = request.config.checkpoint
    num_kept = max(checkpoint.keep, 1) + checkpoint.keep_best + 1
    writes = checkpoint.every > 0 or checkpoint.last
    each = compute_checkpoint_bytes(request)
    note = f"{each / GIB:.0f} GiB each" + (", and checkpoint.keep = -1 keeps all" if checkpoint.keep == -1 else "")
    return PlannedPhase(
        "disk",
        (
            MemoryItem(f"{num_kept} checkpoints, one of them being written", num_kept * each if writes else 0, note),
            MemoryItem("export", compute_export_bytes(request) if checkpoint.export != "none" else 0),
        ),
    ).drop_empty()
