"""Rules that derive, from a Cosmos-Reason1 clip's name, the raw video that it was cut from and the range in that video.

The rules are those of cosmos-reason1's `process_raw_data.py`. All ranges are half-open: the start frame is included and the end
frame is not, so `end - start` frames are cut.

- agibot, `574-809829-head_center_fisheye_color-440-699-1.mp4`: frames 440 to 698 of the view `head_center_fisheye_color`
  in task 574, episode 809829; an optional sixth part does not affect the cut.
- holoassist, `R005-7July-DSLR_coarse_2_fine_41.mp4`: the fine-grained action with `id` 41 in the annotations of the
  recording R005-7July-DSLR, from its start to its end in seconds; the coarse action is ignored.
- bridgev2, `<folder>.<episode>.totalframe058.clipframe018.mp4`: the first 18 of the 58 frames of an episode; slashes in
  the folder are written as `-`. There may be a `_` between episode and totalframe.

The raw data may have these layouts below the folder `raw`:

- agibot (AgiBotWorld): `observations/<task>/<episode>/videos/<view>.mp4`; `observations/` and `videos/` are optional, and the
  view may be followed by `_color`.
- holoassist: `videos/<recording>/Export_py/Video_pitchshift.mp4` (or `Video.mp4`, `Video_compress.mp4`; `videos/` is
  optional), `videos/<recording>.mp4` or `<recording>.mp4`; and the actions in `data-annotation*.json`, a list of
  `{"video_name": …, "events": [{"label": "Fine grained action", "id": 41, "start": seconds, "end": seconds}, …]}`.
- bridgev2 (BridgeData V2): an episode's frames (`image_0`) as `<folder>/<episode>/images0/im_0.jpg, im_1.jpg, …`,
  `<folder>/traj<episode>/images0/…`, `<folder>/raw/traj_group*/traj<episode>/images0/…`, or a video
  `<folder>/<episode>.mp4`. The published `out.npy` files are pickles, which are not read: export their frames first.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dsreason.errors import ConfigError, DataError

VIDEOS = (".mp4", ".mkv", ".avi", ".mov", ".webm")
HOLOASSIST_VIDEOS = ("Export_py/Video_pitchshift.mp4", "Export_py/Video.mp4", "Export_py/Video_compress.mp4")
FINE = "Fine grained action"

AGIBOT = re.compile(r"(?P<task>\d+)-(?P<episode>\d+)-(?P<view>[A-Za-z]\w*)-(?P<start>\d+)-(?P<end>\d+)(-\d+)?")
HOLOASSIST = re.compile(r"(?P<recording>.+)_coarse_(?P<coarse>\d+)_fine_(?P<fine>\d+)")
BRIDGE = re.compile(
    r"(?P<folder>.+)\.(?P<episode>(?!_\.)[^.]+)\.(_\.)?totalframe(?P<total>\d+)\.clipframe(?P<clip>\d+)"
)

FORMS = {
    "agibot": "task-episode-view-start-end.mp4, such as 574-809829-head_color-440-699-1.mp4",
    "holoassist": "recording_coarse_N_fine_M.mp4, such as R005-7July-DSLR_coarse_2_fine_41.mp4",
    "bridgev2": "folder.episode.totalframeNNN.clipframeMMM.mp4, such as k-train.12.totalframe058.clipframe018.mp4",
}


@dataclass(frozen=True)
class Cut:
    """A part of a raw video, or of a folder with its frames as images.

    The range `[start, end)` counts frames in display order from 0, or seconds since the first frame. `total` is the number of
    frames that the raw video should have; None if the clip's name does not contain it.
    """

    source: Path
    start: float
    end: float
    unit: Literal["frames", "seconds"]
    total: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.end:
            raise DataError(f"its range from {self.start:g} to {self.end:g} {self.unit} is empty")


Actions = dict[str, dict[int, tuple[float, float]]]
"""Mapping: recording → id of a fine-grained action → its start and end in seconds."""


class MissingRaw(DataError):
    """Error raised if a clip's raw video is missing from the raw folder."""


Rule = Callable[[str], Cut]
"""Function that maps a clip's name, without its extension, to the part to cut.

It raises MissingRaw if the raw video is missing, and DataError if the name cannot be used.
"""


def choose_rule(dataset: str, raw: Path, *, events: Path | None = None) -> Rule:
    """Return the rule for a data set.

    Args:
        events: file with HoloAssist's actions; None searches for the file near `raw`.

    Raises:
        ConfigError: the raw folder or, for HoloAssist, the actions file is missing.
        DataError: the actions file is damaged.
    """
    if not raw.is_dir():
        raise ConfigError(
            f"--raw {raw}: no such folder; pass the folder with the raw videos of {dataset}, or download them with "
            f"dsreason data fetch --raw --dataset {dataset}"
        )
    if dataset == "holoassist":
        actions = read_actions(events or find_actions(raw))
        return lambda name: find_holoassist_cut(check_name(name, dataset), raw, actions)
    find_cut = {"agibot": find_agibot_cut, "bridgev2": find_bridge_cut}[dataset]
    return lambda name: find_cut(check_name(name, dataset), raw)


