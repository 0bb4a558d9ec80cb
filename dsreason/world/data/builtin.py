"""Built-in clips, in which a square in one of three colours moves in one of four directions over a dark background.

With `data.path = "mislabelled"`, the colour and the direction in each caption are independently replaced at random with
probability 1/2. A model trained on these captions has something to unlearn.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dsreason.errors import DataError
from dsreason.world.data.rows import CheckedRows
from dsreason.world.types import ClipSize, WorldRow

NUM_ROWS = 4096
MISLABELLED = "mislabelled"
COLOURS = {"red": (1.0, 0.1, 0.1), "green": (0.1, 1.0, 0.1), "blue": (0.15, 0.2, 1.0)}
MOVES = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
"""Direction → change in x and y."""
SIDE, TRAVEL = 10 / 32, 12 / 32
"""Side of the square and distance that it travels, as fractions of the clip's shorter side: 10 and 12 of 32 pixels."""


@dataclass(frozen=True)
class Square:
    """The content of a built-in clip."""

    colour: str
    move: str
    brightness: float
    """Brightness of the square, 0.55 to 1."""
    background: float
    """Grey level of the background, 0 to 0.25."""
    start: tuple[float, float]
    """Initial x and y, as fractions of the available space."""


def draw_square(seed: int, number: int) -> tuple[Square, str]:
    """Draw a random square, and a caption whose colour and direction are each replaced at random with probability ½."""
    rng = np.random.default_rng([seed, number])
    colour, move = str(rng.choice([*COLOURS])), str(rng.choice([*MOVES]))
    square = Square(colour, move, rng.uniform(0.55, 1), rng.uniform(0, 0.25), (rng.uniform(), rng.uniform()))
    caption_colour = str(rng.choice([*COLOURS])) if rng.uniform() < 0.5 else colour
    caption_move = str(rng.choice([*MOVES])) if rng.uniform() < 0.5 else move
    return square, write_caption(caption_colour, caption_move)


def write_caption(colour: str, move: str) -> str:
    return f"a {colour} square moves {move}"


PROMPTS = tuple(write_caption(colour, move) for colour in COLOURS for move in MOVES)


def make_rows(seed: int, variant: str = "", count: int = NUM_ROWS) -> CheckedRows:
    """Build the rows. Each row's `meta` contains the clip's true `colour` and `move`.

    Raises:
        DataError: `variant` is neither empty nor `mislabelled`.
    """
    if variant not in ("", MISLABELLED):
        raise DataError(f'{variant}: must be empty or "{MISLABELLED}" with data.format = "builtin"')
    rows = CheckedRows()
    for number in range(count):
        square, drawn_caption = draw_square(seed, number)
        prompt = drawn_caption if variant else write_caption(square.colour, square.move)
        facts = {"prompt": prompt, "colour": square.colour, "move": square.move}
        rows.add(f"builtin:{seed}:{number}", facts, f"builtin:{seed}:{number}")
    return rows


def read_clip(row: WorldRow, size: ClipSize) -> Tensor:
    _, seed, number = str(row.clip).split(":")
    return draw_clip(draw_square(int(seed), int(number))[0], size)


def draw_clip(square: Square, size: ClipSize) -> Tensor:
    """Draw a square's clip with antialiased edges: uint8 `[3, T, H, W]`."""
    side, travel = SIDE * min(size.height, size.width), TRAVEL * min(size.height, size.width)
    along = torch.linspace(0, 1, size.frames)
    cover = []
    for axis, extent in enumerate((size.width, size.height)):
        way = MOVES[square.move][axis]
        room = extent - side - abs(way) * travel
        first = square.start[axis] * room + (travel if way < 0 else 0)
        cover.append(_compute_coverage(first + way * travel * along, side, extent))
    mask = cover[1][:, :, None] * cover[0][:, None, :]  # [T, H, W]
    rgb = torch.tensor(COLOURS[square.colour]) * square.brightness
    clip = square.background * (1 - mask) + rgb[:, None, None, None] * mask
    return (clip * 255).round().to(torch.uint8)


def _compute_coverage(first: Tensor, side: float, extent: int) -> Tensor:
    """Return how much of each pixel along an axis is covered by a square that starts at `first[t]`: `[T, extent]`, 0 to 1."""
    pixel = torch.arange(extent)
    return torch.minimum(pixel + 1, first[:, None] + side).sub(torch.maximum(pixel, first[:, None])).clamp(0, 1)
