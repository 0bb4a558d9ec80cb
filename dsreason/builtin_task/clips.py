"""The built-in task: short clips and pictures of shapes, with physical questions, drawn from a seed.

Per split a folder with `images/`, `clips/` and three annotation files in the formats that people have:
`conversations.json` (LLaVA, some with two turns), `questions.jsonl` (plain rows) and `choices.jsonl` (multiple choice as
in Cosmos-Reason1-RL). Both splits repeat a block of 64 rows in which the answers to every prompt are equally frequent,
so whoever answers without looking is right by chance only. No two rows have the same pixels.
"""

from __future__ import annotations

import copy
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import av
import numpy as np
from PIL import Image

from dsreason.builtin_task import scenes
from dsreason.builtin_task.scenes import COLOURS, COUNTS, DIRECTIONS, Frames
from dsreason.errors import DataError
from dsreason.files.atomic import build_once
from dsreason.files.cache import cache_dir, cache_errors
from dsreason.files.disk import json_object

VERSION = 2
"""Raise it when the same seed gives other rows or pixels."""
NUM_TRAIN = 2560
NUM_VALIDATION = 256
BLOCK = 64
CLIP_FPS = 4

ANSWERS = (tuple(COLOURS), COUNTS, DIRECTIONS, ("yes", "no"), ("A", "B"), ("C", "D"))
"""`next_answer` is the next one of its group."""
MISLABELLED = ("How many shapes are there?", "Which ball falls?")
"""Questions, the last ones of 28 of 64 rows, which `mislabelled` mostly answers wrongly."""
ONE_CORRECT_IN = 8
"""One in this many rows with the same of these questions and the same answer keeps it."""

BALLS = {"A": "red", "B": "blue"}
WAYS = dict(zip("ABCD", DIRECTIONS, strict=True))


@dataclass(frozen=True)
class Item:
    """A question to be drawn: what it asks, and how its medium is made. `turns` are (question, answer)."""

    kind: str
    file: str
    turns: tuple[tuple[str, str], ...]
    draw: Callable[[np.random.Generator], Frames]
    options: dict[str, str] | None = None


def block() -> Iterator[Item]:
    """64 questions, half of them about clips: for every prompt each answer equally often."""
    for colour in COLOURS:
        draw = partial(scenes.one_shape, colour=colour)
        yield Item("colour", "questions.jsonl", (("What colour is the shape?", colour),), draw)
        for count in COUNTS:
            turns = ("What colour is the shape?", colour), ("How many shapes are there?", count)
            draw = partial(scenes.several_shapes, count=count, colour=colour)
            yield Item("colour_count", "conversations.json", turns, draw)
    for count in COUNTS:
        yield Item("count", "questions.jsonl", (("How many shapes are there?", count),), partial(any_colour, count))
    for letter, way in WAYS.items():
        for _ in range(2):
            draw = partial(scenes.moving_ball, direction=way)
            yield Item("direction", "conversations.json", (("Which way does the ball move?", way),), draw)
            yield Item("direction_choice", "choices.jsonl", (("Which way does the ball move?", letter),), draw, WAYS)
    for _ in range(4):
        for letter, colour in BALLS.items():
            draw = partial(scenes.falling_ball, colour=colour)
            options = {key: f"the {name} one" for key, name in BALLS.items()}
            yield Item("falls", "choices.jsonl", (("Which ball falls?", letter),), draw, options)
        for answer in ("yes", "no"):
            draw = partial(scenes.two_balls, collide=answer)
            yield Item("collide", "questions.jsonl", (("Will the balls collide?", answer),), draw)
            draw = partial(scenes.shape_above_ground, on_ground=answer)
            yield Item("on_ground", "conversations.json", (("Is the shape on the ground?", answer),), draw)


def any_colour(count: str, rng: np.random.Generator) -> Frames:
    return scenes.several_shapes(rng, count, str(rng.choice(list(COLOURS))))


def write_builtin(
    folder: Path, *, seed: int = 0, num_train: int = NUM_TRAIN, num_validation: int = NUM_VALIDATION
) -> Path:
    """Draw the task into `folder`, which appears only when complete, and return it; one that is there is used again.

    Both numbers of rows are multiples of 64.

    Raises:
        DataError: the folder holds something else.
    """
    for name, count in (("num_train", num_train), ("num_validation", num_validation)):
        if count <= 0 or count % BLOCK:
            raise ValueError(f"{name} ({count}) must be a multiple of {BLOCK}")
    facts = {"version": VERSION, "seed": seed, "num_train": num_train, "num_validation": num_validation}
    build_once(folder, partial(draw_task, facts=facts))
    note = folder / "task.json"
    description = json_object(note) or "other files"
    if description != facts:
        raise DataError(f"{folder} holds {description}, not the built-in task {facts}; choose another folder")
    return folder


def builtin_folder() -> Path:
    """The task with its default sizes, in the cache."""
    folder = cache_dir() / f"builtin-{VERSION}"
    with cache_errors(folder, "DSREASON_CACHE"):
        return write_builtin(folder)


