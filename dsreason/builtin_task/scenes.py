"""Pictures and clips for the built-in task: plain shapes on a black background, drawn with numpy and a seeded generator.

The answer to a question about a clip depends on how the clip changes over time. If the question allows it, the clips for two
answers are each other's reverse, so both contain the same frames. Start positions cover the entire available space.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Frames = NDArray[np.uint8]
"""Pixels as uint8 [frames, height, width, 3]; a picture has one frame."""

COLOURS = {"red": (255, 30, 30), "green": (30, 255, 30), "blue": (40, 40, 255), "yellow": (255, 255, 30)}
WHITE = (255, 255, 255)
GROUND = (120, 120, 120)
COUNTS = ("one", "two", "three", "four")
DIRECTIONS = ("left", "right", "up", "down")
SIDE = 56
"""Side of square media in pixels: two merged patches in Qwen2.5-VL."""
LANE = (28, 112)
"""Height and width in pixels of clips in which two balls move along a line."""
CLIP_FRAMES = 8
TRAVEL = 12
"""Distance in pixels that a single ball moves during a clip."""
SHORT_TRAVEL = 8
"""Distance in pixels that a ball falls. It is short so that a single frame reveals little about the answer."""
APPROACH = 12
"""Change in pixels of the distance between two balls during a clip."""
BALL = 14
SHAPES = {"circle": 16, "square": 14, "triangle": 19}
"""Kind of shape → size in pixels. All kinds have about the same area, so the coloured area grows with the number of shapes."""


def make_shape_mask(kind: str, size: int) -> NDArray[np.bool_]:
    """Return a bool mask [size, size] that marks the pixels of a shape."""
    y, x = np.mgrid[:size, :size]
    mask = np.ones((size, size), bool)
    if kind == "circle":
        mask = (x - (size - 1) / 2) ** 2 + (y - (size - 1) / 2) ** 2 <= (size / 2) ** 2
    if kind == "triangle":
        mask = np.abs(x - (size - 1) / 2) <= (y + 1) / 2
    return mask


def draw_shape(frame: NDArray[np.uint8], kind: str, rgb: tuple[int, int, int], size: int, x: int, y: int) -> None:
    """Draw a shape with its upper left corner at (x, y) into `frame` [height, width, 3]."""
    frame[y : y + size, x : x + size][make_shape_mask(kind, size)] = rgb


def draw_ball(frame: NDArray[np.uint8], x: int, y: int, rgb: tuple[int, int, int] = WHITE) -> None:
    draw_shape(frame, "circle", rgb, BALL, x, y)


def make_frames(num_frames: int, height: int = SIDE, width: int = SIDE) -> Frames:
    """Return black frames."""
    return np.zeros((num_frames, height, width, 3), np.uint8)


def draw_one_shape(rng: np.random.Generator, colour: str) -> Frames:
    """Draw a picture of one shape at a random position."""
    frames = make_frames(1)
    kind = str(rng.choice(list(SHAPES)))
    x, y = rng.integers(0, SIDE - SHAPES[kind] + 1, 2)
    draw_shape(frames[0], kind, COLOURS[colour], SHAPES[kind], x, y)
    return frames


def draw_shape_above_ground(rng: np.random.Generator, on_ground: str) -> Frames:
    """Draw a picture of one shape that stands on the ground or is clearly above it."""
    frames = make_frames(1)
    kind, colour = str(rng.choice(list(SHAPES))), str(rng.choice(list(COLOURS)))
    ground, size = SIDE - int(rng.integers(4, 9)), SHAPES[kind]
    frames[0, ground:] = GROUND
    y = ground - size if on_ground == "yes" else int(rng.integers(0, ground - size - 16))
    draw_shape(frames[0], kind, COLOURS[colour], size, int(rng.integers(0, SIDE - size + 1)), y)
    return frames


def draw_several_shapes(rng: np.random.Generator, count: str, colour: str) -> Frames:
    """Draw a picture of one to four shapes of one colour, each at a random position in a separate quarter."""
    frames = make_frames(1)
    half = SIDE // 2
    for quarter in rng.permutation(4)[: COUNTS.index(count) + 1]:
        kind = str(rng.choice(list(SHAPES)))
        x, y = rng.integers(1, half - SHAPES[kind], 2) + half * np.array([quarter % 2, quarter // 2])
        draw_shape(frames[0], kind, COLOURS[colour], SHAPES[kind], x, y)
    return frames


def draw_moving_ball(rng: np.random.Generator, direction: str) -> Frames:
    """Draw a clip of one ball that moves in the given direction at constant speed."""
    frames = make_frames(CLIP_FRAMES)
    along, across = int(rng.integers(0, SIDE - BALL - TRAVEL + 1)), int(rng.integers(0, SIDE - BALL + 1))
    for frame, step in zip(frames, compute_steps(TRAVEL), strict=True):
        x, y = (along + step, across) if direction in ("left", "right") else (across, along + step)
        draw_ball(frame, x, y)
    return frames if direction in ("right", "down") else frames[::-1]


def draw_falling_ball(rng: np.random.Generator, colour: str) -> Frames:
    """Draw a clip of a red and a blue ball side by side; the ball of colour `colour` accelerates downwards, the other rests."""
    frames = make_frames(CLIP_FRAMES)
    half = SIDE // 2
    still_x, falling_x = rng.permutation(rng.integers(1, half - BALL, 2) + np.array([0, half])).tolist()
    still_y, falling_y = int(rng.integers(0, SIDE - BALL + 1)), int(rng.integers(0, SIDE - BALL - SHORT_TRAVEL + 1))
    for frame, step in zip(frames, compute_steps(SHORT_TRAVEL, power=2), strict=True):
        draw_ball(frame, still_x, still_y, COLOURS["blue" if colour == "red" else "red"])
        draw_ball(frame, falling_x, falling_y + step, COLOURS[colour])
    return frames


def draw_two_balls(rng: np.random.Generator, collide: str) -> Frames:
    """Draw a clip of a red ball with a blue ball to its right, which approach each other without touching or move apart."""
    height, width = LANE
    frames = make_frames(CLIP_FRAMES, height, width)
    y = int(rng.integers(0, height - BALL + 1))
    gap = int(rng.integers(BALL + APPROACH + 1, width - BALL + 1))  # largest distance between the balls' left edges
    left_edge = int(rng.integers(0, width - BALL - gap + 1))
    for frame, step in zip(frames, compute_steps(APPROACH // 2), strict=True):
        draw_ball(frame, left_edge + step, y, COLOURS["red"])
        draw_ball(frame, left_edge + gap - step, y, COLOURS["blue"])
    return frames if collide == "yes" else frames[::-1]


def compute_steps(distance: int, power: int = 1) -> list[int]:
    """Return the distance in pixels that a ball has travelled at each frame of a clip."""
    return [round(distance * (i / (CLIP_FRAMES - 1)) ** power) for i in range(CLIP_FRAMES)]
