"""Functions that download the raw videos that clips are cut from; only the needed parts are fetched from the publishers.

- agibot: tars on the Hub, `observations/<task>/<first episode>-<last episode>.tar` of AgiBotWorld-Beta, each with
  `<episode>/videos/<view>.mp4`. Users must accept the data set's terms on the Hub.
- holoassist: `video_pitch_shifted.tar` with `<recording>/Export_py/Video_pitchshift.mp4`, and the annotated actions.
- bridgev2: the shards of the TFDS data set `bridge_dataset`, with one episode per record. It is not published which shard
  contains an episode, so shards are downloaded one by one until all episodes are found. The needed episodes' frames are
  stored as images, and the list of each shard's episodes is recorded.

The videos are stored where `clip_rules` looks for them.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import hf_hub_url
from huggingface_hub.errors import HTTPError

from dsreason.errors import ConfigError, DataError
from dsreason.files.atomic import write_file
from dsreason.files.disk import find_existing, read_json_object
from dsreason.files.hub import convert_dataset_errors, get_hub_url
from dsreason.files.lock import hold_folder
from dsreason.monitor.progress import track
from dsreason.secrets import hide_secrets
from dsreason.tools.datasets.clip_rules import (
    HOLOASSIST_VIDEOS,
    MissingRaw,
    check_name,
    find_agibot_cut,
    find_bridge_cut,
    find_holoassist_video,
)
from dsreason.tools.datasets.hub import get_size, list_files
from dsreason.tools.datasets.ranges import ServedFile, describe_failure, fetch_part, is_transient
from dsreason.tools.datasets.remote_tar import find_members
from dsreason.tools.datasets.tfrecord import read_examples

ORIGINS = {
    "agibot": "agibot-world/AgiBotWorld-Beta",
    "holoassist": "https://hl2data.z5.web.core.windows.net/holoassist-data-release",
    "bridgev2": "https://rail.eecs.berkeley.edu/datasets/bridge_release/data/tfds/bridge_dataset/1.0.0",
}
"""Data set → origin: a Hub repository or a folder's URL, as in cosmos-reason1's `process_raw_data.py`."""
HOLOASSIST_TAR, HOLOASSIST_ACTIONS = "video_pitch_shifted.tar", "data-annotation-trainval-v1_1.json"
BY_HAND = {
    "agibot": "accept the terms on {hub}/datasets/{origin}, set HF_TOKEN, download observations/<task>/*.tar, and "
    "unpack them into {folder}/observations/<task>",
    "holoassist": f"download {HOLOASSIST_TAR} and {HOLOASSIST_ACTIONS} from https://holoassist.github.io, put the "
    "second into {folder}, and unpack the first into {folder}/videos",
    "bridgev2": "download the data set bridge_dataset (TFDS) from https://rail-berkeley.github.io/bridgedata, and "
    "write image_0 of the episodes to {folder}/<folder>/<episode>/images0/im_0.jpg, im_1.jpg, …",
}
BRIDGE_PATH, BRIDGE_ID, BRIDGE_IMAGES = (
    "episode_metadata/file_path",
    "episode_metadata/episode_id",
    "steps/observation/image_0",
)
BRIDGE_ROOT = "bridge_data_all/"
EPISODES, INDICES, PARTIALS = ".episodes.json", ".indices", ".partial"
SPARE_BYTES = 100 * 1024**2


@dataclass(frozen=True)
class RawPlan:
    """Plan for downloading one data set's missing raw videos."""

    dataset: str
    origin: str
    folder: Path
    clips: int
    """Total number of clips in the annotations."""
    videos: dict[str, list[str]]
    """Missing raw video → clips cut from it; a key is `<task>/<episode>/<view>`, a recording, or `<folder>.<episode>`."""

    @property
    def place(self) -> str:
        """The origin for display, with any password hidden."""
        return hide_secrets(self.origin)

    @property
    def manual_steps(self) -> str:
        return BY_HAND[self.dataset].format(hub=get_hub_url(), origin=self.place, folder=self.folder)


