"""Functions that build the policy's DeepSpeed engine, set its learning rate, accumulate gradients, and gather full parameters."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any, TypeAlias, TypeGuard, TypeVar

import deepspeed
import torch
from deepspeed import DeepSpeedEngine
from deepspeed.utils import nvtx, safe_get_full_fp32_param
from torch import Tensor, nn

from dsreason.config.schema import OptimConfig
from dsreason.engine.learning_rates import get_multipliers
from dsreason.engine.zero3 import gather_whole_blocks, record_training_only
from dsreason.errors import ConfigError
from dsreason.job.launch import set_variables
from dsreason.phases import record_phase

T = TypeVar("T")
ZeroParameter: TypeAlias = Any
"""Type of an `nn.Parameter` to which DeepSpeed has added `ds_shape`, `ds_tensor` and methods."""


def build_engine(
    model: nn.Module, optim: OptimConfig, ds_config: dict[str, Any], blocks: Collection[str] = ()
) -> DeepSpeedEngine:
    """Build an engine that trains the trainable parameters of `model` with AdamW.

    The caller marks the last micro-batch in each step (see `add_gradient`), so the number of micro-batches may vary.

    Args:
        blocks: class names of modules, such as decoder layers, that ZeRO-3 should gather as a unit.
    """
    groups = build_parameter_groups(model, optim)
    optimizer = torch.optim.AdamW(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=True)
    partitioned = ds_config.get("zero_optimization", {}).get("stage") == 3
    if partitioned:
        gather_whole_blocks(model, blocks)
    nvtx.enable_nvtx = False  # NVTX ranges take 3 % of the host's time, and only Nsight displays them
    # DeepSpeed imports its Muon optimizer only for a type check; compiling Muon would waste seconds.
    with set_variables({"TORCHDYNAMO_DISABLE": "1"}):
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=ds_config)
    place_buffers(engine.module, engine.device)
    if partitioned:
        record_training_only(engine)
    return engine


def place_buffers(model: nn.Module, device: torch.device) -> None:
    """Move all buffers to `device` without changing their types. DeepSpeed does not move a partitioned model's buffers."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))


def build_parameter_groups(model: nn.Module, optim: OptimConfig) -> list[dict[str, Any]]:
    """Group the trainable parameters by learning rate, and into matrices (with weight decay) and vectors (without).

    Empty groups are omitted. A group's learning rate is the run's learning rate times `lr_multiplier`.
    """
    parameters = {to_hf_name(name): parameter for name, parameter in model.named_parameters()}
    multipliers = get_multipliers(parameters, optim)
    trainable = [(multipliers[name], parameter) for name, parameter in parameters.items() if parameter.requires_grad]
    if not trainable:
        raise ConfigError("model.freeze: all parameters are frozen; remove a pattern")
    groups = []
    for multiplier in sorted({multiplier for multiplier, _ in trainable}):
        members = [parameter for other, parameter in trainable if other == multiplier]
        matrices = [parameter for parameter in members if len(get_full_shape(parameter)) >= 2]
        vectors = [parameter for parameter in members if len(get_full_shape(parameter)) < 2]
        groups += [
            {"params": matrices, "weight_decay": optim.weight_decay, "lr_multiplier": multiplier},
            {"params": vectors, "weight_decay": 0.0, "lr_multiplier": multiplier},
        ]
    return [group for group in groups if group["params"]]


def is_partitioned(parameter: nn.Parameter) -> TypeGuard[ZeroParameter]:
    """Return whether ZeRO-3 has partitioned the parameter across the ranks."""
    return hasattr(parameter, "ds_id")


def get_full_shape(parameter: nn.Parameter) -> torch.Size:
    """Return a parameter's full shape; under ZeRO-3, its own `shape` is (0,)."""
    return torch.Size(parameter.ds_shape) if is_partitioned(parameter) else parameter.shape


def add_gradient(engine: DeepSpeedEngine, loss: Tensor, num_ranks: int, *, last: bool) -> None:
    """Run the backward pass for one micro-batch's contribution to the step's loss.

    The step's loss is the sum of the contributions from all micro-batches on all ranks. If several ranks share a row, each of
    them contributes the gradient for its own tokens. DeepSpeed averages gradients over ranks; the factor `num_ranks` turns the
    mean back into a sum.

    Args:
        last: whether this is the last backward pass before the optimizer step.
    """
    engine.set_gradient_accumulation_boundary(last)
    with record_phase("backward"):
        engine.backward(loss * num_ranks, scale_wrt_gas=False)
    if not last:
        engine.step()


