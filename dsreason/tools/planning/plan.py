"""Plan of a run: the memory of each phase on a GPU, the host memory, the disk space, and whether the run fits."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from dsreason.config.schema_dpo import DPOConfig
from dsreason.config.schema_grpo import GRPOConfig
from dsreason.engine.rollout_memory import CONTEXT, FRAGMENTS, NCCL
from dsreason.tools.planning.architecture import find_architecture
from dsreason.tools.planning.host import compute_checkpoint_copy, plan_disk, plan_host
from dsreason.tools.planning.parameters import build_meta_model, count_parameters
from dsreason.tools.planning.phases import GIB, MemoryItem, PlannedPhase, find_largest
from dsreason.tools.planning.request import PlanRequest
from dsreason.tools.planning.sampling import VLLM, plan_offload, plan_transformers_sampling, plan_vllm_phases
from dsreason.tools.planning.states import compute_states
from dsreason.tools.planning.training import compute_activations, list_held_items, plan_training
from dsreason.tools.planning.validation import plan_held_out


@dataclass
class Plan:
    """Plan of a run.

    Example: `plan_run(request).fits`.
    """

    request: PlanRequest
    phases: list[PlannedPhase]
    """Phases of the run, each with the items in the memory of one GPU."""
    host: PlannedPhase
    disk: PlannedPhase
    vllm: VLLM | None = None
    notes: list[str] = field(default_factory=list)
    offloaded: int = 0
    """Bytes per rank that are moved to the host for each rollout."""

    @property
    def fullest(self) -> PlannedPhase:
        return find_largest(self.phases)

    @property
    def limit(self) -> int:
        return self.request.machine.gpu_bytes

    @property
    def room(self) -> int:
        """Bytes of GPU memory that are free in the fullest phase; negative if the phase does not fit."""
        return self.limit - self.fullest.total

    @cached_property
    def problems(self) -> list[str]:
        """Reasons why the run does not fit; empty if it fits."""
        lines = [
            f"{phase.name}: needs {phase.total / GIB:.1f} GiB, but a GPU has only {self.limit / GIB:.1f} GiB"
            for phase in self.phases
            if phase.total > self.limit
        ]
        if self.vllm is not None and self.vllm.whole_sequences < 1:
            lines.append(
                f"rollout: the KV cache holds {self.vllm.cache_tokens:,} tokens, but one sequence has up to "
                f"{self.vllm.longest:,}, so vLLM does not start"
            )
        return lines

    @property
    def fits(self) -> bool:
        return not self.problems


def plan_run(request: PlanRequest) -> Plan:
    """Plan the run.

    Raises:
        ConfigError: the run would refuse to start on this machine.
    """
    config = request.config
    states = compute_states(request)
    outside = [MemoryItem("CUDA context and libraries", CONTEXT, "allowance")]
    if request.machine.gpus > 1:
        outside.append(MemoryItem("NCCL", NCCL, "allowance"))
    on_gpu, on_host, fetched = compute_teacher_bytes(request)
    extra = (*outside, MemoryItem("teacher's weights", on_gpu))
    vllm = VLLM(request, config) if isinstance(config, GRPOConfig) and config.rollout.engine == "vllm" else None
    offload = plan_offload(request, states, vllm, extra)
    during_rollout = (*extra, *offload.staying)
    sampling: list[PlannedPhase] = []
    if vllm:
        sampling = plan_vllm_phases(vllm, states, during_rollout)
    elif isinstance(config, GRPOConfig):
        sampling = [
            plan_transformers_sampling(
                request, states, config.rollout.batch_size, config.rollout.max_completion_length, during_rollout
            )
        ]
    elif config.validation.generate and config.data.validation != 0:
        batch, completion = config.validation.micro_batch_size, config.validation.max_completion_length
        sampling = [plan_transformers_sampling(request, states, batch, completion, extra)]
    other_items = (*extra, *([vllm.asleep] if vllm else []), MemoryItem("teacher's gathered weights", fetched))
    held = list_held_items(states, other_items)
    training = plan_training(request, held)
    if config.data.validation != 0 and not isinstance(
        config, DPOConfig
    ):  # DPO batches held-out pairs like training pairs, so validation needs no more memory
        training.append(plan_held_out(request, held))
    # vLLM fills its share to the last byte, so its phase needs no allowance for fragmentation.
    phases = [phase if vllm and phase is sampling[-1] else add_fragments(phase) for phase in [*sampling, *training]]
    waiting = compute_activations(request).on_host
    host = plan_host(request, states, waiting, moved=offload.moved, vllm=vllm.host if vllm else 0, teacher=on_host)
    notes = [*list_notes(request), *([offload.note] if offload.note else [])]
    return Plan(request, [phase.drop_empty() for phase in phases], host, plan_disk(request), vllm, notes, offload.moved)


def add_fragments(phase: PlannedPhase) -> PlannedPhase:
    held = sum(item.nbytes for item in phase.items if item.note != "allowance")
    return PlannedPhase(
        phase.name, (*phase.items, MemoryItem("memory fragmentation", int(FRAGMENTS * held), "allowance"))
    )


def compute_teacher_bytes(request: PlanRequest) -> tuple[int, int, int]:
    """Return the teacher's bytes per rank: shard on the GPU, shard on the host, and weights gathered in its forward pass."""
    config = request.config
    if not isinstance(config, GRPOConfig) or config.distill.teacher is None or config.distill.by_server:
        return 0, 0, 0
    architecture = find_architecture(config.distill.teacher, config.distill.revision, config.model.trust_remote_code)
    bare = config.model_copy(
        update={
            "model": config.model.model_copy(update={"freeze": (), "quantize": None}),
            "lora": config.lora.model_copy(update={"rank": 0}),
        }
    )
    parameters = count_parameters(build_meta_model(architecture, bare), bare)
    share = sum(parameter.share(request.machine.gpus) for parameter in parameters.all)
    whole_bytes = parameters.whole_bytes
    return (0, share, whole_bytes) if config.distill.offload else (share, 0, whole_bytes)


def list_notes(request: PlanRequest) -> list[str]:
    config, shape = request.config, request.shape
    notes = []
    if shape.vision_depth:
        notes.append(
            "assumes full packed rows with as many media tokens as the configuration allows; shorter rows need less memory"
        )
    if config.model.attention == "eager":
        notes.append('model.attention = "eager": the attention scores of all pairs of tokens are not counted')
    if request.zero.stage < 3:
        notes.append(f"ZeRO stage {request.zero.stage}: the estimate has never been compared with a measurement")
    if copy := compute_checkpoint_copy(request):
        notes.append(
            f"checkpoints are written while training continues if each host has {copy / GIB:.0f} GiB more for a copy "
            "(checkpoint.background); otherwise, training waits"
        )
    if request.machine.hosts > 1:
        notes.append(f"{request.machine.hosts} hosts with up to {request.machine.gpus_per_host} GPUs each")
    return notes
