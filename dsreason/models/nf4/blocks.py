"""The NF4 format (QLoRA, arXiv 2305.14314, appendix E): each block of 64 values has a 4-bit code per value and a float32 scale.

A block is a row of 36 bytes: 32 bytes with two codes each, the first of which is in the high half, and the 4 bytes of the scale.
Because codes and scales are bytes of one tensor, code that partitions, gathers or moves weights handles a single tensor and never
casts the scales. Values and codes are the same as in bitsandbytes' `nf4` with `blocksize=64` and without quantised scales.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

TABLE = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""Value of each code; multiply it by the block's scale."""
BLOCK = 64
"""Number of values in a block."""
CODE_BYTES = BLOCK // 2
ROW_BYTES = CODE_BYTES + 4
AT_ONCE = 2**18
"""Number of blocks to process at a time, which keeps the float32 and index tensors below 200 MB."""


def count_blocks(shape: torch.Size) -> int:
    """Return the number of blocks in a weight; the last block may be padded."""
    return -(-shape.numel() // BLOCK)


def quantize(weight: Tensor, blocks: range | None = None) -> Tensor:
    """Quantise a complete weight to `[blocks, 36]` uint8 on its device. Rows outside `blocks` (default: all) are undefined.

    Pages that are never written take no memory, so a call for a range of blocks needs memory only for these blocks.
    """
    rows = torch.empty(count_blocks(weight.shape), ROW_BYTES, dtype=torch.uint8, device=weight.device)
    blocks = range(len(rows)) if blocks is None else blocks
    table = torch.tensor(TABLE, device=weight.device)
    midpoints = (table[1:] + table[:-1]) / 2
    for start in range(blocks.start, blocks.stop, AT_ONCE):
        stop = min(start + AT_ONCE, blocks.stop)
        values = weight.reshape(-1)[start * BLOCK : stop * BLOCK].float()
        values = torch.nn.functional.pad(values, (0, (stop - start) * BLOCK - values.numel())).view(-1, BLOCK)
        scales = values.abs().amax(1, keepdim=True)
        codes = torch.bucketize(values / torch.where(scales > 0, scales, 1), midpoints, out_int32=True).to(torch.uint8)
        rows[start:stop, :CODE_BYTES] = codes[:, ::2] << 4 | codes[:, 1::2]
        rows[start:stop, CODE_BYTES:] = scales.view(torch.uint8)
    return rows


def dequantize(rows: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Compute a weight from the rows that `quantize` returned: code value times scale in float32, rounded once to `dtype`."""
    values = torch.empty(len(rows), BLOCK, dtype=dtype, device=rows.device)
    for part, part_values in zip(rows.split(AT_ONCE), values.split(AT_ONCE), strict=True):
        scales = part[:, CODE_BYTES:].contiguous().view(torch.float32)
        pairs = torch.nn.functional.embedding(part[:, :CODE_BYTES].int(), make_code_pairs(rows.device)).view(-1, BLOCK)
        part_values.copy_(pairs * scales)
    return values.view(-1)[: shape.numel()].view(shape)


@cache
def make_code_pairs(device: torch.device) -> Tensor:
    """Return the two values that each possible byte encodes, `[256, 2]` float32."""
    table = torch.tensor(TABLE)
    byte = torch.arange(256)
    return torch.stack([table[byte >> 4], table[byte & 15]], dim=1).to(device)