def set_learning_rate(engine: DeepSpeedEngine, lr: float) -> None:
    """Set the learning rate of each parameter group to `lr` times its multiplier."""
    for group in engine.optimizer.param_groups:
        group["lr"] = group["lr_multiplier"] * lr


def take_optimizer_step(engine: DeepSpeedEngine, lr: float) -> dict[str, float]:
    """Run the optimizer step with learning rate `lr`; return the learning rates and the gradient norm as metrics."""
    set_learning_rate(engine, lr)
    with record_phase("optimizer"):
        engine.step()
    scaled = {
        f"train/learning_rate_x{group['lr_multiplier']:g}": float(group["lr"])
        for group in engine.optimizer.param_groups
        if group["lr_multiplier"] != 1
    }
    return {"train/learning_rate": lr, **scaled, "train/grad_norm": get_grad_norm(engine)}


def get_grad_norm(engine: DeepSpeedEngine) -> float:
    """Return the global gradient norm of the last step, before clipping; `inf` if DeepSpeed skipped the step."""
    if engine.optimizer.overflow:
        return float("inf")
    return float(engine.get_global_grad_norm())


def list_frozen_names(engine: DeepSpeedEngine) -> list[str]:
    """Return the Hugging Face names of the parameters that are not trained."""
    return [to_hf_name(name) for name, parameter in engine.module.named_parameters() if not parameter.requires_grad]


def to_hf_name(name: str) -> str:
    """Convert a policy parameter's name to its name in the Hugging Face model, which is the policy's attribute `model`."""
    return name.removeprefix("model.")


def iter_full_parameters(
    engine: DeepSpeedEngine, bucket_mb: float = 512, *, master: bool = False, without: Collection[str] = ()
) -> Iterator[tuple[str, Tensor]]:
    """Yield the Hugging Face name and the full tensor of every parameter that is not in `without`; tied parameters only once.

    All ranks must exhaust the iterator together. The tensors belong to the model; with `master`, trained parameters are float32
    copies instead. A tensor is valid only until the next one is yielded, so copy it if you want to keep it. At most about
    `bucket_mb` MiB are gathered at a time.
    """
    named_parameters = [
        ((to_hf_name(name), p), [p]) for name, p in engine.module.named_parameters() if to_hf_name(name) not in without
    ]
    for name, parameter in gather_items(named_parameters, bucket_mb):
        yield name, get_values(parameter, master=master)


def gather_items(items: Sequence[tuple[T, Sequence[nn.Parameter]]], bucket_mb: float) -> Iterator[T]:
    """Yield each item while its parameters are gathered, in buckets of about `bucket_mb` MiB.

    All ranks must exhaust the iterator together.
    """
    for bucket in plan_buckets(items, bucket_mb * 2**20):
        partitioned = [parameter for _, parameters in bucket for parameter in parameters if is_partitioned(parameter)]
        with deepspeed.zero.GatheredParameters(partitioned, enabled=bool(partitioned)):
            yield from (item for item, _ in bucket)


def plan_buckets(
    items: Sequence[tuple[T, Sequence[nn.Parameter]]], max_bytes: float
) -> list[list[tuple[T, Sequence[nn.Parameter]]]]:
    """Split the items, in order, into buckets with at most `max_bytes` of parameters; a larger item gets its own bucket."""
    buckets: list[list[tuple[T, Sequence[nn.Parameter]]]] = []
    room = 0.0
    for item in items:
        size = sum(get_full_shape(parameter).numel() * parameter.element_size() for parameter in item[1])
        if not buckets or size > room:
            buckets.append([])
            room = max_bytes
        buckets[-1].append(item)
        room -= size
    return buckets


def get_values(parameter: nn.Parameter, *, master: bool) -> Tensor:
    """Return a gathered parameter's values; with `master`, return a float32 copy if it is trained. All ranks must call this."""
    if master and parameter.requires_grad:
        copy: Tensor = safe_get_full_fp32_param(parameter)
        return copy
    return parameter.detach()
