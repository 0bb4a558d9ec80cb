"""Attention of packed rows on a real GPU: torch's variable-length kernel against each part by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from dsreason.config.schema import SFTConfig
from dsreason.data.collate import collate, pack
from dsreason.data.sources import open_datasets
from dsreason.data.types import Batch, EncodedSample, Segment
from dsreason.models.attention import (
    KernelCall,
    attend_by_kernel,
    attend_by_segment,
    attend_vision,
    build_attention_inputs,
    build_row_layout,
    call_varlen_kernel,
    compute_starts,
    has_kernel,
)
from dsreason.models.load import load_model
from dsreason.models.policy import Policy, enable_gradient_checkpointing
from dsreason.models.tiny import build_tiny
from dsreason.train.common.preflight import build_encoder
from tests.integration.rows import write_mixed_rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]
GPU = torch.device("cuda", 0)

FAMILIES = ["qwen2_5_vl", "qwen3_vl"]
SAMPLES = [Segment(0, 300), Segment(300, 1), Segment(301, 77), Segment(378, 170)]
SHARED = [
    Segment(0, 300),
    Segment(300, 77),
    Segment(377, 40, parent=1),
    Segment(417, 1, parent=1),
    Segment(418, 129, parent=1),
    Segment(547, 1),
]


def drawn(shape: Sequence[int], seed: int) -> Tensor:
    """Normal numbers that bfloat16 can hold."""
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return made.bfloat16().to(GPU)


def with_gradients(attend: Callable[..., Tensor], inputs: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Return the output in this precision and the gradients of the inputs, all as float32."""
    leaves = [tensor.to(dtype, copy=True).requires_grad_() for tensor in inputs]
    result = attend(*leaves)
    result.backward(drawn(result.shape, 9).to(dtype))
    return [tensor.float() for tensor in (result.detach(), *(leaf.grad for leaf in leaves)) if tensor is not None]


