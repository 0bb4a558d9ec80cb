"""NF4 blocks compared with the published table, hand-computed values, and a reference that searches for the nearest entry."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch

from dsreason.models.nf4.blocks import BLOCK, CODE_BYTES, ROW_BYTES, TABLE, count_blocks, dequantize, quantize

PUBLISHED = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334),
    *(-0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""QLoRA (2305.14314), appendix E."""


def reference(weight: torch.Tensor) -> np.ndarray:
    """Quantize and dequantize by searching the table, in numpy."""
    values = weight.float().numpy().reshape(-1)
    empty_like = np.empty_like(values)
    table = np.array(PUBLISHED, dtype=np.float32)
    for start in range(0, len(values), 64):
        block = values[start : start + 64]
        scale = np.abs(block).max()
        nearest = np.abs(block[:, None] / (scale or np.float32(1)) - table).argmin(1)
        empty_like[start : start + 64] = table[nearest] * scale
    return empty_like.reshape(weight.shape)


def weight_of(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (0.02 * torch.randn(*shape, generator=torch.Generator().manual_seed(0))).to(dtype)


def test_nf4_table_matches_published_values() -> None:
    assert TABLE == PUBLISHED


def test_block_layout_is_codes_then_scale() -> None:
    weight = torch.zeros(1, BLOCK)
    weight[0, :4] = torch.tensor([2.0, -2.0, 0.9, -1.0])  # of the scale 2: codes 15, 0, 12 (0.4407) and 2 (-0.5251)
    (row,) = quantize(weight)
    assert row[:3].tolist() == [15 << 4 | 0, 12 << 4 | 2, 7 << 4 | 7]
    assert row[CODE_BYTES:].contiguous().view(torch.float32).tolist() == [2.0]
    result = dequantize(row[None], weight.shape, torch.float32)[0, :5]
    assert result.tolist() == [2.0, -2.0, 2 * TABLE[12], 2 * TABLE[2], 0.0]


@pytest.mark.parametrize("shape", [(64, 96), (3, 33), (1, 1), (5, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_match_table_search(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    weight = weight_of(*shape, dtype=dtype)
    rows = quantize(weight)
    assert (rows.shape, rows.dtype) == ((count_blocks(weight.shape), ROW_BYTES), torch.uint8)
    result = dequantize(rows, weight.shape, torch.float32)
    assert np.array_equal(result.numpy(), reference(weight))
    assert torch.equal(dequantize(rows, weight.shape, torch.bfloat16), result.bfloat16())


def test_bytes_and_values_match_bitsandbytes() -> None:
    """Compare with bitsandbytes 0.50.2 for sin(1), sin(2), …

    The expected values come from `quantize_4bit(weight, blocksize=64, quant_type="nf4")` and `dequantize_4bit`.
    """
    weight = torch.arange(1, 129).float().sin().view(2, 64)
    rows = quantize(weight)
    codes, scales = rows[:, :CODE_BYTES].contiguous(), rows[:, CODE_BYTES:].contiguous().view(torch.float32)
    assert hashlib.sha256(codes.numpy().tobytes()).hexdigest()[:16] == "0cc4aebfe68ab77c"
    assert scales.flatten().tolist() == [0.9999902248382568, 0.9995201826095581]
    assert dequantize(rows, weight.shape, torch.float32).flatten()[:4].tolist() == [
        0.722949743270874,
        0.9999902248382568,
        0.1609286218881607,
        -0.6961860060691833,
    ]


def test_block_of_zeros_is_preserved() -> None:
    weight = torch.zeros(2, BLOCK)
    weight[1] = 3.0
    assert torch.equal(dequantize(quantize(weight), weight.shape, torch.float32), weight)


def test_dequantized_block_quantizes_to_itself() -> None:
    rows = quantize(weight_of(8, 64))
    assert torch.equal(quantize(dequantize(rows, torch.Size((8, 64)), torch.float32)), rows)


def test_subset_of_blocks_matches_full_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsreason.models.nf4.blocks.AT_ONCE", 3)
    weight = weight_of(10, 70)  # 11 blocks, the last one of 60 values
    rows = quantize(weight)
    for blocks in (range(0, 5), range(4, 11), range(10, 11), range(11, 11)):
        assert torch.equal(quantize(weight, blocks)[blocks.start : blocks.stop], rows[blocks.start : blocks.stop])
    assert np.array_equal(dequantize(rows, weight.shape, torch.float32).numpy(), reference(weight))
