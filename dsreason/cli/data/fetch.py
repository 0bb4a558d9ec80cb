"""`dsreason data fetch`: download of data sets from the Hub, and of the raw videos for clips that are not on the Hub."""

from __future__ import annotations

import shlex
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, get_args

import typer

from dsreason.errors import ConfigError, DataError
from dsreason.files.disk import check_writable
from dsreason.job import launch
from dsreason.screen import print_message

if TYPE_CHECKING:
    from dsreason.tools.datasets.fetch import FetchPlan

Task = StrEnum("Task", ["benchmark", "sft", "rl"])
Dataset = StrEnum("Dataset", ["robovqa", "av", "agibot", "bridgev2", "holoassist", "robofail"])
CutDataset = Literal["agibot", "bridgev2", "holoassist"]
DataDirOption = Annotated[Path, typer.Option(help="Folder that contains benchmark/, sft/ and rl/.")]


def fetch(
    task: Annotated[
        list[Task] | None,
        typer.Option(help="Task to fetch data for; may be repeated. Default: benchmark."),
    ] = None,
    dataset: Annotated[
        list[Dataset] | None, typer.Option(help="Data set to fetch; may be repeated. Default: all.")
    ] = None,
    data_dir: DataDirOption = Path("data"),
    repo: Annotated[str | None, typer.Option(help="Data set repository; default: that of Cosmos-Reason1.")] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit.")] = None,
    file: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Only fetch paths that match this pattern, such as '*.json'."),
    ] = None,
    raw: Annotated[
        bool,
        typer.Option("--raw", help="Also fetch the raw videos of agibot, bridgev2 and holoassist, for `data clip`."),
    ] = False,
    raw_from: Annotated[
        str | None,
        typer.Option(
            metavar="SOURCE",
            help="With --raw: other source of the raw videos: a Hub data set for agibot, the URL of a folder for the others.",
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be fetched, and stop.")] = False,
) -> None:
    """Download benchmark, SFT or RL data from the Hugging Face Hub, with the token in HF_TOKEN.

    Only missing files are downloaded; interrupted downloads are resumed, and archives of clips are unpacked. With --raw, the
    raw videos of clips that are not on the Hub are downloaded from their publishers. If any are unavailable, they are listed,
    and the exit code is 1.
    """
    tasks = task or [Task.benchmark]
    if raw_from and (not raw or len(dataset or []) != 1):
        raise ConfigError(
            f"--raw-from {raw_from} requires --raw and exactly one --dataset: the one whose raw videos it contains"
        )
    if repo and len(tasks) > 1:
        raise ConfigError(
            f"--repo {repo} applies to a single --task, but {len(tasks)} are set; run the command once per task"
        )
    launch.prepare_environment()
    from dsreason.tools.datasets import fetch as fetching

    if raw_from and dataset:
        from dsreason.tools.datasets.raw import check_origin

        check_origin(dataset[0], raw_from)
    plans = [
        fetching.plan_fetch(
            task, data_dir=data_dir, repo=repo, revision=revision, datasets=dataset or [], patterns=file or []
        )
        for task in tasks
    ]
    if not dry_run and any(plan.missing for plan in plans):
        check_writable(data_dir, "--data-dir")
    for plan in plans:
        show_plan(plan, dry_run)
        if not dry_run:
            fetching.fetch(plan)
            print_message(f"{plan.repo}: download complete, saved to {plan.folder}")
    uncut = [(name, task) for task, plan in zip(tasks, plans, strict=True) for name in plan.without_clips]
    wanted_tasks = [(name, task) for name, task in uncut if raw and name in get_args(CutDataset)]
    for name, one in uncut:
        if (name, one) not in wanted_tasks:
            print_message(f"{name}: {advise_on_clips(name, one, data_dir, repo, revision)}")
    if fetch_all_raw_videos(wanted_tasks, data_dir, raw_from, dry_run):
        raise typer.Exit(1)


def fetch_all_raw_videos(
    requested: list[tuple[str, Task]], data_dir: Path, raw_from: str | None, dry_run: bool
) -> list[str]:
    """Fetch the raw videos of the `requested` data sets and tasks.

    Returns:
        A message for each clip whose raw video is not available; the messages are also printed.

    Raises:
        DataError: some data sets could not be fetched; it is raised after all the others have been fetched.
    """
    missing: list[str] = []
    failed: list[str] = []
    for name, task in requested:
        try:
            missing += fetch_raw_videos(name, task, data_dir, raw_from, dry_run)
        except DataError as error:
            failed.append(str(error))
    for text in missing:
        print_message(text)
    if failed:
        raise DataError("\n".join(failed))
    return missing


def fetch_raw_videos(name: str, task: Task, data_dir: Path, raw_from: str | None, dry_run: bool) -> list[str]:
    """Fetch the raw videos that clips need; with `dry_run`, only report them.

    Returns:
        A message for each clip whose raw video is not available.
    """
    from dsreason.tools.datasets.clip import list_needed_clips
    from dsreason.tools.datasets.raw import fetch_raw, plan_raw

    folder = data_dir / task / name
    if dry_run and not folder.is_dir():
        print_message(
            f"{name}: its annotations, which list the raw videos, are not downloaded yet; fetch them first, without --raw"
        )
        return []
    plan = plan_raw(name, list_needed_clips(folder, name), folder / "clips", data_dir / "raw" / name, raw_from)
    clips = sum(map(len, plan.videos.values()))
    print_message(
        f"{name}: {len(plan.videos)} raw videos to fetch from {plan.place} → {plan.folder}, for {clips} of {plan.clips} clips"
    )
    if dry_run:
        print_message(f"  manual download: {plan.manual_steps}")
        return []
    missing = fetch_raw(plan)
    print_message(f"{name}: next, cut its clips: dsreason data clip {format_clip_options(name, task, data_dir)}")
    return missing


def show_plan(plan: FetchPlan, with_files: bool) -> None:
    from dsreason.tools.datasets.fetch import format_bytes

    missing, total = len(plan.missing), len(plan.files)
    print_message(
        f"{plan.repo} at {plan.revision[:12]} → {plan.folder}: {missing} of {total} files to fetch, "
        f"{format_bytes(plan.num_bytes)} ({format_bytes(plan.disk_bytes)} on disk)"
    )
    if with_files:
        missing_files = set(plan.missing)
        for file in plan.files:
            print_message(
                f"  {format_bytes(file.size):>10}  {file.path}{'' if file in missing_files else '  (already present)'}"
            )


def advise_on_clips(name: str, task: Task, data_dir: Path, repo: str | None, revision: str | None) -> str:
    if name not in get_args(CutDataset):
        return "the repository does not contain its clips"
    options = format_clip_options(name, task, data_dir)
    given = {"--repo": repo, "--revision": revision}
    source = "".join(f" {key} {shlex.quote(value)}" for key, value in given.items() if value)
    return (
        "its clips are not on the Hub; fetch the raw videos and cut them: "
        f"dsreason data fetch --raw {options}{source}, then dsreason data clip {options}"
    )


def format_clip_options(name: str, task: Task, data_dir: Path) -> str:
    return f"--dataset {name} --task {task} --data-dir {shlex.quote(str(data_dir))}"
