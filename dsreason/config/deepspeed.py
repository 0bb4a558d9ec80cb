"""Functions that merge a DeepSpeed JSON and the run configuration into the dict that is passed to DeepSpeed.

The JSON determines sharding and offload. The run configuration determines batch sizes, learning rate, clipping and precision;
in the JSON, the keys for these must be `"auto"` or absent, or have the same value as in the run configuration.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from dsreason.config.deepspeed_keys import FLOPS_PROFILER, REMOVED, TOP_LEVEL, Kind
from dsreason.config.load import read_document
from dsreason.config.schema import JobConfig, RunConfig
from dsreason.config.shipped import find_file
from dsreason.errors import ConfigError
from dsreason.problems import build_config_error, find_nearest

Device = Literal["cpu", "cuda"]

SCHEDULERS = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
"""Name of a DeepSpeed scheduler → equivalent value of `optim.schedule`."""


@dataclass(frozen=True)
class Owned:
    """DeepSpeed key whose value is determined by the run configuration or by the trainer itself."""

    path: tuple[str, ...]
    values: tuple[Any, ...]
    """Values that the JSON may contain; if empty, no concrete value is allowed."""
    fact: str
    """Setting that determines the value, in the wording of messages: `train.global_batch_size is 32`."""
    by_config: bool = True
    """Whether the run configuration determines the value; if False, the trainer does, and the value is the same in every run."""


def resolve_deepspeed(
    name: str, config: JobConfig, *, device: Device, world_size: int, config_name: str = "the run configuration"
) -> dict[str, Any]:
    """Return the complete DeepSpeed configuration for a run on `world_size` ranks.

    Args:
        name: path of a JSON file, or the bare name of a file in the current folder or of a shipped file (`zero3.json`).
        config_name: name of the run configuration in error messages.

    Raises:
        ConfigError: lists all contradictions and all unknown or removed keys at once. DeepSpeed itself checks the keys of
            `zero_optimization`; see `check_deepspeed`.
    """
    document = read_deepspeed(name)
    problems = list(_find_key_problems(document)) or list(_find_zero_problems(document, world_size))
    for owned in list_owned_keys(config, world_size):
        value = _get_concrete(document, owned.path)
        if value is not None and not _is_allowed(value, owned.values):
            owner = config_name if owned.by_config else "the trainer"
            key = f"{'.'.join(owned.path)} ({format_json(value)})"
            problems.append(f'{key} contradicts {owner}: {owned.fact}; set it to "auto" or remove it')
    if problems:
        raise build_config_error([f"{name}: {text}" for text in problems])
    return _fill_document(document, config, device, world_size)


def read_deepspeed(name: str) -> dict[str, Any]:
    file = find_file(name, "ds_configs")
    if file.suffix.lower() != ".json":
        raise ConfigError(f"{name} is not a .json file; specify a DeepSpeed JSON, such as zero3.json")
    return read_document(file, name)


def read_zero_section(name: str) -> dict[str, Any]:
    """Return the `zero_optimization` section of a DeepSpeed JSON without its `"auto"` entries."""
    section: dict[str, Any] = _remove_auto(read_deepspeed(name).get("zero_optimization", {}))
    return section


def build_trial_settings(name: str, config: JobConfig) -> dict[str, Any]:
    """Build DeepSpeed's settings without derived batch sizes, so that DeepSpeed can parse them on any number of ranks."""
    settings = _fill_document(read_deepspeed(name), config, "cpu", 1)
    derived = ("train_batch_size", "gradient_accumulation_steps")
    return {key: value for key, value in settings.items() if key not in derived}


def get_micro_batch_size(config: JobConfig) -> int:
    """Return the micro-batch size for DeepSpeed's configuration; if a token budget is used instead, the value 1 is a dummy."""
    return config.train.micro_batch_size or 1


def compute_accumulation_steps(config: JobConfig, world_size: int) -> int:
    """Return the maximum number of micro-batches per rank and step.

    DeepSpeed only reports this number, because the trainer marks the step boundaries itself.
    """
    samples = config.samples_per_step * config.ranks_per_row  # `ranks_per_row` ranks compute each sample
    return max(1, math.ceil(samples / (get_micro_batch_size(config) * world_size)))


def list_owned_keys(config: JobConfig, world_size: int) -> list[Owned]:
    """Return every DeepSpeed key that the JSON does not determine, with the values that the JSON may contain."""
    return [
        *_iter_batch_keys(config, world_size),
        *_iter_precision_keys(config),
        *_iter_optimizer_keys(config),
        *_iter_checkpoint_keys(config),
        _get_sequence_parallel_key(config),
        Owned(("tensor_parallel", "autotp_size"), (0,), "layers are not split across ranks", by_config=False),
    ]


