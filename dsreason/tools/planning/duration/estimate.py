"""Estimates of the duration of each phase of a step, and of the entire run.

A phase takes as long as its slowest part: arithmetic, memory traffic, network traffic, or kernel launches by the host. The
parts overlap; for example, ZeRO-3 gathers the next blocks and reduces the previous gradients while the GPU computes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from dsreason.config.schema_dpo import DPOConfig
from dsreason.config.schema_grpo import GRPOConfig
from dsreason.losses.objective import build_objective
from dsreason.monitor.flops import ModelFlops, Work, compute_model_flops
from dsreason.tools.planning.duration.rates import GB, Rates
from dsreason.tools.planning.parameters import build_meta_model
from dsreason.tools.planning.plan import Plan
from dsreason.tools.planning.request import PlanRequest

FRAME = (1, 32, 32)
"""Assumed patch grid of a frame: time, height, width. If 2 x 2 patches are merged into one token, a frame has 256 tokens."""
UPDATE_BYTES = 30
"""Bytes that AdamW reads and writes per trained parameter: gradient 4, master weight 8, two moments 16, weight 2."""


@dataclass(frozen=True)
class Load:
    """Assumptions about the data and the network."""

    tokens_per_sample: int
    """Tokens per sample; for GRPO, tokens per prompt."""
    media_share: float = 0.5
    """Share of these tokens that represents images and videos."""
    network: float = 50 * GB
    """Network bandwidth of each GPU to other hosts, in bytes per second."""
    num_samples: int | None = None
    """Number of training rows, which determines the length of a run without `train.max_steps`; None if unknown."""


@dataclass(frozen=True)
class Timed:
    """Duration of one phase.

    Example: `Timed("optimizer step", 0.09, "GPU memory")`.
    """

    name: str
    seconds: float
    limit: str
    """Resource that limits the phase."""


def time_slowest(name: str, **seconds: float) -> Timed:
    """Build a phase whose parts overlap: it takes as long as the slowest part, which is the limiting resource."""
    limit = max(seconds, key=seconds.__getitem__)
    return Timed(name, seconds[limit], limit.replace("_", " "))


@dataclass(frozen=True)
class Duration:
    """Duration of one optimizer step, with the rates and assumptions behind the estimate."""

    rates: Rates
    load: Load
    phases: tuple[Timed, ...]
    tokens: float
    """Tokens that all GPUs together train on per step."""
    steps: int | None
    gpus: int

    @property
    def seconds(self) -> float:
        return sum(phase.seconds for phase in self.phases)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def slowest_phase(self) -> Timed:
        return max(self.phases, key=lambda phase: phase.seconds)

    @property
    def hours(self) -> float | None:
        return None if self.steps is None else self.steps * self.seconds / 3600


def estimate_duration(plan: Plan, rates: Rates, load: Load) -> Duration:
    """Estimate the duration of a step of the planned run, and the number of steps."""
    request = plan.request
    config, gpus = request.config, request.machine.gpus
    model = FlopsModel(request)
    if isinstance(config, GRPOConfig):
        rollout = time_sampling_phases(plan, rates, load, model)
        per_rollout = config.grpo.optimizer_steps_per_rollout
        phases = [Timed(phase.name, phase.seconds / per_rollout, phase.limit) for phase in rollout]
        completions = config.grpo.prompts_per_step * config.grpo.num_generations / per_rollout
        tokens = completions * config.rollout.max_completion_length
        tokens += config.grpo.prompts_per_step / per_rollout * load.tokens_per_sample
        sample = load.tokens_per_sample + config.grpo.num_generations * config.rollout.max_completion_length
        extra = (per_rollout > 1) + bool(build_objective(config.grpo).kl_coef)
    else:
        phases, sample = [], load.tokens_per_sample
        tokens = config.samples_per_step * (2 if isinstance(config, DPOConfig) else 1) * sample
        extra = 1 if isinstance(config, DPOConfig) and config.dpo.reference == "adapter_off" else 0
    local = tokens / gpus * config.ranks_per_row
    if extra:
        phases.append(time_forwards(model, rates, load, local, sample, extra))
    phases += [time_training(request, model, rates, load, local, sample), time_optimizer_step(request, rates)]
    return Duration(rates, load, tuple(phases), tokens, count_steps(request, load), gpus)


def count_steps(request: PlanRequest, load: Load) -> int | None:
    train = request.config.train
    if train.max_steps is not None:
        return train.max_steps
    if load.num_samples is None:
        return None
    return math.ceil(load.num_samples / request.config.samples_per_step) * train.epochs


class FlopsModel:
    """FLOPs of the planned model, if only the configured parameters are trained and if all parameters are."""

    def __init__(self, request: PlanRequest) -> None:
        self.request = request
        model = build_meta_model(request.architecture, request.config)
        self.whole: ModelFlops = compute_model_flops(model)
        trained = {parameter.name for parameter in request.parameters.trained}
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in trained)
        self.trained: ModelFlops = compute_model_flops(model)

    def build_work(self, tokens: float, sample: int, load: Load) -> Work:
        """Divide tokens into samples of `sample` tokens; a share of them represents frames, and the others are trained on."""
        count = tokens / sample
        media = load.media_share * tokens if self.request.shape.vision_depth else 0.0
        frames = round(media * self.request.shape.merge**2 / (FRAME[0] * FRAME[1] * FRAME[2]))
        spans = [(sample, 0)] * int(count)
        if remaining_tokens := round(tokens - int(count) * sample):
            spans.append((remaining_tokens, 0))
        return Work(spans, round(tokens - media), [FRAME] * frames)

    def compute_forward_flops(self, work: Work) -> float:
        return self.whole.step(work) / 3

    def compute_training_flops(self, work: Work) -> float:
        """Return the FLOPs of a forward and a backward pass and, with gradient checkpointing, of the recomputed forward pass."""
        recomputation = self.compute_forward_flops(work) if self.request.config.model.gradient_checkpointing else 0.0
        return self.trained.step(work) + recomputation

    @property
    def blocks(self) -> int:
        return self.request.shape.layers + self.request.shape.vision_depth


def time_training(
    request: PlanRequest, model: FlopsModel, rates: Rates, load: Load, tokens: float, sample: int
) -> Timed:
    """Estimate the forward and backward passes of a step on one GPU, including ZeRO's gathers and reductions."""
    rows = split_into_rows(tokens, request.row_tokens)
    work = model.build_work(tokens, sample, load)
    arithmetic = model.compute_training_flops(work) / request.config.ranks_per_row / rates.training
    # The host needs as much time for a short row as for a full one.
    host_per_row = model.blocks * rates.block_seconds * (1.0 if request.zero.stage == 3 else 0.6)
    computing = sum(max(arithmetic * row / tokens, host_per_row) for row in rows)
    network = len(rows) * compute_exchange_seconds(request, rates, load)
    if network > computing:
        return Timed("forward and backward", network, "network")
    limit = "arithmetic" if arithmetic > host_per_row * len(rows) else "host"
    return Timed("forward and backward", computing, limit)


