"""Memory of one host that its ranks take, and disk space of checkpoints and exports."""

from __future__ import annotations

from dsreason.config.schema_grpo import GRPOConfig
from dsreason.losses.objective import objective_of
from dsreason.tools.planning.phases import GIB, Item, Phase
from dsreason.tools.planning.request import Request
from dsreason.tools.planning.states import States

PROCESS = 4 * GIB
"""Allowance for a rank: Python, torch and CUDA's libraries. Not measured on a GPU."""
WORKER = GIB
"""Allowance for a process that decodes media, with the rows it holds."""


def has_reference(request: Request) -> bool:
    """Return whether a copy of the trained weights is kept for a KL; with adapters the base is the reference."""
    config = request.config
    return isinstance(config, GRPOConfig) and not config.lora.rank and bool(objective_of(config.grpo).kl_coef)


def host_phase(request: Request, states: States, waiting: int, *, moved: int, vllm: int = 0, teacher: int = 0) -> Phase:
    """Plan the memory of one host.

    Args:
        waiting: bytes of one rank's activations that wait there.
        moved: bytes of one rank's optimizer that wait there while completions are sampled.
        vllm: bytes of one rank.
        teacher: bytes of one rank.
    """
    config, ranks = request.config, request.machine.ranks_per_host
    shares = request.width * request.parameters.trained_shares(request.machine.gpus)
    items = [
        Item("weights, gradients and optimizer (offload)", states.host),
        Item("optimizer while completions are sampled, pinned", moved),
        Item("activations (train.activation_offload)", waiting),
        Item("reference and policy while the other is in place, pinned", 2 * shares if has_reference(request) else 0),
        Item("teacher", teacher),
        Item("vLLM: processed media, weights at sleep level 1", vllm),
        Item("rank itself", PROCESS, "allowance"),
        Item("data workers", config.data.workers * WORKER, "allowance"),
    ]
    return Phase(
        "host memory", tuple(Item(item.name, ranks * item.nbytes, item.note) for item in items)
    ).without_empty()


def checkpoint_copy(request: Request) -> int:
    """Bytes of one host, which a checkpoint is copied to where they are free; else training waits until it is written."""
    checkpoint, machine = request.config.checkpoint, request.machine
    if not checkpoint.background or not (checkpoint.every or checkpoint.last):
        return 0
    return checkpoint_bytes(request) * machine.ranks_per_host // machine.gpus


def checkpoint_bytes(request: Request) -> int:
    """Return the bytes of all ranks: master weights, moments and the weights themselves; only of adapters if they are trained."""
    parameters, width = request.parameters, request.width
    frozen = 0 if request.config.lora.rank else parameters.numel - parameters.num_trained
    return (12 + width) * parameters.num_trained + width * frozen


def export_bytes(request: Request) -> int:
    dtype = request.config.checkpoint.export_dtype
    width = request.width if dtype == "auto" else {"bf16": 2, "fp32": 4}[dtype]
    if request.config.lora.rank:  # the adapter beside the merged model
        return width * (request.parameters.numel + request.parameters.num_trained)
    return width * request.parameters.numel


def disk_phase(request: Request) -> Phase:
    """All that is kept, and the checkpoint that is being written."""
    checkpoint = request.config.checkpoint
    num_kept = max(checkpoint.keep, 1) + checkpoint.keep_best + 1
    writes = checkpoint.every > 0 or checkpoint.last
    each = checkpoint_bytes(request)
    note = f"{each / GIB:.0f} GiB each" + (", and checkpoint.keep = -1 keeps all" if checkpoint.keep == -1 else "")
    return Phase(
        "disk",
        (
            Item(f"{num_kept} checkpoints, one of them being written", num_kept * each if writes else 0, note),
            Item("an export", export_bytes(request) if checkpoint.export != "none" else 0),
        ),
    ).without_empty()
