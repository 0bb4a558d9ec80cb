"""Suggestions for a run that does not fit. A change is suggested only if a plan of the changed run fits."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

from pydantic import ValidationError

from dsreason.config.schema import RunConfig
from dsreason.config.schema_grpo import GRPOConfig
from dsreason.errors import ConfigError
from dsreason.families import get_family
from dsreason.tools.planning.phases import GIB
from dsreason.tools.planning.plan import Plan, plan_run
from dsreason.tools.planning.request import PlanRequest
from dsreason.tools.planning.training import is_tower_trained

MOST_GPUS = 64
OFFLOAD = "zero3_offload.json"
LORA_RANK = 16
MOST_PAIRS = 3


@dataclass(frozen=True)
class Change:
    """Change to a run's options; a field that is None or empty leaves its option unchanged."""

    sets: Mapping[str, Any] = field(default_factory=dict)
    """Configuration key, such as `train.activation_offload` → new value."""
    ds_config: str | None = None
    gpus: int | None = None
    remark: str = ""

    @property
    def text(self) -> str:
        parts = [f"--ds-config {self.ds_config}"] if self.ds_config else []
        parts += [f"--gpus {self.gpus}"] if self.gpus else []
        parts += [f"--set {shlex.quote(f'{key}={to_toml(value)}')}" for key, value in self.sets.items()]
        return " ".join(parts) + (f" ({self.remark})" if self.remark else "")

    def __or__(self, other: Change) -> Change:
        remarks = ", ".join(filter(None, [self.remark, other.remark]))
        sets = {**self.sets, **other.sets}
        return Change(sets, self.ds_config or other.ds_config, self.gpus or other.gpus, remarks)


@dataclass(frozen=True)
class Suggestion:
    change: Change
    plan: Plan

    @property
    def text(self) -> str:
        description = f"with {self.change.text}: fits, {self.plan.fullest.total / GIB:.1f} GiB per GPU"
        return f"{description}, {self.plan.host.total / GIB:.0f} GiB of host memory"


def to_toml(value: Any) -> str:
    """Format a value as TOML. All suggested values look the same in TOML and JSON."""
    return json.dumps(value)


def list_suggestions(plan: Plan) -> list[Suggestion]:
    """Return changes that make the run fit; the list is empty if the run already fits.

    The list contains all single changes on this machine that suffice or, if there are none, up to three pairs of changes. The
    last entry is the smallest larger number of GPUs that suffices, if any does.
    """
    if plan.fits:
        return []
    request = plan.request
    local_changes = [*iter_local_changes(request)]
    suggestions = [suggestion for change in local_changes if (suggestion := try_change(request, change))]
    if not suggestions:
        pairs = (
            first | second
            for first, second in combinations(local_changes, 2)
            if not first.sets.keys() & second.sets.keys()
        )
        suggestions = [suggestion for change in pairs if (suggestion := try_change(request, change))][:3]
    more_gpus = iter_more_gpus(request)
    larger = next((suggestion for change in more_gpus if (suggestion := try_change(request, change))), None)
    return [*suggestions, *([larger] if larger else [])]


def try_change(request: PlanRequest, change: Change) -> Suggestion | None:
    """Plan the changed run, and return it as a suggestion; None if this run does not fit either, or would refuse to start."""
    try:
        plan = plan_run(apply_change(request, change))
    except (ConfigError, ValidationError):
        return None
    return Suggestion(change, plan) if plan.fits else None


def apply_change(request: PlanRequest, change: Change) -> PlanRequest:
    machine = request.machine if change.gpus is None else replace(request.machine, gpus=change.gpus)
    config = replace_values(request.config, change.sets)
    changed_request = PlanRequest(
        request.trainer, config, machine, change.ds_config or request.ds_config, request.config_name
    )
    if collect_model_settings(config) == collect_model_settings(request.config):
        changed_request.parameters, changed_request.pieces = request.parameters, request.pieces
    return changed_request


def collect_model_settings(config: RunConfig) -> tuple[Any, ...]:
    """Return the settings that determine how the model's parameters are counted."""
    return config.model.freeze, config.model.quantize, config.lora, config.train.precision