def check_name(name: str, dataset: str) -> re.Match[str]:
    """Split a clip's name into its parts, and return them as a match.

    Raises:
        DataError: the name does not follow the naming convention, or could point outside the folder.
    """
    pattern = {"agibot": AGIBOT, "holoassist": HOLOASSIST, "bridgev2": BRIDGE}[dataset]
    match = pattern.fullmatch(name)
    if match is None:
        raise DataError(f"{name}: is not the name of a clip of {dataset}; names have the form {FORMS[dataset]}")
    if any(character in name for character in "/\\\0") or name.startswith((".", "-")) or ".." in name:
        raise DataError(f"{name}: could point outside the folder of the raw videos")
    return match


def find_agibot_cut(match: re.Match[str], raw: Path) -> Cut:
    task, episode, view = match["task"], match["episode"], match["view"]
    episodes = [raw / "observations" / task / episode, raw / task / episode]
    places = [
        folder / stem
        for episode_folder in episodes
        for folder in (episode_folder / "videos", episode_folder)
        for stem in (view, f"{view}_color")
    ]
    return Cut(find_first_file(list_videos(places)), int(match["start"]), int(match["end"]), "frames")


def find_bridge_cut(match: re.Match[str], raw: Path) -> Cut:
    folder, episode, total, end = match["folder"], match["episode"], int(match["total"]), int(match["clip"])
    places = list(dict.fromkeys(raw / name for name in (folder.replace("-", "/"), folder, folder.replace(".", "/"))))
    names = [episode, f"traj{episode}"]
    candidates = [place / name / "images0" for place in places for name in names]
    for place in places:
        candidates += sorted(place.glob(f"raw/traj_group*/traj{episode.removeprefix('traj')}/images0"))
    candidates += list_videos(place / name for place in places for name in names)
    cut = Cut(find_first_file(candidates), 0, end, "frames", total)
    if end > total:
        raise DataError(f"clipframe is {end}, but totalframe is only {total}")
    return cut


def find_holoassist_cut(match: re.Match[str], raw: Path, actions: Actions) -> Cut:
    recording, fine = match["recording"], int(match["fine"])
    source = find_holoassist_video(recording, raw)
    if recording not in actions:
        raise DataError(f"the recording {recording} has no annotated actions")
    if fine not in actions[recording]:
        raise DataError(
            f"the recording {recording} has {len(actions[recording])} fine-grained actions, but none with the id {fine}"
        )
    return Cut(source, *actions[recording][fine], "seconds")


def find_holoassist_video(recording: str, raw: Path) -> Path:
    """Find a recording's video.

    Raises:
        MissingRaw: the video is missing.
    """
    places = [home / recording / file for home in (raw / "videos", raw) for file in HOLOASSIST_VIDEOS]
    return find_first_file([*places, *list_videos([raw / "videos" / recording, raw / recording])])


def list_videos(places: Iterable[Path]) -> list[Path]:
    return [place.with_name(f"{place.name}{suffix}") for place in places for suffix in VIDEOS]


def find_first_file(candidates: Sequence[Path]) -> Path:
    existing_path = next((path for path in candidates if path.exists()), None)
    if existing_path is None:
        raise MissingRaw(
            f"its raw video was not found at any of the {len(candidates)} paths tried (for example, {candidates[0]})"
        )
    return existing_path


# ---------------------------------------------------------------- HoloAssist actions


def find_actions(raw: Path) -> Path:
    annotation_files = sorted([*raw.glob("data-annotation*.json"), *raw.parent.glob("data-annotation*.json")])
    if not annotation_files:
        raise ConfigError(
            f"--raw {raw}: neither this folder nor its parent has a data-annotation*.json; pass the file with --events"
        )
    return annotation_files[-1]


def read_actions(file: Path) -> Actions:
    try:
        recordings = json.loads(file.read_text(encoding="utf-8"))
        return {entry["video_name"]: collect_fine_actions(entry.get("events") or []) for entry in recordings}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(
            f"{file}: is not an annotation file of HoloAssist ({type(error).__name__}: {error}); it must be a list of "
            '{"video_name", "events": [{"label", "id", "start", "end"}]}'
        ) from error


def collect_fine_actions(events: Iterable[dict[str, Any]]) -> dict[int, tuple[float, float]]:
    """Collect a recording's fine-grained actions: id → (start, end). If several events have the same id, keep the first."""
    spans: dict[int, tuple[float, float]] = {}
    for event in events:
        if event["label"] == FINE:
            spans.setdefault(int(event["id"]), (float(event["start"]), float(event["end"])))
    return spans