def _get_sequence_parallel_key(config: JobConfig) -> Owned:
    size = config.ranks_per_row
    if size == 1:
        return Owned(("sequence_parallel_size",), (1,), "sequences are not split across ranks", by_config=False)
    return Owned(("sequence_parallel_size",), (size,), f"train.sequence_parallel_size is {size}")


def _iter_batch_keys(config: JobConfig, world_size: int) -> Iterator[Owned]:
    micro, steps = get_micro_batch_size(config), compute_accumulation_steps(config, world_size)
    batch = config.batch_fact
    yield Owned(("train_batch_size",), (config.samples_per_step,), batch)
    budget, key = config.token_budget if isinstance(config, RunConfig) else (None, "")
    if budget is not None:
        tokens = f"the samples per forward pass are limited by {key} ({budget} tokens)"
        yield Owned(("train_micro_batch_size_per_gpu",), (), tokens)
        yield Owned(("gradient_accumulation_steps",), (), tokens)
        return
    yield Owned(("train_micro_batch_size_per_gpu",), (micro,), f"train.micro_batch_size is {micro}")
    ranks = f"{world_size} rank{'s' * (world_size > 1)}"
    derived = f"{batch} and train.micro_batch_size is {micro}, which results in {steps} on {ranks}"
    yield Owned(("gradient_accumulation_steps",), (steps,), derived)


def _iter_precision_keys(config: JobConfig) -> Iterator[Owned]:
    precision = f"train.precision is {config.train.precision}"
    for block in ("bf16", "bfloat16"):
        yield Owned((block, "enabled"), (config.train.precision == "bf16",), precision)
    yield Owned(("fp16", "enabled"), (False,), precision)
    yield Owned(("torch_autocast", "enabled"), (False,), precision)
    master = "master weights and optimizer states are float32"
    yield Owned(("bf16", "bf16_master_weights_and_grads"), (False,), master, by_config=False)
    yield Owned(("bf16", "bf16_optimizer_states"), (False,), master, by_config=False)
    yield Owned(("fp16", "fp16_master_weights_and_grads"), (False,), master, by_config=False)
    fp32, bf16 = ("fp32", "float32", "torch.float32"), ("bf16", "bfloat16", "torch.bfloat16")
    yield Owned(("data_types", "param_dtype"), bf16 if config.train.precision == "bf16" else fp32, precision)
    yield Owned(("data_types", "grad_accum_dtype"), fp32, "gradients are accumulated in fp32", by_config=False)
    yield Owned(("communication_data_type",), fp32, "gradients are reduced in fp32", by_config=False)
    yield Owned(("gradient_allreduce_op",), ("mean",), "the loss is scaled for the mean over ranks", by_config=False)
    yield Owned(("managed_gradient_accumulation",), (True,), "the trainer marks the end of each step", by_config=False)
    yield Owned(("zero_force_ds_cpu_optimizer",), (False,), "the optimizer is torch's AdamW", by_config=False)


def _iter_optimizer_keys(config: JobConfig) -> Iterator[Owned]:
    optim = config.optim
    steps = optim.schedule_steps or config.train.max_steps
    clipping = f"optim.max_grad_norm is {optim.max_grad_norm:g}"
    yield Owned(("gradient_clipping",), (optim.max_grad_norm,), clipping)
    yield Owned(("optimizer", "type"), ("Adam", "AdamW", "adam", "adamw"), "the optimizer is AdamW", by_config=False)
    params = ("optimizer", "params")
    yield Owned((*params, "lr"), (optim.lr,), f"optim.lr is {optim.lr:g}")
    yield Owned((*params, "betas"), (list(optim.betas),), f"optim.betas is {list(optim.betas)}")
    yield Owned((*params, "eps"), (optim.eps,), f"optim.eps is {optim.eps:g}")
    yield Owned((*params, "weight_decay"), (optim.weight_decay,), f"optim.weight_decay is {optim.weight_decay:g}")
    yield Owned((*params, "max_grad_norm"), (optim.max_grad_norm,), clipping)
    yield Owned((*params, "adam_w_mode"), (True,), "the optimizer is AdamW", by_config=False)
    equivalents = tuple(name for name, schedule in SCHEDULERS.items() if schedule == optim.schedule)
    yield Owned(("scheduler", "type"), equivalents, f"optim.schedule is {optim.schedule}")
    params = ("scheduler", "params")
    yield Owned((*params, "warmup_max_lr"), (optim.lr,), f"optim.lr is {optim.lr:g}")
    yield Owned((*params, "warmup_num_steps"), (optim.warmup,), f"optim.warmup is {optim.warmup:g}")
    start = optim.warmup_start * optim.lr
    yield Owned((*params, "warmup_min_lr"), (start,), f"the learning rate starts at {start:g}", by_config=False)
    yield Owned((*params, "warmup_type"), ("linear",), "the warm-up is linear", by_config=False)
    name = "optim.schedule_steps" if optim.schedule_steps else "train.max_steps"
    yield Owned((*params, "total_num_steps"), (steps,), f"{name} is {steps}")


