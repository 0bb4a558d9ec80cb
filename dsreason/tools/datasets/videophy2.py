"""Download of VideoPhy-2 (generated videos with human scores of their physics, 1 to 5), as cosmos-framework lays it out.

The data sets on the Hub are tables with the URL of each video (`video_url`) and its score (`pc`). A split becomes the folder
`videophy2_<split>` with `meta.json`, `text/conversation_<id>.json` and `media/video_<id>.mp4`; the adapter
`conversation_files` reads it. Videos that exist are kept, so an interrupted download continues.
"""

from __future__ import annotations

import csv
import io
import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsreason.errors import DataError
from dsreason.files.atomic import open_draft, write_file
from dsreason.files.lock import hold_folder
from dsreason.media.urls import fetch_url
from dsreason.monitor.progress import track
from dsreason.tools.datasets.fetch import fetch, plan_fetch

REPOSITORIES = {"train": "videophysics/videophy2_train", "val": "videophysics/videophy2_test"}
"""Split → repository on the Hub; the published test split serves as validation."""
URL, SCORE = "video_url", "pc"
PROMPT = (
    "Watch how things move, fall, collide, deform and persist in this video. How well does it obey the laws of physics? Reply "
    "with a single digit from 1 (obvious violations) to 5 (none)."
)
"""Question of each conversation, unless the user sets another."""
DOWNLOADS = 8
"""Number of simultaneous downloads."""


@dataclass(frozen=True)
class Video:
    """A row of the table."""

    id: str
    url: str
    score: int


@dataclass(frozen=True)
class FetchedSplit:
    """Result of the download of a split."""

    folder: Path
    num_rows: int
    """Number of rows in `meta.json`."""
    problems: list[str]
    """Message for each row of the table that was left out."""
    unused: list[str]
    """Columns of the table that the layout has no place for."""


def fetch_split(
    split: str,
    data_dir: Path,
    *,
    prompt: str = PROMPT,
    repo: str | None = None,
    revision: str | None = None,
    limit: int | None = None,
    allow_private: bool = False,
) -> FetchedSplit:
    """Download a split to `data_dir`. Rows with an invalid score or an unavailable video are left out and reported.

    Args:
        split: train or val.
        limit: maximum number of rows, counted from the first; None: all.
        allow_private: also contact hosts that are not public.

    Raises:
        ConfigError: another process writes to the folder.
        DataError: the table is not available or lacks a column, or no row is usable.
    """
    folder = data_dir / f"videophy2_{split}"
    plan = plan_fetch(
        f"raw/{folder.name}", data_dir=data_dir, repo=repo or REPOSITORIES[split], revision=revision, patterns=["*.csv"]
    )
    fetch(plan)
    tables = [plan.folder / file.path for file in plan.files]
    if len(tables) > 1:
        raise DataError(f"{plan.repo}: has {len(tables)} CSV files, but one table is expected; choose another --repo")
    videos, problems, unused = read_table(tables[0])
    with (
        hold_folder(folder),
        ThreadPoolExecutor(DOWNLOADS) as threads,
        track(f"fetching {folder.name}", len(videos[:limit]), "videos") as advance,
    ):

        def download(video: Video) -> str | None:
            problem = download_video(video, folder, allow_private=allow_private)
            advance(1)
            return problem

        outcomes = list(zip(videos[:limit], threads.map(download, videos[:limit]), strict=True))
        usable = [video for video, problem in outcomes if problem is None]
        problems += [problem for _, problem in outcomes if problem is not None]
        if not usable:
            raise DataError(f"{plan.repo}: none of {len(outcomes)} videos is available: {problems[0]}")
        write_split(folder, usable, prompt)
    return FetchedSplit(folder, len(usable), problems, unused)


def read_table(file: Path) -> tuple[list[Video], list[str], list[str]]:
    """Read the table; return its usable rows, a message for each other row, and the columns that are not used."""
    try:
        rows = list(csv.DictReader(io.StringIO(file.read_text("utf-8-sig"), newline=""), strict=True))
    except (csv.Error, UnicodeDecodeError) as error:
        raise DataError(f"{file}: is not a CSV file: {error}; remove it, and run the same command again") from None
    columns = list(rows[0]) if rows else []
    if missing := [column for column in (URL, SCORE) if column not in columns]:
        raise DataError(f"{file}: has no column {' or '.join(missing)}; its columns: {', '.join(columns) or 'none'}")
    videos, problems = [], []
    for number, row in enumerate(rows):
        score = read_score(row[SCORE])
        if score is None or not row[URL]:
            problems.append(
                f"row {number + 1}: must have a {URL} and a {SCORE} from 1 to 5; got {row[URL]!r}, {row[SCORE]!r}"
            )
        else:
            videos.append(Video(str(number), row[URL], score))
    return videos, problems, [column for column in columns if column not in (URL, SCORE)]


def read_score(text: str | None) -> int | None:
    """Return a whole score from 1 to 5, such as `4` or `4.0`; None for any other text."""
    try:
        score = float(text or "")
    except ValueError:
        return None
    return int(score) if score in (1, 2, 3, 4, 5) else None


def download_video(video: Video, folder: Path, *, allow_private: bool) -> str | None:
    """Download a video unless it exists; return a message if it is not available."""
    target = folder / locate_media(video)
    if target.is_file():
        return None
    try:
        copy = fetch_url(video.url, allow_private=allow_private)
    except DataError as error:
        return f"row {int(video.id) + 1}: {error}"
    target.parent.mkdir(parents=True, exist_ok=True)
    with open_draft(target) as draft:
        shutil.copyfile(copy, draft)
    return None


def locate_media(video: Video) -> str:
    return f"media/video_{video.id}.mp4"


def write_split(folder: Path, videos: list[Video], prompt: str) -> None:
    """Write the conversations, and then the list of rows."""
    rows: list[dict[str, str]] = []
    (folder / "text").mkdir(exist_ok=True)
    for video in videos:
        name = f"text/conversation_{video.id}.json"
        write_file(folder / name, json.dumps({"conversations": make_conversation(prompt, video.score)}, indent=2))
        rows.append({"id": video.id, "media": locate_media(video), "conversation": name})
    write_file(folder / "meta.json", json.dumps(rows, indent=2))


def make_conversation(prompt: str, score: int) -> list[dict[str, Any]]:
    question = [{"type": "video", "video": "video_0"}, {"type": "text", "text": prompt}]
    return [
        {"role": "user", "content": question},
        {"role": "assistant", "content": [{"type": "text", "text": str(score)}]},
    ]
