"""Separate measurements of attention, the vision towers and the log-probability head, at a real model's sizes."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator
from copy import copy
from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks.gpu_report.parts import BenchmarkSetup, Value
from benchmarks.gpu_report.timing import measure_peak_gib, measure_seconds, run_forward_backward

if TYPE_CHECKING:
    from torch import Tensor, nn

NEW_SHAPES = 16


def attention(setup: BenchmarkSetup) -> Iterator[tuple[str, Value]]:
    """Measure attention as dsreason configures it, then with cuDNN enabled and disabled."""
    import torch

    from dsreason.job.ranks import init_world, shutdown

    init_world()
    yield from measure_kernels("as dsreason sets it", setup)
    yield from time_decoding("as dsreason sets it", setup)
    yield from count_nonfinite_gradients("as dsreason sets it", setup)
    yield from compare_packed_rows(setup)
    if setup.cards:
        for allowed in (True, False):
            how = f"cuDNN {'allowed' if allowed else 'off'}"
            torch.backends.cuda.enable_cudnn_sdp(allowed)
            yield from measure_kernels(how, setup)
            yield from time_decoding(how, setup)
            yield from count_nonfinite_gradients(how, setup)
    shutdown()


def measure_kernels(how: str, setup: BenchmarkSetup) -> Iterator[tuple[str, Value]]:
    """Yield the chosen kernel, the time of a forward and backward pass with and without a mask, and the extra time for a new
    sequence length."""
    import torch
    from torch.nn.attention import SDPBackend
    from torch.nn.functional import scaled_dot_product_attention

    rows, heads, length = (2, 2, 64) if setup.tiny else (4, 16, 2048)
    for masked in (False, True):
        name = f"{how}: {'padded' if masked else 'whole'} rows"

        def run(length: int, masked: bool = masked) -> None:
            query, mask = build_attention_input(setup, rows, heads, length, masked)
            output = scaled_dot_product_attention(query, query, query, attn_mask=mask, is_causal=not masked)
            output.backward(output.detach())

        query, mask = build_attention_input(setup, rows, heads, length, masked)
        number = torch._fused_sdp_choice(query, query, query, mask, 0.0, not masked)
        yield f"{name} kernel", SDPBackend(number).name
        yield f"{name}, forward and backward, ms", 1e3 * measure_seconds(lambda run=run: run(length))
        lengths = range(length + 1, length + 1 + NEW_SHAPES)
        first = measure_seconds(lambda run=run, lengths=lengths: [run(n) for n in lengths], times=1, warm_up=False)
        repeated = measure_seconds(lambda run=run, lengths=lengths: [run(n) for n in lengths], times=1, warm_up=False)
        yield f"{name}, a new length more than a seen one, ms", 1e3 * (first - repeated) / NEW_SHAPES


def compare_packed_rows(setup: BenchmarkSetup) -> Iterator[tuple[str, Value]]:
    """Compare dsreason's packed attention with segment-by-segment attention, on a row of samples and on a shared prompt."""
    import torch

    from dsreason.data.types import Segment
    from dsreason.models.attention import attend_by_segment, attend_text, build_row_layout

    length, count = (32, 4) if setup.tiny else (1024, 8)
    samples = [Segment(i * length, length) for i in range(count)]
    shared = [Segment(0, length), *(Segment(length + i * length // 8, length // 8, parent=0) for i in range(count))]
    for name, segments in (("samples", samples), ("shared prompt", shared)):
        layout = build_row_layout(segments, torch.device(setup.device))
        shapes = [(1, heads, segments[-1].end, 128) for heads in (16, 8, 8)]
        inputs = [torch.randn(shape, device=setup.device, dtype=torch.bfloat16) for shape in shapes]

        def run_packed(layout: Any = layout, inputs: Any = inputs) -> list[Tensor]:
            attended = partial(attend_text, torch.nn.Identity(), attention_mask=None, layout=layout)
            return run_forward_backward(lambda *tensors: attended(*tensors)[:1], inputs)

        def run_by_parts(segments: Any = segments, inputs: Any = inputs) -> list[Tensor]:
            return run_forward_backward(lambda *tensors: (attend_by_segment(*tensors, segments, None),), inputs)

        pairs = [
            (packed.float(), separate.float()) for packed, separate in zip(run_packed(), run_by_parts(), strict=True)
        ]
        yield (
            f"packed {name}: difference",
            max(float((packed - separate).norm() / separate.norm()) for packed, separate in pairs),
        )
        yield f"packed {name}, forward and backward, ms", 1e3 * measure_seconds(run_packed)
        yield f"packed {name}, part by part, ms", 1e3 * measure_seconds(run_by_parts)


def build_attention_input(
    setup: BenchmarkSetup, rows: int, heads: int, length: int, masked: bool
) -> tuple[Tensor, Tensor | None]:
    """Return random queries `[rows, heads, length, 128]` and, if `masked`, a causal mask with padding in the second row."""
    import torch

    query = torch.randn(rows, heads, length, 128, device=setup.device, dtype=torch.bfloat16, requires_grad=True)
    if not masked:
        return query, None
    mask = torch.ones(rows, 1, length, length, dtype=torch.bool, device=setup.device).tril()
    mask[1, :, :, length - 9 :] = False
    return query, mask


def time_decoding(how: str, setup: BenchmarkSetup) -> Iterator[tuple[str, Value]]:
    """Time decoding as in transformers' `generate`: one query, and one more key for each token."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    first, last = (32, 40) if setup.tiny else (700, 764)
    query, keys = (torch.randn(8, 16, length, 128, device=setup.device, dtype=torch.bfloat16) for length in (1, last))

    def run() -> None:
        for length in range(first, last):
            scaled_dot_product_attention(query, keys[:, :, :length], keys[:, :, :length])

    yield f"{how}: decoding, ms a token", 1e3 * measure_seconds(run, times=1, warm_up=False) / (last - first)


def count_nonfinite_gradients(how: str, setup: BenchmarkSetup) -> Iterator[tuple[str, Value]]:
    """Count non-finite gradients for queries and keys with one strong common channel, as in Qwen2.5.

    With a mask, cuDNN's backward pass gives NaN if a row's scores are far below zero and the length is 64 above a multiple
    of 128.
    """
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    for length in (192, 128) if setup.tiny else (704, 1088, 640):
        torch.manual_seed(0)
        query, key, value = (torch.randn(1, 1, length, 128, device=setup.device) for _ in range(3))
        query, key = 0.1 * query, 0.1 * key
        query[..., 0], key[..., 0] = 1.0, -120 * math.sqrt(128)  # every score is about -120
        leaves = [tensor.bfloat16().requires_grad_() for tensor in (query, key, value)]
        mask = torch.ones(1, 1, length, length, dtype=torch.bool, device=setup.device).tril()
        output = scaled_dot_product_attention(*leaves, attn_mask=mask)
        output.backward(torch.randn_like(output))
        count = sum(int((~leaf.grad.isfinite()).sum()) for leaf in leaves)
        yield f"{how}: length {length} non-finite gradients", count


# ---------------------------------------------------------------- vision


def vision(setup: BenchmarkSetup) -> Iterator[tuple[str, Value]]:
    """Time each tower on one clip, in transformers' implementation (one kernel call per window) and in dsreason's.

    Both compute the patch embedding as a matrix product, because cuDNN's convolution in bf16 took minutes for this clip. The
    convolution is timed last, on a few patches.
    """
    import torch

    from dsreason.models.media_features import PatchProduct

    for family, names in (
        ("qwen2_5_vl", ("Qwen2_5_VLVisionConfig", "Qwen2_5_VisionTransformerPretrainedModel")),
        ("qwen3_vl", ("Qwen3VLVisionConfig", "Qwen3VLVisionModel")),
    ):
        tower = build_tower(family, *names, setup)
        embedding = tower.patch_embed.proj
        # Stays a convolution, for the comparison; the next line turns `embedding` into a matrix product.
        plain = copy(embedding)
        embedding.__class__ = PatchProduct
        grid = torch.tensor([[2, 16, 20] if setup.tiny else [30, 20, 28]], device=setup.device)
        patch = 3 * tower.config.temporal_patch_size * tower.config.patch_size**2
        pixels = torch.randn(int(grid.prod()), patch, device=setup.device, dtype=tower.dtype)
        yield from compare_towers(family, tower, pixels, grid)
        yield from time_patch_embedding(family, plain, pixels[: 2**9])


def compare_towers(family: str, tower: nn.Module, pixels: Tensor, grid: Tensor) -> Iterator[tuple[str, Value]]:
    """Yield each implementation's time, and the larger of the relative differences in its output and in its gradient."""
    from dsreason.models.attention import VISION

    plain = build_tower_run(tower, "sdpa", pixels, grid)()
    for name, implementation in (("by windows", "sdpa"), ("as dsreason computes it", VISION)):
        run = build_tower_run(tower, implementation, pixels, grid)
        pairs = zip(run(), plain, strict=True)
        yield f"{family} {name}: difference", max(float((a - b).norm() / b.norm()) for a, b in pairs)
        yield f"{family} {name}: forward and backward, s", measure_seconds(run)


def build_tower(family: str, config_name: str, model_name: str, setup: BenchmarkSetup) -> nn.Module:
    import torch

    package = f"transformers.models.{family}"
    config_class = getattr(importlib.import_module(f"{package}.configuration_{family}"), config_name)
    model_class = getattr(importlib.import_module(f"{package}.modeling_{family}"), model_name)
    sizes = {"depth": 2, "hidden_size": 64, "num_heads": 2, "intermediate_size": 64, "out_hidden_size": 64}
    real = (
        {"hidden_size": 1280, "intermediate_size": 3420} if family == "qwen2_5_vl" else {}
    )  # these values differ from the class's defaults
    sizes |= {"fullatt_block_indexes": [1]} if family == "qwen2_5_vl" else {"deepstack_visual_indexes": [0]}
    config = config_class(**(sizes if setup.tiny else real))
    torch.manual_seed(0)
    dtype = torch.bfloat16 if setup.cards else torch.float32
    with torch.device(setup.device):  # a CPU thread would need minutes to draw 0.7e9 values
        return model_class._from_config(config, dtype=dtype, attn_implementation="sdpa").to(setup.device)


def build_tower_run(
    tower: nn.Module, implementation: str, pixels: Tensor, grid: Tensor
) -> Callable[[], tuple[Tensor, Tensor]]:
    """Build a function that runs a forward and a backward pass, and returns the output and the gradient of the first block's
    QKV matrix, both in float32."""

    def run() -> tuple[Tensor, Tensor]:
        for module in tower.modules():  # `set_attn_implementation` would search the Hub for a kernel of that name
            if hasattr(module, "config"):
                module.config._attn_implementation = implementation
        tower.zero_grad()
        output = tower(pixels, grid_thw=grid).pooler_output
        output.float().square().mean().backward()
        return output.detach().float(), tower.blocks[0].attn.qkv.weight.grad.detach().float()

    return run


def time_patch_embedding(family: str, convolution: nn.Module, pixels: Tensor) -> Iterator[tuple[str, Value]]:
    """Time the first layer as a convolution, as in transformers, and as the equivalent matrix product."""
    cubes, matrix = pixels.view(-1, *convolution.weight.shape[1:]), convolution.weight.flatten(1)
    yield f"{family} 512 patches by matrix product, s", measure_seconds(lambda: pixels @ matrix.T)
    yield f"{family} 512 patches by convolution, s", measure_seconds(lambda: convolution(cubes), times=1)


# ---------------------------------------------------------------- head


def head(setup: BenchmarkSetup) -> Iterator[tuple[str, Value]]:
    """Time the forward and backward pass of log-probabilities with entropy by chunk size; `own choice` is the
    chunk size that a training run uses."""
    import torch

    from dsreason.models.logprobs import compute_token_logprobs

    tokens, width, vocabulary = (64, 32, 1000) if setup.tiny else (8192, 4096, 151_936)
    hidden, weight = (
        (scale * torch.randn(count, width, device=setup.device, dtype=torch.bfloat16)).requires_grad_()
        for count, scale in ((tokens, 1.0), (vocabulary, 0.02))
    )
    targets = torch.randint(vocabulary, (tokens,), device=setup.device)
    chunks = {"own choice": None} | {
        f"2^{bits} logits at a time": max(1, 2**bits // vocabulary)
        for bits in ((12, 13) if setup.tiny else range(25, 29))
    }
    for name, chunk in chunks.items():

        def run(chunk: int | None = chunk) -> None:
            hidden.grad = weight.grad = None
            logprobs, entropy = compute_token_logprobs(hidden, weight, targets, chunk_size=chunk, with_entropy=True)
            (logprobs.sum() + entropy.sum()).backward()

        yield f"{name}: forward and backward, s", measure_seconds(run)
        yield f"{name}: peak, GiB", measure_peak_gib(run)