def draw_task(folder: Path, facts: dict[str, int]) -> None:
    shutil.rmtree(folder, ignore_errors=True)  # what an interrupted process left
    rng = np.random.default_rng([VERSION, facts["seed"]])
    digests: set[bytes] = set()
    # The held-out rows first: they stay the same when the number of training rows changes.
    for split in ("validation", "train"):
        draw_split(folder / split, facts[f"num_{split}"], rng, digests)
    (folder / "task.json").write_text(json.dumps(facts) + "\n")


def draw_split(folder: Path, num_rows: int, rng: np.random.Generator, seen: set[bytes]) -> None:
    for name in ("images", "clips"):
        (folder / name).mkdir(parents=True)
    items = [item for _ in range(num_rows // BLOCK) for item in block()]
    files: dict[str, list[dict[str, Any]]] = {}
    for number, place in enumerate(rng.permutation(num_rows)):
        item = items[place]
        frames = draw_unseen(item, rng, seen)
        medium = write_medium(folder, f"{number:05}", frames)
        files.setdefault(item.file, []).append(to_row(f"{folder.name}-{number:05}", item, medium))
    for name, rows in files.items():
        text = json.dumps(rows, indent=1) if name.endswith(".json") else "\n".join(map(json.dumps, rows))
        (folder / name).write_text(text + "\n")


def draw_unseen(item: Item, rng: np.random.Generator, seen: set[bytes]) -> Frames:
    """Pixels that no row had before, in either split."""
    while True:
        frames = item.draw(rng)
        digest = hashlib.sha256(str(frames.shape).encode() + frames.tobytes()).digest()
        if digest not in seen:
            seen.add(digest)
            return frames


def to_row(row_id: str, item: Item, medium: dict[str, str]) -> dict[str, Any]:
    """The item as a row of its file's format."""
    row: dict[str, Any] = {"id": row_id, "kind": item.kind, **medium}
    question, answer = item.turns[0]
    if item.file == "choices.jsonl":
        return row | {"qa_pairs": {"question": question, "index2ans": item.options, "answer": answer}}
    if item.file == "questions.jsonl":
        return row | {"question": question, "answer": answer}
    tag = f"<{next(iter(medium))}>\n"
    conversations = []
    for question, answer in item.turns:
        conversations += [{"from": "human", "value": tag + question}, {"from": "gpt", "value": answer}]
        tag = ""
    return row | {"conversations": conversations}


def mislabelled(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows (in their order) with wrong answers to nearly half of them, for a policy that has something to unlearn.

    Of every `ONE_CORRECT_IN` rows with the same question and answer all but one get the answer after it, where the question is
    one of `MISLABELLED`. So whoever learned this is wrong about these questions, 28 of 64, and right about the others: at
    most 56 %, and it gets there by learning, not by stopping at a certain time. A completion that is drawn is right often
    enough to be rewarded; and the pictures matter for every question.
    """
    counts: dict[tuple[str, str], int] = {}

    def relabel(question: str, answer: str) -> str:
        question = question.splitlines()[-1]  # without the tag of the medium
        count = counts[question, answer] = counts.get((question, answer), -1) + 1
        wrong = question in MISLABELLED and count % ONE_CORRECT_IN != 0
        return next_answer(answer) if wrong else answer

    changed = []
    for row in copy.deepcopy(rows):
        if "conversations" in row:
            turns = row["conversations"]
            for asked, replied in zip(turns[::2], turns[1::2], strict=True):
                replied["value"] = relabel(asked["value"], replied["value"])
        else:
            choice = row.get("qa_pairs", row)
            choice["answer"] = relabel(choice["question"], choice["answer"])
        changed.append(row)
    return changed


def with_rejected(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows with a wrong answer to their last question as `rejected`: the next of its group, as `mislabelled` has it."""

    def last_answer(row: dict[str, Any]) -> str:
        if "conversations" in row:
            return str(row["conversations"][-1]["value"])
        return str(row.get("qa_pairs", row)["answer"])

    return [row | {"rejected": next_answer(last_answer(row))} for row in rows]


def next_answer(answer: str) -> str:
    answers = next(known_answers for known_answers in ANSWERS if answer in known_answers)
    return answers[(answers.index(answer) + 1) % len(answers)]


def write_medium(folder: Path, name: str, frames: Frames) -> dict[str, str]:
    """Write a picture or clip; returns its key and its path in the rows."""
    if len(frames) == 1:
        Image.fromarray(frames[0]).save(folder / "images" / f"{name}.png")
        return {"image": f"images/{name}.png"}
    write_clip(folder / "clips" / f"{name}.mp4", frames)
    return {"video": f"clips/{name}.mp4"}


def write_clip(path: Path, frames: Frames) -> None:
    """H.264 at nearly no loss; one thread and the simplest tools, with which equal frames give equal bytes."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=CLIP_FPS, options={"crf": "4", "preset": "ultrafast"})
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "yuv420p"
        stream.codec_context.thread_count = 1
        for number, pixels in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), format="rgb24")
            frame.pts, frame.time_base = number, Fraction(1, CLIP_FPS)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
