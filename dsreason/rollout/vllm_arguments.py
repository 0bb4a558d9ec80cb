"""Arguments for vLLM's engine: defaults, and a check of the arguments that users add."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from dsreason.errors import ConfigError
from dsreason.families.layer_types import has_delta_nets
from dsreason.job.ranks import World
from dsreason.problems import find_nearest

MAX_SEQUENCES = 256
"""Maximum number of completions to sample at the same time; for each, vLLM keeps counts of all tokens in the vocabulary."""
MIN_SEQUENCES = 64
"""Lower bound for the limit on concurrent completions; it may exceed the size of a GRPO rollout, as validation may need more."""
BATCHED_TOKENS = 8192
"""Maximum number of tokens per forward pass; longer prompts are split. vLLM reserves activation memory for each token."""
MEDIA_BYTES_PER_TOKEN = 32 * 1024
"""Upper bound for the float32 bytes per token of a processed image or video; the actual maximum, for Qwen3-VL, is 24 KiB."""


@dataclass(frozen=True, kw_only=True)
class VLLMSettings:
    """Settings of a vLLM engine."""

    max_model_len: int
    """Maximum length of a prompt and its completion together, in tokens."""
    tensor_parallel_size: int = 1
    gpu_memory_utilization: float = 0.4
    sleep_level: int = 2
    """Sleep level of vLLM: 1 keeps a copy of the weights in host memory, 2 discards the weights."""
    enforce_eager: bool = False
    max_num_seqs: int = MAX_SEQUENCES
    """Number of completions that are requested together; at most `MAX_SEQUENCES` are sampled at a time, and the others wait."""
    engine_options: Mapping[str, Any] = field(default_factory=dict)
    """Additional arguments of vLLM's `LLM`."""


def build_engine_arguments(
    world: World, settings: VLLMSettings, *, dtype: torch.dtype, sleep_mode: bool, trust_remote_code: bool
) -> dict[str, Any]:
    """Build all arguments of vLLM's `LLM` except the model; vLLM's own defaults suit servers and take gigabytes more."""
    on_cuda = world.device.type == "cuda"
    arguments = {
        "dtype": str(dtype).removeprefix("torch."),
        "distributed_executor_backend": "external_launcher",
        "tensor_parallel_size": settings.tensor_parallel_size,
        "seed": world.rank // settings.tensor_parallel_size,
        "max_model_len": settings.max_model_len,
        "max_num_seqs": min(settings.max_num_seqs, MAX_SEQUENCES),
        "max_num_batched_tokens": BATCHED_TOKENS,
        "enforce_eager": settings.enforce_eager or not on_cuda,
        "logprobs_mode": "processed_logprobs",
        # The cache needs space for the media of only two prompts, because a prompt's completions are requested in succession.
        "mm_processor_cache_gb": max(1.0, 2 * settings.max_model_len * MEDIA_BYTES_PER_TOKEN / 2**30),
        "use_tqdm_on_load": False,
        "trust_remote_code": trust_remote_code,
    }
    if on_cuda:
        return arguments | {"enable_sleep_mode": sleep_mode, "gpu_memory_utilization": settings.gpu_memory_utilization}
    # Chunked prefill is disabled, because after each part of a prompt except the last, vLLM would rewind the request's random
    # stream, which is impossible on a CPU.
    return arguments | {
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(BATCHED_TOKENS, settings.max_model_len),
    }


def check_delta_nets(config: Any, dtype: torch.dtype, device: torch.device) -> None:
    """Raise ConfigError if vLLM cannot compute the delta nets of a model, given its transformers configuration."""
    if device.type == "cpu" and dtype != torch.bfloat16 and has_delta_nets(config.get_text_config()):
        raise ConfigError(
            f"vLLM computes the linear-attention layers of model_type {config.model_type} on a CPU only in bfloat16, but the "
            f'weights are {str(dtype).removeprefix("torch.")}; set train.precision = "bf16", or use the transformers engine'
        )


def check_engine_options(options: Mapping[str, Any], key: str) -> None:
    """Raise ConfigError if one of `options` is not an argument of the installed vLLM; `key` is the options' configuration key."""
    known_options = read_known_arguments() if options else set()
    unknown = {name: find_nearest(name, known_options) for name in sorted(options) if name not in known_options}
    if unknown:
        advice = {name: f"did you mean {near}?" if near else "remove it" for name, near in unknown.items()}
        raise ConfigError(
            "\n".join(f"{key}.{name} is not an argument of the installed vLLM; {advice[name]}" for name in unknown)
        )


def read_known_arguments() -> set[str]:
    """Read the public fields of vLLM's `EngineArgs` from its source, because importing vLLM takes seconds and needs a device."""
    package = importlib.util.find_spec("vllm")
    if package is None or package.origin is None:
        raise ConfigError("engine_options need vLLM, which is not installed; install vLLM, or remove the options")
    source = (Path(package.origin).parent / "engine" / "arg_utils.py").read_text(encoding="utf-8")
    (arguments,) = (
        node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == "EngineArgs"
    )
    names = {
        field.target.id
        for field in arguments.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    }
    return {name for name in names if not name.startswith("_")}