def split_into_rows(tokens: float, row_tokens: int) -> list[float]:
    """Return the number of tokens per micro-batch: full rows, followed by a row with the remaining tokens."""
    full_rows = max(0, math.ceil(tokens / row_tokens) - 1)
    return [*[float(row_tokens)] * full_rows, tokens - full_rows * row_tokens]


def compute_exchange_seconds(request: PlanRequest, rates: Rates, load: Load) -> float:
    """Return the seconds per micro-batch to reduce the float32 gradients and, at stage 3, to gather the weights twice."""
    gpus, machine = request.machine.gpus, request.machine
    if gpus == 1:
        return 0.0
    weights = sum(parameter.nbytes for parameter in request.parameters.all)
    gathers = 2 * weights if request.zero.stage == 3 else 0
    reductions = 4 * request.parameters.num_trained
    rate = rates.between_gpus if machine.hosts == 1 else min(rates.between_gpus, load.network)
    return (gathers + reductions) * (gpus - 1) / gpus / rate


def time_optimizer_step(request: PlanRequest, rates: Rates) -> Timed:
    share = UPDATE_BYTES * request.parameters.num_trained / request.machine.gpus
    if request.zero.offloads("optimizer"):
        host = share * request.machine.ranks_per_host / rates.host_update
        copies = 6 / UPDATE_BYTES * share / rates.to_host  # gradients move to the host, weights move back
        return time_slowest("optimizer step", host_memory=host, copies_to_the_host=copies)
    return time_slowest("optimizer step", GPU_memory=share / rates.update)


def time_forwards(model: FlopsModel, rates: Rates, load: Load, tokens: float, sample: int, count: int) -> Timed:
    """Estimate the `count` forward passes per step that compute old or reference log-probabilities."""
    arithmetic = count * model.compute_forward_flops(model.build_work(tokens, sample, load)) / rates.inference
    micro_batches = len(split_into_rows(tokens, model.request.row_tokens))
    host = count * micro_batches * model.blocks * rates.block_seconds / 3
    return time_slowest("log-probabilities before training", arithmetic=arithmetic, host=host)


def time_sampling_phases(plan: Plan, rates: Rates, load: Load, model: FlopsModel) -> list[Timed]:
    """Estimate the phases of a rollout: offload the training state, sync the weights to vLLM, sample, and reload the state."""
    request = plan.request
    config = request.config
    assert isinstance(config, GRPOConfig)
    phases = []
    if plan.offloaded:
        phases.append(Timed("offload and reload", 2 * plan.offloaded / rates.to_host, "copies to the host"))
    weights = request.parameters.numel * request.width
    phases.append(Timed("wake, weight sync, sleep", weights / rates.sync + rates.wake_seconds, "copies on the GPU"))
    if plan.vllm is None:  # sampling with plain transformers is not estimated
        return phases
    engines = request.machine.gpus // plan.vllm.parallel
    prompts = config.grpo.prompts_per_step / engines
    prefill = model.compute_forward_flops(
        model.build_work(prompts * load.tokens_per_sample, load.tokens_per_sample, load)
    )
    phases.append(Timed("rollout: prompts", prefill / plan.vllm.parallel / rates.inference, "arithmetic"))
    completions = prompts * config.grpo.num_generations
    together = max(1.0, min(completions, plan.vllm.max_sequences, plan.vllm.cache_tokens / plan.vllm.longest * 2))
    length = config.rollout.max_completion_length
    cache = together * (load.tokens_per_sample + length / 2) * plan.vllm.token_bytes
    reading = (weights / plan.vllm.parallel + cache) / rates.memory
    waves = math.ceil(completions / together)
    limit = "GPU memory" if reading > rates.decode_seconds else "host"
    seconds = waves * length * (reading + rates.decode_seconds)
    phases.append(Timed("rollout: completions", seconds, limit))
    return phases