def _iter_checkpoint_keys(config: JobConfig) -> Iterator[Owned]:
    background = format_json(config.checkpoint.background)
    writer = f"checkpoint.background ({background}) determines whether checkpoints are written during training"
    yield Owned(("checkpoint", "writer"), (), writer)
    yield Owned(("datastates_ckpt",), (False,), writer)
    converted = "checkpoints are converted automatically if the number of ranks changes"
    yield Owned(("checkpoint", "load_universal"), (False,), converted, by_config=False)


def _is_allowed(value: Any, allowed: tuple[Any, ...]) -> bool:
    return any(value == option and isinstance(value, bool) == isinstance(option, bool) for option in allowed)


def _get_concrete(document: Any, path: tuple[str, ...]) -> Any:
    """Return the value at `path` in the document; None if the value is absent or `"auto"`."""
    for key in path:
        if not isinstance(document, dict):
            return None
        document = document.get(key)
    return None if document == "auto" else document


def _find_key_problems(document: dict[str, Any]) -> Iterator[str]:
    for key, value in document.items():
        if key in REMOVED:
            yield f"{key}: is no longer supported by DeepSpeed; remove it ({REMOVED[key]})"
        elif key not in TOP_LEVEL:
            suggestion = find_nearest(key, sorted(TOP_LEVEL))
            advice = f"did you mean {suggestion}?" if suggestion else "remove it"
            yield f"{key}: DeepSpeed has no such key; {advice}"
        else:
            yield from _find_value_problems(key, value, TOP_LEVEL[key])
    for block in ("optimizer", "scheduler"):
        section = document.get(block)
        params = section.get("params") if isinstance(section, dict) else None
        for key in params if isinstance(params, dict) else ():
            if key not in PARAMS[block]:
                yield (
                    f"{block}.params.{key}: has no effect, because the run configuration sets the {block} in [optim]; "
                    "remove it"
                )


def _find_value_problems(key: str, value: Any, kind: Kind) -> Iterator[str]:
    """Yield problems of a value that DeepSpeed would report without naming the key, or would not report at all."""
    if kind == "object":
        if not isinstance(value, dict):
            yield f"{key}: must be an object ({{…}}); got {format_json(value)}"
        elif key in UNUSED and value.get("enabled") not in (None, False, "auto"):
            yield f"{key}: is not supported: {UNUSED[key]}; remove it"
        elif key == "flops_profiler":
            for inside, item in value.items():
                yield from _find_value_problems(f"{key}.{inside}", item, FLOPS_PROFILER.get(inside, "any"))
    elif key == "flops_profiler.output_file" and value not in (None, "auto"):
        yield f"{key}: cannot be set, because the profile is written to the logs of the run; remove it"
    elif value == "auto":
        return
    elif kind == "flag" and not isinstance(value, bool):
        yield f"{key}: must be true or false; got {format_json(value)}"
    elif kind in ("number", "positive") and (isinstance(value, bool) or not isinstance(value, int | float)):
        yield f"{key}: must be a number; got {format_json(value)}"
    elif kind == "positive" and value <= 0:
        yield f"{key}: must be greater than 0; got {format_json(value)}"
    elif kind == "log level" and value is not None and str(value).lower() not in LOG_LEVELS:
        yield f"{key}: must be one of {', '.join(LOG_LEVELS)}; got {format_json(value)}"


def format_json(value: Any) -> str:
    """Format a value as JSON, truncated to 100 characters."""
    text = json.dumps(value)
    return text if len(text) <= 100 else f"{text[:100]}…"


MONITORING = "[monitor] selects what is logged, and logs are written to the output folder"
UNUSED = {
    "autotuning": "it would start separate runs",
    "comet": MONITORING,
    "csv_monitor": MONITORING,
    "data_efficiency": "data.sources selects the training data",
    "expert_parallel": "the models have no experts",
    "hybrid_engine": "[rollout] selects the engine that generates",
    "tensorboard": MONITORING,
    "wandb": MONITORING,
}
"""Block that would read or write other files or start processes → reason why the block is not supported."""
LOG_LEVELS = ("debug", "info", "warning", "error", "critical")
PARAMS = {
    "optimizer": {"lr", "betas", "eps", "weight_decay", "max_grad_norm", "adam_w_mode", "torch_adam"},
    "scheduler": {"warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type", "total_num_steps"},
}


