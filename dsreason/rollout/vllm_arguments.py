"""The arguments of vLLM's engine: the ones set here, and the check of those that users add."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from dsreason.errors import ConfigError
from dsreason.job.ranks import World
from dsreason.problems import find_nearest

MAX_SEQUENCES = 256
"""Largest number of completions sampled at the same time; vLLM keeps counts of the whole vocabulary for each."""
MIN_SEQUENCES = 64
"""Smallest number of completions sampled at the same time, even if a GRPO rollout has fewer: validation needs more."""
BATCHED_TOKENS = 8192
"""Tokens per forward pass; longer prompts are read in parts. vLLM keeps several rows of activations for each."""
MEDIA_BYTES_PER_TOKEN = 32 * 1024
"""Bytes per token of a processed image or video in float32; Qwen3-VL's, the largest, take 24 KiB."""


@dataclass(frozen=True, kw_only=True)
class VLLMSettings:
    """Settings of a vLLM engine."""

    max_model_len: int
    """Largest number of tokens of a prompt and its completion together."""
    tensor_parallel_size: int = 1
    gpu_memory_utilization: float = 0.4
    sleep_level: int = 2
    """1 keeps a copy of the weights in host memory, 2 keeps nothing."""
    enforce_eager: bool = False
    max_num_seqs: int = MAX_SEQUENCES
    """Number of completions requested together; those beyond `MAX_SEQUENCES` wait for their turn."""
    engine_options: Mapping[str, Any] = field(default_factory=dict)
    """Additional arguments of vLLM's `LLM`."""


def build_engine_arguments(
    world: World, settings: VLLMSettings, *, dtype: torch.dtype, sleep_mode: bool, trust_remote_code: bool
) -> dict[str, Any]:
    """Build the arguments of vLLM's `LLM` other than the model. vLLM's defaults suit a server, and cost gigabytes."""
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
        # Fit the media of two prompts: the completions of a prompt are requested one after the other.
        "mm_processor_cache_gb": max(1.0, 2 * settings.max_model_len * MEDIA_BYTES_PER_TOKEN / 2**30),
        "use_tqdm_on_load": False,
        "trust_remote_code": trust_remote_code,
    }
    if on_cuda:
        return arguments | {"enable_sleep_mode": sleep_mode, "gpu_memory_utilization": settings.gpu_memory_utilization}
    # Disable chunked prefill: on a CPU vLLM cannot rewind a request's random stream, which it does after each part of a
    # prompt but the last.
    return arguments | {
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(BATCHED_TOKENS, settings.max_model_len),
    }


def check_engine_options(options: Mapping[str, Any], key: str) -> None:
    """Raise ConfigError if the installed vLLM does not have one of the options, which are configured under `key`."""
    known_options = read_known_arguments() if options else set()
    unknown = {name: find_nearest(name, known_options) for name in sorted(options) if name not in known_options}
    if unknown:
        advice = {name: f"did you mean {near}?" if near else "remove it" for name, near in unknown.items()}
        raise ConfigError(
            "\n".join(f"{key}.{name}: is not an argument of the installed vLLM; {advice[name]}" for name in unknown)
        )


def read_known_arguments() -> set[str]:
    """Return the public fields of vLLM's `EngineArgs`, read from its source: importing it takes seconds and needs a device."""
    package = importlib.util.find_spec("vllm")
    if package is None or package.origin is None:
        raise ConfigError("engine_options need vLLM, but vLLM is not installed; install it, or remove them")
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
