"""Tiny data sets in the formats of the recipes, with enough rows for one published batch, but only a few clips and images."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import datasets
import numpy as np

from dsreason.builtin_task.clips import BALLS, WAYS, write_medium
from dsreason.builtin_task.scenes import COLOURS, draw_falling_ball, draw_moving_ball, draw_one_shape
from dsreason.config.schema_data import SourceConfig

NUM_ROWS = 400
"""Number of rows, which exceeds the largest batch of a recipe plus its held-out rows."""
Row = dict[str, Any]


def write_media(folder: Path) -> Path:
    """Write `clips/0.mp4` … `clips/3.mp4` and `images/0.png` … `images/3.png` to `folder`, and return `folder`."""
    random = np.random.default_rng(0)
    for name in ("clips", "images"):
        (folder / name).mkdir(parents=True)
    for i, (way, colour, ball) in enumerate(zip(WAYS.values(), COLOURS, cycle(BALLS.values()))):
        clip = draw_moving_ball(random, way) if i % 2 else draw_falling_ball(random, ball)
        write_medium(folder, str(i), np.concatenate([clip, clip]))  # no recipe samples more than 16 frames
        write_medium(folder, str(i), draw_one_shape(random, colour))
    return folder


def write_source(source: SourceConfig, media: Path, folder: Path) -> dict[str, str]:
    """Write a data set for the source's adapter to a new folder; return the values for `data.path` and `data.media_path`.

    Args:
        media: folder that `write_media` has written.
    """
    folder.mkdir(parents=True)
    return WRITERS[source.adapter](source, media, folder)


def repeated(rows: list[Row]) -> list[Row]:
    return [{**row, "id": str(i)} for i, row in enumerate(islice(cycle(rows), NUM_ROWS))]


def write_json(path: Path, rows: list[Row] | Row) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(rows))
    return path


def hub_layout(source: SourceConfig, media: Path, folder: Path, name: str, rows: list[Row]) -> dict[str, str]:
    """Write a data set with the layout of a Hub repository: annotations and clips in the subset's folder."""
    subset = folder / str(source.subset)
    write_json(subset / name, repeated(rows))
    (subset / "clips").symlink_to(media / "clips")
    return {"path": str(folder)}


def cosmos_reason1(source: SourceConfig, media: Path, folder: Path) -> dict[str, str]:
    requested = {"role": "user", "content": "What does the robot do next?"}
    rows = [
        {
            "video": f"clips/{i}.mp4",
            "conversations": [requested, {"role": "assistant", "content": f"It takes cup {i}."}],
        }
        for i in range(4)
    ]
    return hub_layout(source, media, folder, f"{source.subset}_{source.split}.json", rows)


def cosmos_reason1_rl(source: SourceConfig, media: Path, folder: Path) -> dict[str, str]:
    rows = [
        {
            "video": f"clips/{i}.mp4",
            "qa_pairs": {"question": "Which way does the ball move?", "index2ans": WAYS, "answer": "ABCD"[i]},
        }
        for i in range(4)
    ]
    return hub_layout(source, media, folder, f"{source.subset}_{source.split}_qa_pairs.json", rows)


def llava(source: SourceConfig, media: Path, folder: Path) -> dict[str, str]:
    """Write rows in three formats: LLaVA's, the warehouse's (two images, a number) and WTS's (a video, options in the
    question)."""
    choice = "<video> \n Does the ball fall? \n A: Yes \n B: No \n \nAnswer with the option's letter."
    forms = [
        ({"image": "images/0.png"}, "<image>\nDescribe the picture.", "A shape on a plain ground."),
        ({"images": ["images/1.png", "images/2.png"]}, "<image>\n<image>\nHow far is Region [0]?", "6.36"),
        ({"video": "clips/0.mp4"}, choice, "A"),
        ({"video": "clips/1.mp4"}, choice, "B"),
    ]
    rows = [
        {**displayed, "conversations": [{"from": "human", "value": requested}, {"from": "gpt", "value": answer}]}
        for displayed, requested, answer in forms
    ]
    return {"path": str(write_json(folder / "annotations.json", repeated(rows))), "media_path": str(media)}


def conversations(source: SourceConfig, media: Path, folder: Path) -> dict[str, str]:
    """Save a Hugging Face data set whose only column contains JSON text, with scores from 1 to 5 as in VideoPhy-2."""
    rows = []
    for i in range(NUM_ROWS):
        video = {"type": "video", "video": f"clips/{i % 4}.mp4"}
        text = {"type": "text", "text": "Does this video adhere to the physical laws?"}
        answer = f"<answer>\n{1 + i % 5}\n</answer>"
        messages = [{"role": "user", "content": [video, text]}, {"role": "assistant", "content": answer}]
        rows.append({"conversations": json.dumps(messages)})
    datasets.Dataset.from_list(rows).save_to_disk(str(folder / "saved"))
    return {"path": str(folder / "saved"), "media_path": str(media)}


def local_labels(source: SourceConfig, media: Path, folder: Path) -> dict[str, str]:
    for name in ("videos", "metas"):
        (folder / name).mkdir()
    for i in range(NUM_ROWS):
        video = str(source.video_pattern).replace("*", f"2023.05.{i}")
        (folder / "videos" / video).symlink_to(media / "clips" / f"{i % 4}.mp4")
        label = {"weather": ("Light rain", "Clear skies")[i % 2], "driving_difficulty": 1 + i % 4}
        (folder / "metas" / f"2023.05.{i}.label.json").write_text(json.dumps(label))
    return {"path": str(folder)}


def conversation_files(source: SourceConfig, media: Path, folder: Path) -> dict[str, str]:
    """Write VideoPhy-2's layout: `meta.json`, a conversation file per row in `text/`, and clips in `media/`."""
    (folder / "media").symlink_to(media / "clips")
    rows = []
    for i in range(NUM_ROWS):
        question = [{"type": "video", "video": "video_0"}, {"type": "text", "text": "Score the physics."}]
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": str(1 + i % 5)}]
        write_json(folder / "text" / f"conversation_{i}.json", {"conversations": messages})
        rows.append({"id": str(i), "media": f"media/{i % 4}.mp4", "conversation": f"text/conversation_{i}.json"})
    write_json(folder / "meta.json", rows)
    return {"path": str(folder)}


def auto(source: SourceConfig, media: Path, folder: Path) -> dict[str, str]:
    """Write rows of LLaVA-OneVision."""
    turns = [{"from": "human", "value": "<image>\nWhich colour?"}, {"from": "gpt", "value": "Red."}]
    rows = [{"image": f"images/{i}.png", "conversations": turns, "data_source": source.subset} for i in range(4)]
    return {"path": str(write_json(folder / "rows.json", repeated(rows))), "media_path": str(media)}


WRITERS: dict[str, Callable[[SourceConfig, Path, Path], dict[str, str]]] = {
    "cosmos_reason1": cosmos_reason1,
    "cosmos_reason1_rl": cosmos_reason1_rl,
    "llava": llava,
    "conversations": conversations,
    "local_labels": local_labels,
    "conversation_files": conversation_files,
    "auto": auto,
}
"""Adapter name → function that writes a data set for the adapter."""
