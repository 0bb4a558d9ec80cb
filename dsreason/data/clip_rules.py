"""What the name of a Cosmos-Reason1 clip says: which raw video it was cut from, and which part of it.

All ranges are half-open: the first frame is in, the last is not, so that `end - start` frames are cut.

- agibot, `327-648642-head-120-260.mp4`: frames 120 to 259 of the view `head` of episode 648642 of task 327.
- holoassist, `R005-7July-DSLR_coarse_2_fine_0.mp4`: the fine grained action number 0 within the coarse grained action
  number 2 of the recording R005-7July-DSLR, from its start to its end in seconds. Actions are numbered in the order of
  their start, from 0 (`count_from`); a fine one belongs to the coarse one during which it starts.
- bridgev2, `<folder>.<episode>._.totalframe050.clipframe032.mp4`: the first 32 of the 50 frames of the episode. As
  totalframe counts the frames of the whole, clipframe counts those of the clip: its end frame is not in it.

Raw data may lie in these ways below the folder `raw`:

- agibot (AgiBotWorld): `observations/<task>/<episode>/videos/<view>_color.mp4`, also without `observations/`, without
  `videos/` or without `_color`.
- holoassist: `<recording>/Export_py/Video_pitchshift.mp4` (or `Video.mp4`, `Video_compress.mp4`), `videos/<recording>.mp4`
  or `<recording>.mp4`; and the actions in `data-annotation*.json`, a list of
  `{"video_name": …, "events": [{"label": "Coarse grained action", "start": seconds, "end": seconds}, …]}`.
- bridgev2 (BridgeData V2): `<folder>/<episode>/images0/im_0.jpg, im_1.jpg, …`, `<folder>/traj<episode>/images0/…`,
  `<folder>/raw/traj_group*/traj<episode>/images0/…`, or a video `<folder>/<episode>.mp4`. Dots of `<folder>` in the name
  may be slashes of a path.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from dsreason.errors import ConfigError, DataError

VIDEOS = (".mp4", ".mkv", ".avi", ".mov", ".webm")
HOLOASSIST_VIDEOS = ("Export_py/Video_pitchshift.mp4", "Export_py/Video.mp4", "Export_py/Video_compress.mp4")
COARSE, FINE = "Coarse grained action", "Fine grained action"

AGIBOT = re.compile(r"(?P<task>\d+)-(?P<episode>\d+)-(?P<view>[A-Za-z]\w*)-(?P<start>\d+)-(?P<end>\d+)")
HOLOASSIST = re.compile(r"(?P<recording>.+)_coarse_(?P<coarse>\d+)_fine_(?P<fine>\d+)")
BRIDGE = re.compile(r"(?P<folder>.+)\.(?P<episode>[^.]+)\._\.totalframe(?P<total>\d+)\.clipframe(?P<clip>\d+)")

FORMS = {
    "agibot": "task-episode-view-start-end.mp4, as 327-648642-head-120-260.mp4",
    "holoassist": "recording_coarse_N_fine_M.mp4, as R005-7July-DSLR_coarse_2_fine_0.mp4",
    "bridgev2": "folder.episode._.totalframeNNN.clipframeMMM.mp4, as kitchen.12._.totalframe050.clipframe032.mp4",
}


@dataclass(frozen=True)
class Cut:
    """A part of a raw video, or of a folder with its frames as images.

    `[start, end)` counts frames in the order in which they are shown, from 0, or seconds from the first of them.
    `total` is the number of frames that the raw video should have, where the name tells it.
    """

    source: Path
    start: float
    end: float
    unit: Literal["frames", "seconds"]
    total: int | None = None


Actions = dict[str, list[list[tuple[float, float]]]]
"""Recording → coarse actions in order → (start, end) in seconds of the fine actions in order."""


class MissingRaw(DataError):
    """The raw video of a clip is not below the raw folder."""


Rule = Callable[[str], Cut]
"""From the name of a clip, without its ending, to what is to be cut. MissingRaw, or DataError where it says nothing usable."""


def rule_for(dataset: str, raw: Path, *, events: Path | None = None, count_from: int = 0) -> Rule:
    """The rule of a data set; `events` and `count_from` are for holoassist.

    ConfigError, DataError: no raw folder, or no usable file of actions (holoassist).
    """
    if not raw.is_dir():
        raise ConfigError(f"--raw {raw}: no such folder; give the folder with the raw videos of {dataset}")
    if dataset == "holoassist":
        actions = read_actions(events or find_actions(raw))
        return partial(holoassist_cut, raw=raw, actions=actions, count_from=count_from)
    return partial({"agibot": agibot_cut, "bridgev2": bridge_cut}[dataset], raw=raw)


def check_name(name: str, dataset: str) -> re.Match[str]:
    """The parts of a clip's name. DataError: it does not follow the rule, or could lead out of the folder."""
    pattern = {"agibot": AGIBOT, "holoassist": HOLOASSIST, "bridgev2": BRIDGE}[dataset]
    match = pattern.fullmatch(name)
    if match is None:
        raise DataError(f"{name}: is not the name of a clip of {dataset}; the rule is {FORMS[dataset]}")
    if any(character in name for character in "/\\\0") or name.startswith(".") or ".." in name:
        raise DataError(f"{name}: could lead out of the folder of the raw videos")
    return match