def check_origin(dataset: str, origin: str) -> None:
    """Raise ConfigError if `--raw-from` is not a source of raw videos."""
    if dataset not in ORIGINS:
        problem = f"{dataset} is not cut from raw videos; use --raw-from only with {', '.join(ORIGINS)}"
    elif dataset == "agibot" and re.fullmatch(r"[\w.-]+/[\w.-]+", origin) is None:
        problem = f"{dataset} comes from a data set on the Hub; specify it as owner/name, such as {ORIGINS[dataset]}"
    elif dataset != "agibot" and not origin.startswith(("http://", "https://")):
        problem = f"{dataset} comes from a web server; specify the URL of a folder, such as {ORIGINS[dataset]}"
    else:
        return
    raise ConfigError(f"--raw-from {hide_secrets(origin)}: {problem}")


def plan_raw(dataset: str, names: Sequence[str], clips: Path, folder: Path, origin: str | None = None) -> RawPlan:
    """Plan the download of missing raw videos, for clips that have not been cut yet. No request is made.

    Args:
        names: clip names, without extension.
        clips: folder with the clips that have already been cut.
        folder: folder for the raw videos, which `dsreason data clip` will search.
        origin: another source for the same files; None uses the one in `ORIGINS`.
    """
    videos: dict[str, list[str]] = defaultdict(list)
    for name in names:
        if not (clips / f"{name}.mp4").is_file() and not has_raw(dataset, name, folder):
            videos[get_raw_name(dataset, name)].append(name)
    return RawPlan(dataset, (origin or ORIGINS[dataset]).rstrip("/"), folder, len(names), dict(videos))


def get_raw_name(dataset: str, name: str) -> str:
    match = check_name(name, dataset)
    if dataset == "agibot":
        return f"{match['task']}/{match['episode']}/{match['view']}"
    return match["recording"] if dataset == "holoassist" else f"{match['folder']}.{match['episode']}"


def has_raw(dataset: str, name: str, folder: Path) -> bool:
    match = check_name(name, dataset)
    find: dict[str, Callable[[], object]] = {
        "agibot": lambda: find_agibot_cut(match, folder),
        "bridgev2": lambda: find_bridge_cut(match, folder),
        "holoassist": lambda: find_holoassist_video(match["recording"], folder),
    }
    try:
        find[dataset]()
    except MissingRaw:
        return False
    except DataError:  # the raw video exists, and cutting will report what is wrong with the name
        return True
    return True


def fetch_raw(plan: RawPlan) -> list[str]:
    """Download the missing raw videos; return a message for each clip whose raw video the origin does not have.

    Raises:
        ConfigError: another process fetches into the same folder.
        DataError: access is denied, the connection fails, content is damaged, the disk has too little space, or a file
            or folder cannot be written. Except in the last case, the message explains how to get the videos manually.
    """
    if not plan.videos:
        return []
    with convert_raw_errors(plan), hold_folder(plan.folder):
        fetched = {"agibot": fetch_agibot, "holoassist": fetch_holoassist, "bridgev2": fetch_bridge}[plan.dataset](plan)
        shutil.rmtree(plan.folder / PARTIALS, ignore_errors=True)
    return [
        f"{clip}: its raw video {video} was not found in {plan.place}"
        for video, clips in plan.videos.items()
        if video not in fetched
        for clip in clips
    ]


@contextmanager
def convert_raw_errors(plan: RawPlan) -> Iterator[None]:
    try:
        yield
    except DataError as error:
        raise DataError(f"{plan.dataset}: {error}. To get the videos manually: {plan.manual_steps}") from error
    except OSError as error:
        raise DataError(
            f"{plan.dataset}: {error.filename or plan.folder}: cannot be written ({error.strerror or error}); fix "
            "this, and run the same command again to continue"
        ) from error


@contextmanager
def convert_server_errors(source: ServedFile) -> Iterator[None]:
    try:
        yield
    except HTTPError as error:
        advice = "; run the same command again to continue" if is_transient(error) else ""
        raise DataError(f"{describe_failure(source, error)}{advice}") from error
    except TimeoutError as error:
        raise DataError(f"{source.url}: {error}; run the same command again to continue") from None


# ---------------------------------------------------------------- tars


