"""`dsreason data fetch-videophy2`: download of VideoPhy-2 in the layout of cosmos-framework."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from dsreason.errors import ConfigError
from dsreason.files.disk import check_writable
from dsreason.job import launch
from dsreason.screen import print_message

Split = StrEnum("Split", ["train", "val", "both"])
MOST_PROBLEMS = 20


def fetch_videophy2(
    split: Annotated[Split, typer.Option(help="Split to fetch; val is the published test split.")] = Split.both,
    data_dir: Annotated[Path, typer.Option(help="Folder for videophy2_train/ and videophy2_val/.")] = Path("data"),
    prompt: Annotated[str | None, typer.Option(metavar="TEXT", help="Question to ask; default: dsreason's.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="File that contains the question.")] = None,
    repo: Annotated[str | None, typer.Option(help="Another data set repository with the same columns.")] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Maximum number of rows of each split.")] = None,
    allow_private_urls: Annotated[
        bool, typer.Option("--allow-private-urls", help="Also fetch videos from hosts without a public address.")
    ] = False,
    allow_missing: Annotated[
        bool, typer.Option("--allow-missing", help="Exit with 0 even if videos are unavailable.")
    ] = False,
) -> None:
    """Download VideoPhy-2: generated videos, and human scores from 1 to 5 for how well they obey physics.

    Each split becomes a folder with meta.json, text/ and media/, which the adapter conversation_files reads. Existing videos
    are kept. Rows whose video is unavailable are left out and listed, and the exit code is 1.
    """
    if prompt is not None and prompt_file is not None:
        raise ConfigError("--prompt and --prompt-file both set the question; remove one")
    if repo is not None and split == Split.both:
        raise ConfigError(f"--repo {repo} applies to a single split; set --split to train or val")
    launch.prepare_environment()
    from dsreason.tools.datasets.videophy2 import PROMPT, fetch_split

    question = read_prompt(prompt_file) if prompt_file is not None else PROMPT if prompt is None else prompt
    if not question.strip():
        raise ConfigError("the question is empty; set --prompt or --prompt-file to a text")
    check_writable(data_dir, "--data-dir")
    incomplete = False
    for name in ("train", "val") if split == Split.both else (str(split),):
        result = fetch_split(
            name,
            data_dir,
            prompt=question,
            repo=repo,
            revision=revision,
            limit=limit,
            allow_private=allow_private_urls,
        )
        for problem in result.problems[:MOST_PROBLEMS]:
            print_message(problem)
        if len(result.problems) > MOST_PROBLEMS:
            print_message(f"… and {len(result.problems) - MOST_PROBLEMS} more")
        unused = f"; columns not used: {', '.join(result.unused)}" if result.unused else ""
        print_message(
            f"{result.folder}: {result.num_rows} rows, {len(result.problems)} left out{unused}",
            err=True,
        )
        incomplete |= bool(result.problems)
    if incomplete and not allow_missing:
        raise typer.Exit(1)


def read_prompt(file: Path) -> str:
    try:
        return file.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        cause = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"--prompt-file {file}: cannot be read: {cause}") from None