def _find_zero_problems(document: dict[str, Any], world_size: int) -> Iterator[str]:
    zero = document.get("zero_optimization", {})
    if not isinstance(zero, dict):
        return
    stage = zero.get("stage")
    if stage not in (1, 2, 3) or isinstance(stage, bool):
        state = "is missing" if stage is None else f"is {json.dumps(stage)}"
        yield f"zero_optimization.stage: {state}, but must be 1, 2 or 3; set one of them"
        return
    for block, lowest in (("offload_optimizer", 1), ("offload_param", 3)):
        offload = zero.get(block) or {}
        if not isinstance(offload, dict):
            yield f'zero_optimization.{block}: must be an object such as {{"device": "cpu"}}; got {json.dumps(offload)}'
        elif offload.get("device") == "nvme":
            yield f'zero_optimization.{block}.device: "nvme" is not supported: checkpoints would lack its data; use "cpu"'
        elif offload.get("device", "none") != "none" and stage < lowest:
            yield (
                f"zero_optimization.{block}: requires stage {lowest} or higher, but stage is {stage}; increase it, or remove "
                f"{block}"
            )
    group = zero.get("zero_hpz_partition_size", 1)
    if isinstance(group, int) and 1 < group < world_size and world_size % group:
        yield (
            f"zero_optimization.zero_hpz_partition_size ({group}) does not divide the number of ranks ({world_size}); set it to "
            "the number of ranks per host. Each host then has a copy of the weights; gradients and optimizer states remain "
            "partitioned across all ranks"
        )


def _fill_document(document: dict[str, Any], config: JobConfig, device: Device, world_size: int) -> dict[str, Any]:
    result: dict[str, Any] = _remove_auto(document)
    # The trainer builds its own optimizer and scheduler; bfloat16 is an old name for bf16; DeepSpeed enables datastates_ckpt even
    # if its value is null; with sequence_parallel_size, DeepSpeed would expect a smaller train_batch_size than the one set below.
    for key in ("optimizer", "scheduler", "datastates_ckpt", "bfloat16", "sequence_parallel_size"):
        result.pop(key, None)
    micro, steps = get_micro_batch_size(config), compute_accumulation_steps(config, world_size)
    result |= {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": steps,
        # DeepSpeed requires exactly this product, which exceeds the global batch size if the batch cannot be divided evenly.
        "train_batch_size": micro * steps * world_size,
        "gradient_clipping": config.optim.max_grad_norm,
        "communication_data_type": "fp32",
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    result["bf16"] = result.get("bf16", {}) | {"enabled": config.train.precision == "bf16"}
    result["data_types"] = result.get("data_types", {}) | {"grad_accum_dtype": "fp32"}
    result["zero_optimization"] = _get_stage3_defaults(config) | _fit_device(
        result.get("zero_optimization", {}), device
    )
    return result


def _get_stage3_defaults(config: JobConfig) -> dict[str, Any]:
    """Return defaults for keys that a DeepSpeed JSON leaves unset; stages 1 and 2 ignore these keys.

    By default, DeepSpeed keeps a gathered parameter if the parameter is used again within 1e9 parameter elements, which DeepSpeed
    finds out by walking its trace for every module. It also wraps each linear layer in a Python autograd function, so that the
    graph does not hold gathered weights between the forward and the backward pass; with gradient checkpointing, this is not
    necessary, because the graph then holds the weights of only one block.
    """
    return {
        "stage3_max_reuse_distance": 0,
        "memory_efficient_linear": not config.model.gradient_checkpointing,
    }


def _remove_auto(value: Any) -> Any:
    """Return a copy without `"auto"` entries, which are filled in later or get DeepSpeed's defaults."""
    if isinstance(value, dict):
        return {key: _remove_auto(item) for key, item in value.items() if item != "auto"}
    if isinstance(value, list):
        return [_remove_auto(item) for item in value]
    return (
        int(value) if isinstance(value, float) and value.is_integer() and value >= 1000 else value
    )  # bucket sizes may be written as 5e7, but DeepSpeed requires integers


def _fit_device(zero: dict[str, Any], device: Device) -> dict[str, Any]:
    """Adapt a copy of `zero` to the device: on a GPU, pin offloaded memory by default; on a CPU, disable pinning and overlap."""
    zero = dict(zero)
    for block in ("offload_optimizer", "offload_param"):
        if block in zero:
            pin = device == "cuda" and (zero[block] or {}).get("pin_memory", True)
            zero[block] = (zero[block] or {}) | {"pin_memory": pin}
    if device == "cpu":
        zero["overlap_comm"] = False
    return zero