def fetch_agibot(plan: RawPlan) -> set[str]:
    """Download the needed views from the tars that may contain the episodes; return the videos that were found."""
    commit, files = list_files(plan.origin, None)
    by_tar: dict[str, list[str]] = defaultdict(list)
    for video in plan.videos:
        task, episode, _ = video.split("/")
        tars = [file.path for file in files if re.fullmatch(rf"observations/{task}/[^/]*\.tar", file.path)]
        for tar in select_tars(tars, int(episode)):
            by_tar[tar].append(video)
    fetched: set[str] = set()
    for tar, videos in sorted(by_tar.items()):
        task = tar.split("/")[1]
        wanted_members = {
            f"{video.split('/')[1]}/{inside}": video
            for video in videos
            if video not in fetched
            for inside in list_agibot_members(video.split("/")[2])
        }
        url = hf_hub_url(plan.origin, tar, repo_type="dataset", revision=commit, endpoint=get_hub_url())
        with convert_dataset_errors(plan.origin, commit):
            fetched |= fetch_members(
                plan, ServedFile(url, on_hub=True), wanted_members, plan.folder / "observations" / task
            )
    return fetched


def list_agibot_members(view: str) -> list[str]:
    return [f"{folder}{stem}.mp4" for folder in ("videos/", "") for stem in (view, f"{view}_color")]


def select_tars(tars: Sequence[str], episode: int) -> list[str]:
    """Select the tars whose range includes the episode (`648642-685032.tar`), or else the tars whose name is not a range."""
    ranges = {tar: re.fullmatch(r"(\d+)-(\d+)\.tar", tar.rpartition("/")[2]) for tar in tars}
    inside = [tar for tar, match in ranges.items() if match and int(match[1]) <= episode <= int(match[2])]
    return inside or [tar for tar, match in ranges.items() if match is None]


def fetch_holoassist(plan: RawPlan) -> set[str]:
    fetch_file(plan, ServedFile(f"{plan.origin}/{HOLOASSIST_ACTIONS}"), plan.folder / HOLOASSIST_ACTIONS)
    wanted_members = {f"{recording}/{file}": recording for recording in plan.videos for file in HOLOASSIST_VIDEOS}
    source = ServedFile(f"{plan.origin}/{HOLOASSIST_TAR}")
    with convert_server_errors(source):
        return fetch_members(plan, source, wanted_members, plan.folder / "videos")


def fetch_members(plan: RawPlan, source: ServedFile, wanted: dict[str, str], folder: Path) -> set[str]:
    """Download members of a tar to `folder`; return the keys of the members that were found.

    Args:
        wanted: suffix of a member's path, which is also its path in `folder` → key of the video.
    """
    if not wanted:
        return set()
    members = find_members(source, wanted, plan.folder / INDICES)
    partials = {part: locate_partial(plan, source, *part) for part in members.values()}
    remaining = sum(size - get_size(partial) for (_, _, size), partial in partials.items())
    check_room(plan.folder, remaining)
    with track(f"fetching raw videos of {plan.dataset}", remaining, "bytes") as advance:
        for (member, start, size), partial in partials.items():
            ending = next(ending for ending in wanted if f"/{member}".endswith(f"/{ending}"))
            fetch_part(source, start, size, partial, advance)
            (folder / ending).parent.mkdir(parents=True, exist_ok=True)
            os.replace(partial, folder / ending)
    return set(members)


def fetch_file(plan: RawPlan, source: ServedFile, file: Path) -> None:
    """Download a complete file unless it exists."""
    if file.is_file():
        return
    with convert_server_errors(source):
        size, partial = source.version.size, locate_partial(plan, source)
        remaining = size - get_size(partial)
        check_room(plan.folder, remaining)
        with track(f"fetching {file.name}", remaining, "bytes") as advance:
            fetch_part(source, 0, size, partial, advance)
    os.replace(partial, file)


def locate_partial(plan: RawPlan, source: ServedFile, *part: str | int) -> Path:
    """Return the path of the partial download of `part` from this version of the file."""
    key = " ".join(map(str, (source.url, *source.version, *part)))
    return plan.folder / PARTIALS / hashlib.sha256(key.encode()).hexdigest()[:24]


def check_room(folder: Path, size: int) -> None:
    free = shutil.disk_usage(find_existing(folder)).free
    if size + SPARE_BYTES > free:
        raise DataError(
            f"{folder}: {size / 1e9:.1f} GB are needed, but only {free / 1e9:.1f} GB are free; choose another "
            "--data-dir"
        )


