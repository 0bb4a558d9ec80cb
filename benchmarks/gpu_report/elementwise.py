"""Elementwise operations of a decoder layer in several libraries; `model.fused_kernels` was chosen from the results."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from benchmarks.gpu_report.parts import BenchmarkSetup, Value
from benchmarks.gpu_report.timing import Function, measure_seconds, run_forward_backward

if TYPE_CHECKING:
    from torch import Tensor

EPSILON = 1e-6


def fused(setup: BenchmarkSetup) -> Iterator[tuple[str, Value]]:
    """Time a row's forward and backward pass, and compare the results and gradients with transformers' in float32."""
    has_liger = bool(setup.cards) and importlib.util.find_spec("liger_kernel") is not None
    yield "Liger-Kernel takes part", has_liger
    for operation, inputs, functions in (
        ("RMSNorm", build_norm_inputs(setup), build_norms(has_liger)),
        ("SwiGLU", build_swiglu_inputs(setup), build_swiglus(has_liger)),
        ("rotary positions", build_rotary_inputs(setup), build_rotaries(has_liger)),
    ):
        yield from compare(operation, inputs, functions, setup)


def compare(
    operation: str, inputs: Sequence[Tensor], functions: dict[str, Function], setup: BenchmarkSetup
) -> Iterator[tuple[str, Value]]:
    """Measure each function against transformers' function in float32; on a GPU, also measure torch.compile."""
    import torch

    plain = functions["transformers"]
    exact = run_forward_backward(plain, [tensor.float() for tensor in inputs])
    if setup.cards:
        functions |= {"torch.compile": torch.compile(plain, dynamic=True)}
    for library, function in functions.items():
        own_inputs = [tensor.clone() for tensor in inputs]  # some of Liger's kernels overwrite their inputs
        pairs = zip(run_forward_backward(function, own_inputs), exact, strict=True)
        yield f"{operation}, {library}: difference", max(float((a - b).norm() / b.norm()) for a, b in pairs)
        run = partial(run_forward_backward, function, own_inputs)
        seconds = measure_seconds(run, times=10)
        yield f"{operation}, {library}: forward and backward, ms", 1e3 * seconds


def build_random_tensors(setup: BenchmarkSetup, *shapes: tuple[int, ...]) -> list[Tensor]:
    import torch

    return [torch.randn(shape, device=setup.device, dtype=torch.bfloat16) for shape in shapes]


# ---------------------------------------------------------------- RMSNorm: hidden states and weight


def build_norm_inputs(setup: BenchmarkSetup) -> list[Tensor]:
    tokens, width = (64, 128) if setup.tiny else (16_384, 2048)
    return build_random_tensors(setup, (1, tokens, width), (width,))


def build_norms(has_liger: bool) -> dict[str, Function]:
    from torch.func import functional_call
    from torch.nn.functional import rms_norm
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

    norm = Qwen3RMSNorm(1, EPSILON)
    functions: dict[str, Function] = {
        "transformers": lambda hidden, weight: (functional_call(norm, {"weight": weight}, hidden),),
        "torch": lambda hidden, weight: (rms_norm(hidden, weight.shape, weight, EPSILON),),
    }
    if has_liger:
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction

        functions["Liger"] = lambda hidden, weight: (
            LigerRMSNormFunction.apply(hidden, weight, EPSILON, 0.0, "llama", False),
        )
    return functions


# ---------------------------------------------------------------- SwiGLU: gate and up projections


def build_swiglu_inputs(setup: BenchmarkSetup) -> list[Tensor]:
    shape = (1, 64, 128) if setup.tiny else (1, 16_384, 6144)
    return build_random_tensors(setup, shape, shape)


def build_swiglus(has_liger: bool) -> dict[str, Function]:
    from torch.nn.functional import silu

    functions: dict[str, Function] = {"transformers": lambda gate, up: (silu(gate) * up,)}
    if has_liger:
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction

        functions["Liger"] = lambda gate, up: (LigerSiLUMulFunction.apply(gate, up),)
    return functions


# ---------------------------------------------------------------- rotary positions: queries, keys, cosines and sines


def build_rotary_inputs(setup: BenchmarkSetup) -> list[Tensor]:
    tokens = 64 if setup.tiny else 16_384
    return build_random_tensors(setup, (1, tokens, 16, 128), (1, tokens, 8, 128))


def build_rotaries(has_liger: bool) -> dict[str, Function]:
    import torch
    from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

    def compute_angles(like: Tensor) -> tuple[Tensor, Tensor]:
        tokens, size = like.shape[1], like.shape[3]
        frequencies = 10_000.0 ** (-torch.arange(0, size, 2, device=like.device) / size)
        turns = torch.arange(tokens, device=like.device)[:, None] * frequencies
        turns = torch.cat([turns, turns], -1)[None]
        return turns.cos().to(like.dtype), turns.sin().to(like.dtype)

    cache: dict[torch.dtype, tuple[Tensor, Tensor]] = {}

    def add_angles(rotate: Function) -> Function:
        def rotate_heads(query: Tensor, key: Tensor) -> tuple[Tensor, ...]:
            if query.dtype not in cache:
                cache[query.dtype] = compute_angles(query)
            return rotate(query.transpose(1, 2), key.transpose(1, 2), *cache[query.dtype])

        return rotate_heads

    functions = {"transformers": add_angles(apply_rotary_pos_emb)}
    if has_liger:
        from liger_kernel.ops.rope import LigerRopeFunction

        functions["Liger"] = add_angles(LigerRopeFunction.apply)
    return functions
