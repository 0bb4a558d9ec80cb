"""Small data sets for the integration tests, whose rows differ in length and media."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from PIL import Image

from tests.unit.media.videos import write_video

COLOURS = {"red": (220, 30, 30), "green": (30, 200, 30), "blue": (30, 30, 220), "yellow": (220, 220, 30)}


def write_mixed_rows(folder: Path, count: int = 8) -> Path:
    """Write a JSONL file of `count` rows and return its path.

    The kinds of rows alternate: text only, one image, a video, two images. The answers differ in their number of tokens.
    """
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    rows = []
    for i in range(count):
        name = list(COLOURS)[i % len(COLOURS)]
        row: dict[str, object] = {
            "id": str(i),
            "question": "What colour?" * (1 + i % 3),
            "answer": " and ".join([name] * (1 + i % 4)),
        }
        if i % 4 in (1, 3):
            row["image"] = [draw(folder / f"{i}_{j}.png", COLOURS[name], random) for j in range(1 if i % 4 == 1 else 2)]
        if i % 4 == 2:
            row["video"] = film(folder / f"{i}.mp4", COLOURS[name], random)
        rows.append(row)
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def draw(path: Path, colour: tuple[int, int, int], random: np.random.Generator) -> str:
    pixels = np.zeros((int(random.integers(56, 120)), int(random.integers(56, 120)), 3), np.uint8)
    pixels[10:40, 10:40] = colour
    Image.fromarray(pixels).save(path)
    return path.name


def film(path: Path, colour: tuple[int, int, int], random: np.random.Generator) -> str:
    frames = np.zeros((8, 64, 64, 3), np.uint8)
    for i, frame in enumerate(frames):
        frame[20:40, 4 * i : 4 * i + 20] = colour
    write_video(path, range(0, 2000, 250), frames=frames)
    return path.name