def replace_values(config: RunConfig, values: Mapping[str, Any]) -> RunConfig:
    document = config.model_dump(exclude_unset=True)
    for key, value in values.items():
        section, _, name = key.partition(".")
        document.setdefault(section, {})[name] = value
    return type(config).model_validate(document)


def iter_local_changes(request: PlanRequest) -> Iterator[Change]:
    """Yield changes that need no additional GPUs, starting with those that do not affect the result of training."""
    config = request.config
    if not request.zero.offloads("optimizer"):
        yield Change(ds_config=OFFLOAD, remark="slower steps")
    yield from iter_fewer_tokens(request)
    rows = config.validation.micro_batch_size
    while config.data.validation != 0 and rows > 1:
        rows //= 2
        yield Change({"validation.micro_batch_size": rows})
    if not config.train.activation_offload and config.model.gradient_checkpointing:
        yield Change({"train.activation_offload": True})
    if not config.model.gradient_checkpointing:
        yield Change({"model.gradient_checkpointing": True}, remark="steps take about a third longer")
    for size in (2, 4, 8):
        if (
            size > config.ranks_per_row
            and request.machine.ranks_per_host % size == 0
            and request.shape.heads % size == 0
            and not request.shape.state_values  # delta nets do not support it
        ):
            yield Change({"train.sequence_parallel_size": size})
    if isinstance(config, GRPOConfig) and config.rollout.engine == "vllm":
        yield from iter_other_rollouts(request, config)
    if is_tower_trained(request) and not config.lora.rank:
        yield Change({"model.freeze": (*config.model.freeze, "visual")}, remark="the vision tower is not trained")
    is_dense = not get_family(request.architecture.config.model_type).modules.experts  # experts cannot be quantised
    if not config.lora.rank:
        adapters = {"lora.rank": LORA_RANK} | ({"model.freeze": ()} if config.model.freeze else {})
        yield Change(adapters, remark="only adapters are trained")
        if is_dense:
            yield Change(
                adapters | {"model.quantize": "nf4"}, remark="only adapters are trained, on a 4-bit base model"
            )
    elif not config.model.quantize and is_dense:
        yield Change({"model.quantize": "nf4"}, remark="4-bit base model")


def iter_fewer_tokens(request: PlanRequest) -> Iterator[Change]:
    """Yield smaller micro-batches, halved until only the longest sample fits, and finally half the maximum sample length."""
    config = request.config
    longest, size = config.model.max_length, config.train.micro_batch_size
    if size is not None:
        while size > 1:
            size //= 2
            yield Change({"train.micro_batch_size": size})
    else:
        tokens, _ = config.token_budget
        tokens = tokens or longest
        while tokens > longest:
            tokens = max(longest, tokens // 2)
            yield Change({"train.max_tokens_per_micro_batch": tokens})
    if not isinstance(config, GRPOConfig) and longest >= 2048:
        cut = {"model.max_length": longest // 2} | (
            {"train.max_tokens_per_micro_batch": longest // 2} if size is None else {}
        )
        yield Change(cut, remark="longer samples then exceed the limit")


def iter_other_rollouts(request: PlanRequest, config: GRPOConfig) -> Iterator[Change]:
    shares = [twentieths / 20 for twentieths in range(18, 3, -1)]
    current_share = config.rollout.gpu_memory_utilization
    lower, higher = (
        [share for share in shares if share < current_share],
        [share for share in reversed(shares) if share > current_share],
    )
    best = next(
        (
            share
            for share in [*lower, *higher]
            if try_change(request, Change({"rollout.gpu_memory_utilization": share}))
        ),
        None,
    )
    if best is not None:
        yield Change({"rollout.gpu_memory_utilization": best})
    for size in (2, 4, 8):
        if size > config.rollout.tensor_parallel_size and request.machine.ranks_per_host % size == 0:
            yield Change({"rollout.tensor_parallel_size": size})


def iter_more_gpus(request: PlanRequest) -> Iterator[Change]:
    gpus = request.machine.gpus
    while (gpus := gpus * 2) <= MOST_GPUS:
        yield Change(gpus=gpus)