def errors(found: Sequence[Tensor], exact: Sequence[Tensor]) -> list[float]:
    return [float((a - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True)]


def assert_as_near(found: Sequence[Tensor], other: Sequence[Tensor], exact: Sequence[Tensor]) -> None:
    """Assert that `found` differs from `exact` only by rounding: not much more than `other` of the same precision."""
    assert all(f <= 2 * o + 2e-3 for f, o in zip(errors(found, exact), errors(other, exact), strict=True))
    assert max(errors(found, exact)) <= 0.02


@pytest.mark.parametrize("segments", [SAMPLES, SHARED], ids=["samples", "shared prompt"])
@pytest.mark.parametrize("heads", [(4, 4), (16, 8), (28, 4)])
@pytest.mark.parametrize("width", [32, 128])
def test_kernel_matches_attention_by_segment(segments: Sequence[Segment], heads: tuple[int, int], width: int) -> None:
    length, layout = segments[-1].end, build_row_layout(segments, GPU)
    inputs = [drawn((1, count, length, width), seed) for seed, count in enumerate((heads[0], heads[1], heads[1]))]
    assert layout.calls and has_kernel(inputs[0])

    def by_parts(*tensors: Tensor) -> Tensor:
        return attend_by_segment(*tensors, segments, None)

    gradients = with_gradients(lambda *tensors: attend_by_kernel(*tensors, layout, None), inputs, torch.bfloat16)
    assert_as_near(
        gradients, with_gradients(by_parts, inputs, torch.bfloat16), with_gradients(by_parts, inputs, torch.float32)
    )


def test_attention_is_causal_from_the_lower_right() -> None:
    # Queries of 0 weigh what they see alike: of 7 keys with the values 0 … 6 the three queries see 5, 6 and 7.
    query = torch.zeros(3, 2, 64, dtype=torch.bfloat16, device=GPU)
    value = torch.arange(7.0, device=GPU)[:, None, None].expand(7, 2, 64).bfloat16()
    call = KernelCall(None, None, compute_starts([3]).to(GPU), compute_starts([7]).to(GPU), 3, 7)
    result = call_varlen_kernel(query, torch.ones_like(value), value, call, None, causal=True)
    assert result[:, 0, 0].tolist() == [2.0, 2.5, 3.0]


@pytest.mark.parametrize("width", [64, 72, 80])
def test_tower_windows_attend_only_within_themselves(width: int) -> None:
    sizes = [64, 64, 16, 4, 256]
    inputs, starts = [drawn((1, 16, sum(sizes), width), seed) for seed in range(3)], compute_starts(sizes).to(GPU)

    def tower(*tensors: Tensor) -> Tensor:
        return attend_vision(
            torch.nn.Identity(), *tensors, cu_seq_lens_q=starts, max_length_q=max(sizes), scaling=width**-0.5
        )[0]

    def by_parts(*tensors: Tensor) -> Tensor:
        parts = zip(*(tensor.split(sizes, dim=2) for tensor in tensors), strict=True)
        return torch.cat([scaled_dot_product_attention(*part) for part in parts], dim=2).transpose(1, 2)

    gradients = with_gradients(tower, inputs, torch.bfloat16)
    exact = with_gradients(by_parts, inputs, torch.float32)
    assert_as_near(gradients, with_gradients(by_parts, inputs, torch.bfloat16), exact)
    assert max(errors(with_gradients(tower, inputs, torch.float32), exact)) <= 1e-5  # without the kernel


# ---------------------------------------------------------------- whole models


@pytest.fixture(scope="module", params=FAMILIES)
def model_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(request.param, tmp_path_factory.mktemp("models") / "model", num_layers=4)


@pytest.fixture(scope="module")
def samples(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> list[EncodedSample]:
    """Encode eight samples: only text, one image, a video and two images, in turn."""
    rows = write_mixed_rows(tmp_path_factory.mktemp("rows"))
    data = {"adapter": "jsonl", "path": str(rows), "vision": {"fps": 4.0}}
    config = SFTConfig.model_validate({"data": data})
    encoder, (result, _) = build_encoder(config, model_path), open_datasets(config.data)
    return [encoder.encode(result[i]) for i in range(len(result))]


def completions_of(samples: Sequence[EncodedSample]) -> list[EncodedSample]:
    """Build two completions for each sample as the prompt, of 5 and 8 tokens."""
    result = []
    for prompt in samples:
        for length in (5, 8):
            ids = torch.arange(5, 5 + length)
            result.append(
                EncodedSample(
                    id=prompt.id,
                    input_ids=ids,
                    loss_mask=torch.ones(length, dtype=torch.bool),
                    position_ids=(prompt.position_ids.max() + 1 + torch.arange(length)).expand(3, -1),
                    mm_token_type_ids=torch.zeros(length, dtype=torch.int64),
                    mm_kwargs={},
                    parent=prompt,
                )
            )
    return result


def policy(path: Path, attention: str, dtype: torch.dtype = torch.bfloat16) -> Policy:
    """Its weights are always such that bfloat16 can hold them."""
    return Policy(load_model(path, dtype=torch.bfloat16, attention=attention).to(GPU, dtype))


def results(one: Policy, batch: Batch) -> list[Tensor]:
    """Log-probabilities, and all gradients of a weighted sum of them as one vector."""
    result = one(batch.to(GPU))
    weights = torch.randn(len(result), generator=torch.Generator().manual_seed(1)).to(GPU)
    (result * weights).sum().backward()
    gradients = [p.grad.float().flatten() for _, p in sorted(one.named_parameters()) if p.grad is not None]
    return [result.detach().float(), torch.cat(gradients)]


@pytest.mark.parametrize("shared", [False, True], ids=["samples", "shared prompts"])
def test_packed_row_matches_padded_rows(shared: bool, model_path: Path, samples: list[EncodedSample]) -> None:
    value = completions_of(samples) if shared else samples
    exact = results(policy(model_path, "sdpa", torch.float32), collate(value, pad_id=0))
    padded = results(policy(model_path, "sdpa"), collate(value, pad_id=0))
    packed, in_fp32 = (
        results(policy(model_path, "auto", dtype), pack(value)) for dtype in (torch.bfloat16, torch.float32)
    )
    # Several thousand roundings to bfloat16 lie between the two; a sample that saw another would be off by far more.
    assert all(f <= 2 * o + 2e-3 for f, o in zip(errors(packed, exact), errors(padded, exact), strict=True))
    assert max(errors(in_fp32, exact)) <= 1e-4  # parts by themselves, for which the kernel is not made


@torch.no_grad()
def test_a_sample_never_sees_another(model_path: Path, samples: list[EncodedSample]) -> None:
    item, batch = policy(model_path, "auto"), pack(samples)
    before, last = item(batch.to(GPU)), batch.segments[-1]
    batch.input_ids[0, last.end - 2] += 1  # text of the last sample
    result, of_last = item(batch.to(GPU)), int((batch.targets >= last.start).sum())
    assert torch.equal(result[:-of_last], before[:-of_last])
    assert not torch.equal(result[-of_last:], before[-of_last:])


@pytest.mark.parametrize("recomputed", [False, True])
def test_layers_never_wait_for_the_gpu(recomputed: bool, model_path: Path, samples: list[EncodedSample]) -> None:
    item = policy(model_path, "auto")
    if recomputed:
        enable_gradient_checkpointing(item.model)
    item.train()
    text, batch = item.model.model.language_model, pack(completions_of(samples)).to(GPU)
    embedded = item.model.get_input_embeddings()(batch.input_ids).detach().requires_grad_()

    def run() -> None:
        inputs = build_attention_inputs(item.model, batch)
        output = text(inputs_embeds=embedded, use_cache=False, **inputs).last_hidden_state
        output.float().square().mean().backward()

    run()  # libraries are opened, and kernels chosen
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_tower_attention_never_waits_for_gpu() -> None:
    inputs, starts = [drawn((1, 4, 96, 64), seed) for seed in range(3)], compute_starts([64, 32]).to(GPU)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        attend_vision(torch.nn.Identity(), *inputs, cu_seq_lens_q=starts, max_length_q=64)
    finally:
        torch.cuda.set_sync_debug_mode("default")


# ---------------------------------------------------------------- offloaded inputs


@pytest.mark.parametrize("family", FAMILIES)
def test_offloaded_inputs_leave_gpu_and_preserve_gradients(family: str, tmp_path: Path) -> None:
    layers, width, length = 8, 256, 2000
    path = build_tiny(family, tmp_path / "model", num_layers=layers, hidden_size=width)
    encoder = build_encoder(SFTConfig(), path)
    ids = torch.randint(5, 60, (length,), generator=torch.Generator().manual_seed(0))
    text = EncodedSample(
        id="",
        input_ids=ids,
        loss_mask=torch.ones(length, dtype=torch.bool),
        position_ids=torch.arange(length).expand(3, -1),
        mm_token_type_ids=torch.zeros_like(ids),
        mm_kwargs={},
    )
    batch = pack([text, encoder.build_dummy("image")]).to(GPU)

    def run(*, offload: bool) -> tuple[Tensor, int]:
        """The gradients as one vector, and the bytes that wait on the GPU for the backward pass."""
        item = policy(path, "auto", torch.float32).train()
        enable_gradient_checkpointing(item.model, offload=offload)
        before = torch.cuda.memory_allocated()
        loss = item(batch).mean()
        waiting = torch.cuda.memory_allocated() - before
        loss.backward()
        return torch.cat([p.grad.flatten() for _, p in sorted(item.named_parameters()) if p.grad is not None]), waiting

    (expected, held), (result, remaining) = run(offload=False), run(offload=True)
    assert float((result - expected).norm() / expected.norm()) <= 1e-5
    assert held - remaining >= (layers - 1) * batch.input_ids.numel() * width * 4