def agibot_cut(name: str, raw: Path) -> Cut:
    match = check_name(name, "agibot")
    task, episode, view = match["task"], match["episode"], match["view"]
    episodes = [raw / "observations" / task / episode, raw / task / episode]
    places = [folder / stem for one in episodes for folder in (one / "videos", one) for stem in (f"{view}_color", view)]
    source = first_file(videos(places), name)
    return cut_of(name, source, int(match["start"]), int(match["end"]), "frames")


def bridge_cut(name: str, raw: Path) -> Cut:
    match = check_name(name, "bridgev2")
    episode, total = match["episode"], int(match["total"])
    places = list(dict.fromkeys([raw / match["folder"], raw / match["folder"].replace(".", "/")]))
    names = [episode, f"traj{episode}"]
    candidates = [place / one / "images0" for place in places for one in names]
    for place in places:
        candidates += sorted(place.glob(f"raw/traj_group*/traj{episode.removeprefix('traj')}/images0"))
    candidates += videos(place / one for place in places for one in names)
    cut = cut_of(name, first_file(candidates, name), 0, int(match["clip"]), "frames", total)
    if cut.end > total:
        raise DataError(f"{name}: clipframe ({int(cut.end)}) is beyond totalframe ({total})")
    return cut


def holoassist_cut(name: str, raw: Path, actions: Actions, count_from: int = 0) -> Cut:
    match = check_name(name, "holoassist")
    recording, coarse, fine = match["recording"], int(match["coarse"]) - count_from, int(match["fine"]) - count_from
    places = [raw / recording / file for file in HOLOASSIST_VIDEOS]
    source = first_file([*places, *videos([raw / "videos" / recording, raw / recording])], name)
    if recording not in actions:
        raise DataError(f"{name}: the recording {recording} has no annotated actions")
    if not 0 <= coarse < len(actions[recording]):
        found = f"{recording} has {len(actions[recording])} coarse actions"
        raise DataError(f"{name}: {found}, counted from {count_from}; see --count-from")
    if not 0 <= fine < len(actions[recording][coarse]):
        found = f"coarse action {match['coarse']} of {recording} has {len(actions[recording][coarse])} fine ones"
        raise DataError(f"{name}: {found}, counted from {count_from}; see --count-from")
    start, end = actions[recording][coarse][fine]
    return cut_of(name, source, start, end, "seconds")


def cut_of(
    name: str,
    source: Path,
    start: float,
    end: float,
    unit: Literal["frames", "seconds"],
    total: int | None = None,
) -> Cut:
    if not 0 <= start < end:
        raise DataError(f"{name}: its range from {start:g} to {end:g} {unit} is empty")
    return Cut(source, start, end, unit, total)


def videos(places: Iterable[Path]) -> list[Path]:
    return [place.with_name(f"{place.name}{suffix}") for place in places for suffix in VIDEOS]


def first_file(candidates: Sequence[Path], name: str) -> Path:
    found = next((path for path in candidates if path.exists()), None)
    if found is None:
        raise MissingRaw(f"{name}: no raw video, such as {candidates[0]}")
    return found


# ---------------------------------------------------------------- actions of HoloAssist


def counts_from_zero(names: Iterable[str]) -> bool:
    """Whether a name has an action with the number 0: in names that count from 1 none does."""
    return any(re.search(r"_(coarse|fine)_0+(_|$)", name) for name in names)


def find_actions(raw: Path) -> Path:
    found = sorted([*raw.glob("data-annotation*.json"), *raw.parent.glob("data-annotation*.json")])
    if not found:
        raise ConfigError(f"--raw {raw}: no data-annotation*.json in it or beside it; give it with --events")
    return found[-1]


def read_actions(file: Path) -> Actions:
    try:
        recordings = json.loads(file.read_text(encoding="utf-8"))
        return {entry["video_name"]: fine_by_coarse(entry["events"]) for entry in recordings}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{file}: is not an annotation of HoloAssist ({type(error).__name__}: {error}); expected a list of "
            '{"video_name", "events": [{"label", "start", "end"}]}'
        ) from error


def fine_by_coarse(events: Iterable[dict[str, Any]]) -> list[list[tuple[float, float]]]:
    """Of one recording; see the module for the rule.

    Example: coarse 0–10 and 10–20, fine 1–3, 4–9.5 and 10–12 → [[(1, 3), (4, 9.5)], [(10, 12)]].
    """
    spans: dict[str, list[tuple[float, float]]] = {COARSE: [], FINE: []}
    for event in events:
        if event["label"] in spans:
            spans[event["label"]].append((float(event["start"]), float(event["end"])))
    coarse, fine = sorted(spans[COARSE]), sorted(spans[FINE])
    return [[span for span in fine if start <= span[0] < end] for start, end in coarse]
