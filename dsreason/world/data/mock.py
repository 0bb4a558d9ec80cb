"""Random clips of any size, with prompts, for testing a machine."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from dsreason.world.data.rows import CheckedRows
from dsreason.world.types import ClipSize, WorldRow

NUM_ROWS = 1024
SUBJECTS = ("a robot arm", "a delivery van", "a ship", "a hand with a cup", "a walking person", "a falling leaf")
PLACES = ("in a kitchen", "in a warehouse", "on a rainy street", "at the sea", "in a forest", "under a bright lamp")
COARSE = 8
"""Side length, in pixels, of a block whose pixels all have the same random value."""


def make_rows() -> CheckedRows:
    rows = CheckedRows()
    for number in range(NUM_ROWS):
        prompt = f"{SUBJECTS[number % 6]} {PLACES[number // 6 % 6]}, seen from {1 + number // 36} metres"
        rows.add(f"mock:{number}", {"prompt": prompt}, f"mock:{number}")
    return rows


def read_clip(row: WorldRow, size: ClipSize) -> Tensor:
    """Generate the row's clip, which consists of coarse noise and differs between rows: uint8 `[3, T, H, W]`."""
    rng = np.random.default_rng(int(str(row.clip).rpartition(":")[2]))
    shape = (3, size.frames, -(-size.height // COARSE), -(-size.width // COARSE))
    coarse = torch.from_numpy(rng.integers(0, 256, shape, dtype=np.uint8))
    fine = coarse.repeat_interleave(COARSE, 2).repeat_interleave(COARSE, 3)
    return fine[:, :, : size.height, : size.width].contiguous()
