"""Check for the setting `engine_options`, which contains arguments for vLLM's `LLM` that no other key sets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FIXED = {
    "distributed_executor_backend",
    "enable_cumem_allocator",
    "enable_sleep_mode",
    "data_parallel_size",
    "logprobs_mode",
    "pipeline_parallel_size",
    "speculative_config",  # vLLM rejects it together with the logit bias that bans media tokens
}
"""Arguments for which the engine supports only one value."""
MODEL = {
    "model": "model.path",
    "tokenizer": "model.path",
    "revision": "model.revision",
    "tokenizer_revision": "model.revision",
    "trust_remote_code": "model.trust_remote_code",
    "max_model_len": "model.max_length",
}
ROLLOUT = MODEL | {
    "dtype": "train.precision",
    "seed": "train.seed",
    "tensor_parallel_size": "rollout.tensor_parallel_size",
    "gpu_memory_utilization": "rollout.gpu_memory_utilization",
    "enforce_eager": "rollout.enforce_eager",
}
"""vLLM argument → configuration key that sets the argument."""
EVALUATION = MODEL | {
    "dtype": "model.dtype",
    "seed": "evaluation.seed",
    "tensor_parallel_size": "model.tensor_parallel_size",
    "gpu_memory_utilization": "model.gpu_memory_utilization",
    "enforce_eager": "model.enforce_eager",
}


def check_owned(options: dict[str, Any], owned: Mapping[str, str]) -> dict[str, Any]:
    """Return the options unchanged; raise ValueError if an option is fixed or is set by another key."""
    problems = [
        f"{name} ({options[name]!r}) cannot be set here; set {owned[name]} instead" for name in owned if name in options
    ]
    problems += [
        f"{name} ({options[name]!r}) cannot be changed, because only one value is supported; remove it"
        for name in sorted(FIXED & options.keys())
    ]
    if problems:
        raise ValueError("; ".join(problems))
    return options
