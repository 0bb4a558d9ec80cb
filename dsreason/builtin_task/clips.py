"""Generator for the built-in task: questions about physics in short clips and pictures of shapes.

Each split is a folder with `images/`, `clips/` and three annotation files in common formats: `conversations.json` (LLaVA; some
rows have two turns), `questions.jsonl` (plain rows) and `choices.jsonl` (multiple choice as in Cosmos-Reason1-RL). Both splits
repeat a block of 64 rows in which all answers to a prompt are equally frequent, so a model that ignores the media is right only
by chance. No two rows have the same pixels.
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
from dsreason.files.cache import build_copy, convert_cache_errors, get_cache_dir
from dsreason.files.disk import read_json_object

VERSION = 2
"""Version of the task; increment it whenever a change makes the same seed yield different rows or pixels."""
NUM_TRAIN = 2560
NUM_VALIDATION = 256
BLOCK = 64
CLIP_FPS = 4

ANSWERS = (tuple(COLOURS), COUNTS, DIRECTIONS, ("yes", "no"), ("A", "B"), ("C", "D"))
"""Groups of alternative answers; `get_next_answer` returns the next answer in a group."""
MISLABELLED = ("How many shapes are there?", "Which ball falls?")
"""Questions whose answers `make_mislabelled` mostly replaces with wrong ones; 28 of 64 rows end with such a question."""
ONE_CORRECT_IN = 8
"""Among rows with the same `MISLABELLED` question and answer, one in this number keeps its correct answer."""

BALLS = {"A": "red", "B": "blue"}
WAYS = dict(zip("ABCD", DIRECTIONS, strict=True))


@dataclass(frozen=True)
class ClipQuestion:
    """A question in the task and the function that draws its media item; `turns` contains (question, answer) pairs."""

    kind: str
    file: str
    turns: tuple[tuple[str, str], ...]
    draw: Callable[[np.random.Generator], Frames]
    options: dict[str, str] | None = None


def iter_block() -> Iterator[ClipQuestion]:
    """Yield the 64 questions in a block. Half of them are about clips; all answers to a prompt are equally frequent."""
    for colour in COLOURS:
        draw = partial(scenes.draw_one_shape, colour=colour)
        yield ClipQuestion("colour", "questions.jsonl", (("What colour is the shape?", colour),), draw)
        for count in COUNTS:
            turns = ("What colour is the shape?", colour), ("How many shapes are there?", count)
            draw = partial(scenes.draw_several_shapes, count=count, colour=colour)
            yield ClipQuestion("colour_count", "conversations.json", turns, draw)
    for count in COUNTS:
        yield ClipQuestion(
            "count", "questions.jsonl", (("How many shapes are there?", count),), partial(draw_any_colour, count)
        )
    for letter, direction in WAYS.items():
        for _ in range(2):
            draw = partial(scenes.draw_moving_ball, direction=direction)
            yield ClipQuestion("direction", "conversations.json", (("Which way does the ball move?", direction),), draw)
            yield ClipQuestion(
                "direction_choice", "choices.jsonl", (("Which way does the ball move?", letter),), draw, WAYS
            )
    for _ in range(4):
        for letter, colour in BALLS.items():
            draw = partial(scenes.draw_falling_ball, colour=colour)
            options = {key: f"the {name} one" for key, name in BALLS.items()}
            yield ClipQuestion("falls", "choices.jsonl", (("Which ball falls?", letter),), draw, options)
        for answer in ("yes", "no"):
            draw = partial(scenes.draw_two_balls, collide=answer)
            yield ClipQuestion("collide", "questions.jsonl", (("Will the balls collide?", answer),), draw)
            draw = partial(scenes.draw_shape_above_ground, on_ground=answer)
            yield ClipQuestion("on_ground", "conversations.json", (("Is the shape on the ground?", answer),), draw)


def draw_any_colour(count: str, rng: np.random.Generator) -> Frames:
    return scenes.draw_several_shapes(rng, count, str(rng.choice(list(COLOURS))))


def write_builtin(
    folder: Path, *, seed: int = 0, num_train: int = NUM_TRAIN, num_validation: int = NUM_VALIDATION
) -> Path:
    """Generate the task in `folder`, or reuse the task in it, and return the folder.

    The folder appears only once it is complete. Both numbers of rows must be multiples of 64.

    Raises:
        DataError: the folder contains other files, or a task generated with different settings.
    """
    for name, count in (("num_train", num_train), ("num_validation", num_validation)):
        if count <= 0 or count % BLOCK:
            raise ValueError(f"{name} must be a positive multiple of {BLOCK}; got {count}")
    facts = {"version": VERSION, "seed": seed, "num_train": num_train, "num_validation": num_validation}
    build_once(folder, partial(draw_task, facts=facts))
    note = folder / "task.json"
    description = read_json_object(note) or "other files"
    if description != facts:
        raise DataError(f"{folder} contains {description}, not the built-in task {facts}; choose another folder")
    return folder


def get_builtin_folder() -> Path:
    """Return the cache folder with the task in its default size; generate the task if it is missing."""
    folder = get_cache_dir() / f"builtin-{VERSION}"
    with convert_cache_errors(folder, "DSREASON_CACHE"):
        return build_copy(folder, write_builtin)


def draw_task(folder: Path, facts: dict[str, int]) -> None:
    shutil.rmtree(folder, ignore_errors=True)  # an interrupted process may have left a partial folder behind
    rng = np.random.default_rng([VERSION, facts["seed"]])
    digests: set[bytes] = set()
    # The held-out rows are drawn first, so that they do not depend on the number of training rows.
    for split in ("validation", "train"):
        draw_split(folder / split, facts[f"num_{split}"], rng, digests)
    (folder / "task.json").write_text(json.dumps(facts) + "\n")


def draw_split(folder: Path, num_rows: int, rng: np.random.Generator, digests: set[bytes]) -> None:
    for name in ("images", "clips"):
        (folder / name).mkdir(parents=True)
    items = [item for _ in range(num_rows // BLOCK) for item in iter_block()]
    files: dict[str, list[dict[str, Any]]] = {}
    for number, index in enumerate(rng.permutation(num_rows)):
        item = items[index]
        frames = draw_unseen(item, rng, digests)
        medium = write_medium(folder, f"{number:05}", frames)
        files.setdefault(item.file, []).append(to_row(f"{folder.name}-{number:05}", item, medium))
    for name, rows in files.items():
        text = json.dumps(rows, indent=1) if name.endswith(".json") else "\n".join(map(json.dumps, rows))
        (folder / name).write_text(text + "\n")


def draw_unseen(item: ClipQuestion, rng: np.random.Generator, digests: set[bytes]) -> Frames:
    """Draw frames for a question until their pixels differ from all earlier rows in both splits."""
    while True:
        frames = item.draw(rng)
        digest = hashlib.sha256(str(frames.shape).encode() + frames.tobytes()).digest()
        if digest not in digests:
            digests.add(digest)
            return frames


def to_row(row_id: str, item: ClipQuestion, medium: dict[str, str]) -> dict[str, Any]:
    """Convert a question to a row in its annotation file's format."""
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