# ---------------------------------------------------------------- BridgeData V2


def fetch_bridge(plan: RawPlan) -> set[str]:
    """Download shards until all episodes are found, starting with shards that are known to contain some of them."""
    episodes: dict[str, list[str]] = read_json_object(
        plan.folder / EPISODES
    )  # episodes by shard, recorded by earlier calls
    fetched: set[str] = set()
    for split in ("train", "val"):
        missing = {video for video in plan.videos if find_split(video) in (split, None)} - fetched
        if not missing:
            continue
        for shard in sorted(list_shards(plan, split), key=lambda name: missing.isdisjoint(episodes.get(name, ()))):
            missing -= fetched
            if not missing:
                break
            if shard in episodes and missing.isdisjoint(episodes[shard]):
                continue
            inside, taken_members = fetch_shard(plan, shard, missing)
            fetched |= taken_members
            episodes[shard] = inside
            write_file(plan.folder / EPISODES, json.dumps(episodes))
    return fetched


def find_split(video: str) -> str | None:
    """Return a video's split, `train` or `val`, which is the last word of its folder's name; None if that word is neither."""
    last = re.split(r"[-./]", video.rpartition(".")[0])[-1]
    return last if last in ("train", "val") else None


def list_shards(plan: RawPlan, split: str) -> list[str]:
    source = ServedFile(f"{plan.origin}/dataset_info.json")
    with convert_server_errors(source):
        content = source.read()
    try:
        (count,) = [
            len(split_facts["shardLengths"])
            for split_facts in json.loads(content)["splits"]
            if split_facts["name"] == split
        ]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(f"{source.url}: does not list the shards of the split {split} ({error})") from error
    return [f"bridge_dataset-{split}.tfrecord-{number:05d}-of-{count:05d}" for number in range(count)]


def fetch_shard(plan: RawPlan, shard: str, requested: set[str]) -> tuple[list[str], set[str]]:
    """Download a shard and extract the requested episodes; the shard is not kept.

    Returns:
        All episodes in the shard, and the requested ones among them, whose frames are now on the disk.
    """
    source, file = ServedFile(f"{plan.origin}/{shard}"), plan.folder / shard
    fetch_file(plan, source, file)
    inside: list[str] = []
    fetched: set[str] = set()
    try:
        for example in read_examples(file, (BRIDGE_PATH, BRIDGE_ID, BRIDGE_IMAGES)):
            video = name_bridge_video(example[BRIDGE_PATH][0], example[BRIDGE_ID][0])
            inside.append(video)
            if video in requested:
                write_frames(example[BRIDGE_IMAGES], plan.folder / Path(*video.rsplit(".", 1)) / "images0")
                fetched.add(video)
    except (KeyError, IndexError) as error:
        raise DataError(
            f"{source.url}: an episode has no {error}, so this is not the data set bridge_dataset"
        ) from error
    finally:
        file.unlink()  # the shard is deleted even if it is damaged, so that it is downloaded again
    return inside, fetched


def name_bridge_video(path: bytes | int, episode: bytes | int) -> str:
    """Return an episode's name as it appears in clip names: `/…/bridge_data_all/a/b/train/out.npy` and 12 →
    `a-b-train.12`."""
    text, number = (
        str(value, "utf-8", "replace") if isinstance(value, bytes) else str(value) for value in (path, episode)
    )
    if BRIDGE_ROOT not in text:
        raise DataError(f"an episode's file_path is {text:.200}, but it must contain {BRIDGE_ROOT}")
    folder = text.rpartition(BRIDGE_ROOT)[2].removesuffix("/out.npy")
    return f"{folder.replace('/', '-')}.{number}"


def write_frames(images: Sequence[bytes | int], folder: Path) -> None:
    """Write all images to `folder`, or none if an error occurs."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".frames-") as scratch:
        inside = Path(scratch) / folder.name
        inside.mkdir()
        for number, image in enumerate(images):
            if isinstance(image, bytes):
                suffix = "png" if image.startswith(b"\x89PNG") else "jpg"
                (inside / f"im_{number}.{suffix}").write_bytes(image)
        os.replace(inside, folder)