def make_mislabelled(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a copy of the rows in which nearly half of the answers are wrong, so that the policy has something to unlearn.

    Among rows with the same `MISLABELLED` question and the same answer, one in `ONE_CORRECT_IN` keeps its answer; the others get
    the next answer in the group. A model trained on these rows therefore answers 28 of 64 questions wrongly and the rest
    correctly: its accuracy is at most 56 %, no matter when training stops. Sampled completions are still correct often enough to
    earn rewards, and no question can be answered without its media item.
    """
    counts: dict[tuple[str, str], int] = {}

    def replace_answer(question: str, answer: str) -> str:
        question = question.splitlines()[-1]  # drop the media tag
        count = counts[question, answer] = counts.get((question, answer), -1) + 1
        wrong = question in MISLABELLED and count % ONE_CORRECT_IN != 0
        return get_next_answer(answer) if wrong else answer

    changed = []
    for row in copy.deepcopy(rows):
        if "conversations" in row:
            turns = row["conversations"]
            for question, reply in zip(turns[::2], turns[1::2], strict=True):
                reply["value"] = replace_answer(question["value"], reply["value"])
        else:
            choice = row.get("qa_pairs", row)
            choice["answer"] = replace_answer(choice["question"], choice["answer"])
        changed.append(row)
    return changed


def add_rejected(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add `rejected` to each row: a wrong answer to the last question, namely the answer after the correct one in its group."""

    def get_last_answer(row: dict[str, Any]) -> str:
        if "conversations" in row:
            return str(row["conversations"][-1]["value"])
        return str(row.get("qa_pairs", row)["answer"])

    return [row | {"rejected": get_next_answer(get_last_answer(row))} for row in rows]


def get_next_answer(answer: str) -> str:
    """Return the answer after `answer` in its group, wrapping around at the end. It is wrong if `answer` is correct."""
    answers = next(group for group in ANSWERS if answer in group)
    return answers[(answers.index(answer) + 1) % len(answers)]


def write_medium(folder: Path, name: str, frames: Frames) -> dict[str, str]:
    """Write a picture or clip, and return the row's field for the file: key → relative path."""
    if len(frames) == 1:
        Image.fromarray(frames[0]).save(folder / "images" / f"{name}.png")
        return {"image": f"images/{name}.png"}
    write_clip(folder / "clips" / f"{name}.mp4", frames)
    return {"video": f"clips/{name}.mp4"}


def write_clip(path: Path, frames: Frames) -> None:
    """Write a clip as nearly lossless H.264. A single thread and the simplest preset make the file reproducible."""
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
