"""Clips cut from raw videos whose frames show their number in their pixels."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image

from dsreason.errors import ConfigError, DataError
from dsreason.media.videos import load_video, probe_video
from dsreason.tools.datasets.clip import cut_clips, list_needed_clips
from dsreason.tools.datasets.clip_rules import Cut, MissingRaw, check_name, choose_rule, collect_fine_actions
from dsreason.tools.datasets.cutting import IMAGE_FPS, cut_clip, encode
from dsreason.tools.datasets.processes import run_tasks
from tests.unit.media.videos import number_frame, read_number, write_video


def numbers(path: Path) -> list[int]:
    """Return the numbers of the raw video's frames that the clip shows."""
    return [read_number(frame) for frame in load_video(path, range(probe_video(path).num_frames))]


def times(path: Path) -> list[int]:
    """Return the times of the frames in milliseconds."""
    with av.open(str(path)) as container:
        return [round(1000 * frame.pts * frame.time_base) for frame in container.decode(video=0)]


def write(file: Path, content: bytes = b"") -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)
    return file


# ---------------------------------------------------------------- names


@pytest.mark.parametrize(
    "raw_file",
    [
        "observations/327/648642/videos/head_color.mp4",
        "327/648642/videos/head.mp4",
        "observations/327/648642/head_color.mkv",
    ],
)
def test_agibot_names_resolve_to_view_frames(tmp_path: Path, raw_file: str) -> None:
    source = write(tmp_path / raw_file)
    for name in ("327-648642-head-120-260", "327-648642-head-120-260-8"):
        assert choose_rule("agibot", tmp_path)(name) == Cut(source, 120, 260, "frames")


@pytest.mark.parametrize(
    ("dataset", "name"),
    [
        ("agibot", "574-809829-head_center_fisheye_color-440-699-1"),
        ("agibot", "390-705065-head_center_fisheye_color-1140-1285-8"),
        (
            "bridgev2",
            "numpy_256-icra-toykitchen_fixed_cam_resetfree-tabletop_dark_wood-02-train.12.totalframe058.clipframe018",
        ),
        ("holoassist", "R005-7July-DSLR_coarse_2_fine_41"),
    ],
)
def test_published_names_follow_the_rules(dataset: str, name: str) -> None:
    check_name(name, dataset)


@pytest.mark.parametrize(
    "raw_file",
    [
        "v2/kitchen/stack/12/images0",
        "v2/kitchen/stack/traj12/images0",
        "v2/kitchen/stack/raw/traj_group0/traj12/images0",
        "v2/kitchen/stack/12.mp4",
        "v2.kitchen.stack/12/images0",
    ],
)
def test_bridge_names_resolve_to_first_frames(tmp_path: Path, raw_file: str) -> None:
    source = write(tmp_path / raw_file / "im_0.jpg").parent if raw_file.endswith("0") else write(tmp_path / raw_file)
    names = ["v2.kitchen.stack.12._.totalframe050.clipframe032", "v2.kitchen.stack.12.totalframe050.clipframe032"]
    if "." not in raw_file.split("/")[0]:
        names.append("v2-kitchen-stack.12.totalframe050.clipframe032")
    for name in names:
        assert choose_rule("bridgev2", tmp_path)(name) == Cut(source, 0, 32, "frames", total=50)


EVENTS = [
    {"label": "Coarse grained action", "id": 1, "start": 10, "end": 20.0},
    {"label": "Fine grained action", "id": 41, "start": 10, "end": 12.5},
    {"label": "Conversation", "id": 3, "start": 2, "end": 3},
    {"label": "Fine grained action", "id": 7, "start": 4.0, "end": 9.5},
]


def test_fine_actions_are_collected_by_id() -> None:
    assert collect_fine_actions(EVENTS) == {41: (10.0, 12.5), 7: (4.0, 9.5)}


@pytest.mark.parametrize(
    ("raw_file", "name", "seconds"),
    [
        ("R1/Export_py/Video_pitchshift.mp4", "R1_coarse_0_fine_7", (4.0, 9.5)),
        ("videos/R1/Export_py/Video_compress.mp4", "R1_coarse_9_fine_41", (10.0, 12.5)),
        ("videos/R1.mp4", "R1_coarse_1_fine_41", (10.0, 12.5)),
    ],
)
def test_holoassist_names_resolve_to_action_seconds(
    tmp_path: Path, raw_file: str, name: str, seconds: tuple[float, float]
) -> None:
    source = write(tmp_path / raw_file)
    (tmp_path / "data-annotation-trainval-v1_1.json").write_text(json.dumps([{"video_name": "R1", "events": EVENTS}]))
    assert choose_rule("holoassist", tmp_path)(name) == Cut(source, *seconds, "seconds")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("R1_coarse_2_fine_0", "R1 has 2 fine-grained actions, but none with the id 0"),
        ("R2_coarse_0_fine_0", "the recording R2 has no annotated actions"),
    ],
)
def test_unannotated_actions_are_reported(tmp_path: Path, name: str, words: str) -> None:
    write(tmp_path / "R1.mp4"), write(tmp_path / "R2.mp4")
    (tmp_path / "actions.json").write_text(json.dumps([{"video_name": "R1", "events": EVENTS}]))
    with pytest.raises(DataError, match=words):
        choose_rule("holoassist", tmp_path, events=tmp_path / "actions.json")(name)


@pytest.mark.parametrize("content", ["{", '{"R1": []}', "[3]"])
def test_invalid_action_file_is_reported(tmp_path: Path, content: str) -> None:
    (tmp_path / "data-annotation.json").write_text(content)
    with pytest.raises(DataError, match="is not an annotation file of HoloAssist"):
        choose_rule("holoassist", tmp_path)


def test_holoassist_requires_an_action_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nor its parent has a data-annotation\*\.json; pass the file with --events"):
        choose_rule("holoassist", tmp_path)


@pytest.mark.parametrize(
    ("dataset", "name", "words"),
    [
        ("agibot", "327-648642-head-120", "names have the form task-episode-view-start-end"),
        ("agibot", "327-648642-../x-1-2", "is not the name of a clip of agibot"),
        ("holoassist", "R1_fine_0", "names have the form recording_coarse_N_fine_M"),
        ("holoassist", "../R1_coarse_0_fine_0", "could point outside"),
        ("bridgev2", "a.totalframe050.clipframe010", r"names have the form folder\.episode"),
        ("bridgev2", "a/../../b.1._.totalframe050.clipframe010", "could point outside"),
        ("bridgev2", "a...b.1._.totalframe050.clipframe010", "could point outside"),
        ("bridgev2", "-home-me.1.totalframe050.clipframe010", "could point outside"),
    ],
)
def test_invalid_clip_name_is_reported_with_rule(dataset: str, name: str, words: str) -> None:
    with pytest.raises(DataError, match=words):
        check_name(name, dataset)


@pytest.mark.parametrize(
    ("dataset", "name", "words"),
    [
        ("agibot", "1-2-head-9-9", "range from 9 to 9 frames is empty"),
        ("bridgev2", "a.1._.totalframe008.clipframe009", r"clipframe is 9, but totalframe is only 8"),
    ],
)
def test_impossible_range_is_reported(tmp_path: Path, dataset: str, name: str, words: str) -> None:
    write(tmp_path / "1/2/head.mp4"), write(tmp_path / "a/1.mp4")
    with pytest.raises(DataError, match=words):
        choose_rule(dataset, tmp_path)(name)


def test_missing_raw_video_raises_missing_raw(tmp_path: Path) -> None:
    with pytest.raises(
        MissingRaw,
        match=r"^its raw video was not found at any of the \d+ paths tried \(for example, .*observations/1/2/videos/head\.mp4",
    ):
        choose_rule("agibot", tmp_path)("1-2-head-3-4")
    with pytest.raises(MissingRaw):
        choose_rule("bridgev2", tmp_path)("a.1._.totalframe008.clipframe009")  # also a bad range


# ---------------------------------------------------------------- frames


@pytest.mark.parametrize(
    ("start", "end"), [(0, 1), (0, 100), (37, 61), (64, 65), (99, 100), (31, 33), (32, 64)], ids=str
)
def test_cut_has_exactly_the_requested_frames(tmp_path: Path, start: int, end: int) -> None:
    raw = write_video(tmp_path / "raw.mp4", 100, gop=32)
    cut_clip(Cut(raw, start, end, "frames"), tmp_path / "clip.mp4")
    assert numbers(tmp_path / "clip.mp4") == list(range(start, end))
    assert probe_video(tmp_path / "clip.mp4").fps == pytest.approx(10)


@pytest.mark.parametrize("name", ["raw.mkv", "raw.ts", "raw.avi", "raw.mov"])
def test_all_containers_are_cut_exactly(tmp_path: Path, name: str) -> None:
    raw = write_video(tmp_path / name, 60, gop=20, codec="mpeg4" if name == "raw.avi" else "libx264")
    cut_clip(Cut(raw, 25, 47, "frames"), tmp_path / "clip.mp4")
    assert numbers(tmp_path / "clip.mp4") == list(range(25, 47))


def test_clip_keeps_times_of_variable_frames(tmp_path: Path) -> None:
    displayed = [0, 100, 140, 180, 500, 510, 520, 1000, 1100]
    raw = write_video(tmp_path / "raw.mp4", displayed, gop=3)
    cut_clip(Cut(raw, 2, 8, "frames"), tmp_path / "clip.mp4")
    assert numbers(tmp_path / "clip.mp4") == [2, 3, 4, 5, 6, 7]
    assert times(tmp_path / "clip.mp4") == [0, 40, 360, 370, 380, 860]


@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [(0.14, 0.51, [2, 3, 4]), (0.141, 0.6, [3, 4, 5, 6]), (0.0, 0.1, [0]), (0.52, 1.22, [6, 7, 8])],
)
def test_seconds_select_frames_shown_in_range(tmp_path: Path, start: float, end: float, expected: list[int]) -> None:
    raw = write_video(tmp_path / "raw.mp4", [0, 100, 140, 180, 500, 510, 520, 1000, 1100])
    cut_clip(Cut(raw, start, end, "seconds"), tmp_path / "clip.mp4")
    assert numbers(tmp_path / "clip.mp4") == expected


def test_frames_hidden_by_edit_list_are_skipped(tmp_path: Path) -> None:
    raw = write_video(tmp_path / "raw.mp4", 40, gop=40, drop_before=700)
    cut_clip(Cut(raw, 3, 8, "frames"), tmp_path / "clip.mp4")
    assert numbers(tmp_path / "clip.mp4") == [10, 11, 12, 13, 14]


def test_clip_of_rotated_video_stays_upright(tmp_path: Path) -> None:
    frame = np.zeros((48, 64, 3), np.uint8)
    frame[:24, :32] = 255  # top left quarter is white
    raw = write_video(tmp_path / "raw.mp4", 4, rotation=90.0, frames=[frame] * 4)
    cut_clip(Cut(raw, 1, 3, "frames"), tmp_path / "clip.mp4")
    clip, original = (load_video(path, [1])[0].astype(int) for path in (tmp_path / "clip.mp4", raw))
    assert clip.shape == (64, 48, 3)
    assert np.abs(clip - original).mean() < 5


def write_images(folder: Path, count: int) -> Path:
    folder.mkdir(parents=True)
    for number in range(count):
        Image.fromarray(number_frame(number)).save(folder / f"im_{number}.jpg")
    return folder


@pytest.mark.parametrize("end", [1, 11, 12])
def test_images_become_clip_in_numeric_order(tmp_path: Path, end: int) -> None:
    raw = write_images(tmp_path / "images0", 12)
    cut_clip(Cut(raw, 0, end, "frames", total=12), tmp_path / "clip.mp4")
    assert numbers(tmp_path / "clip.mp4") == list(range(end))
    assert probe_video(tmp_path / "clip.mp4").fps == pytest.approx(30)


def test_odd_side_is_cropped_by_one_pixel(tmp_path: Path) -> None:
    (tmp_path / "images0").mkdir()
    Image.fromarray(number_frame(3, 49, 65)).save(tmp_path / "images0" / "im_0.png")
    cut_clip(Cut(tmp_path / "images0", 0, 1, "frames"), tmp_path / "clip.mp4")
    info = probe_video(tmp_path / "clip.mp4")
    assert (info.height, info.width) == (48, 64)
    assert numbers(tmp_path / "clip.mp4") == [3]


@pytest.mark.parametrize(
    ("cut", "words"),
    [
        ({"start": 8, "end": 13}, "has 12 frames, but they do not cover the range 8 to 13 frames"),
        ({"start": 12, "end": 13}, "has 12 frames"),
        (
            {"start": 1.0, "end": 1.4, "unit": "seconds"},
            "has 12 frames, but they do not cover the range 1 to 1.4 seconds",
        ),
        ({"start": 0.11, "end": 0.12, "unit": "seconds"}, "do not cover the range"),
        ({"start": 0, "end": 5, "total": 14}, "has 12 frames, but the clip's name says 14; this is another episode"),
    ],
)
def test_frames_missing_from_raw_video_are_reported(tmp_path: Path, cut: dict[str, Any], words: str) -> None:
    raw = write_video(tmp_path / "raw.mp4", 12)
    with pytest.raises(DataError, match=words):
        cut_clip(Cut(source=raw, **{"unit": "frames", **cut}), tmp_path / "clip.mp4")
    assert [file.name for file in tmp_path.iterdir()] == ["raw.mp4"]


def test_one_extra_frame_is_accepted(tmp_path: Path) -> None:
    raw = write_video(tmp_path / "raw.mp4", 12)
    cut_clip(Cut(raw, 0, 11, "frames", total=11), tmp_path / "clip.mp4")
    assert len(numbers(tmp_path / "clip.mp4")) == 11


def test_frame_without_time_is_reported(tmp_path: Path) -> None:
    frame = av.VideoFrame.from_ndarray(number_frame(0), format="rgb24")  # decoders may omit the time
    with pytest.raises(DataError, match=r"a frame has no time"):
        encode(iter([frame]), IMAGE_FPS, tmp_path / "clip.mp4")


def test_a_damaged_raw_video_leaves_nothing_behind(tmp_path: Path) -> None:
    raw = write_video(tmp_path / "raw.mkv", 100, gop=100)
    content = raw.read_bytes()
    raw.write_bytes(content[: len(content) // 2])
    with pytest.raises(DataError, match=r"raw\.mkv"):
        cut_clip(Cut(raw, 90, 100, "frames"), tmp_path / "clip.mp4")
    assert [file.name for file in tmp_path.iterdir()] == ["raw.mkv"]


# ---------------------------------------------------------------- whole data sets


def annotate(folder: Path, *videos: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "agibot_rl_qa_pairs.json").write_text(json.dumps([{"video": video, "qa_pairs": {}} for video in videos]))
    return folder


def test_needed_clips_are_listed_from_annotations(tmp_path: Path) -> None:
    folder = annotate(tmp_path, "clips/1-2-head-3-8.mp4", "1-2-head-0-2", "clips/1-2-head-3-8.mp4")
    assert list_needed_clips(folder, "agibot") == ["1-2-head-3-8", "1-2-head-0-2"]


@pytest.mark.parametrize(
    ("video", "words"),
    [
        (
            "clips/1-2-3.mp4",
            r"1 rows do not name a valid clip of agibot:\n  .*row 2: 1-2-3: is not the name.*names have the form",
        ),
        ("../../etc/1-2-head-3-8.mp4", "is not the name of a clip"),
        (None, "row 2: field 'video' must be the path of a clip; got None"),
    ],
)
def test_rows_without_clip_name_are_reported(tmp_path: Path, video: str, words: str) -> None:
    with pytest.raises(DataError, match=words):
        list_needed_clips(annotate(tmp_path, "1-2-head-3-8", video), "agibot")


def test_missing_annotations_are_reported(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no annotation file"):
        list_needed_clips(tmp_path, "agibot")


@pytest.mark.parametrize("workers", [0, 2])
def test_clips_are_cut_once_and_failures_reported(tmp_path: Path, workers: int) -> None:
    (tmp_path / "raw/1/2").mkdir(parents=True)
    write_video(tmp_path / "raw/1/2/head.mp4", 20)
    names = ["1-2-head-3-8", "1-2-head-0-2", "1-9-head-0-2", "1-2-head-15-25"]
    rule, folder = choose_rule("agibot", tmp_path / "raw"), tmp_path / "clips"
    first = cut_clips(names, rule, folder, workers=workers)
    assert sorted(first.cut) == ["1-2-head-0-2", "1-2-head-3-8"]
    assert [text.partition(":")[0] for text in first.missing] == ["1-9-head-0-2"]
    assert len(first.failed) == 1 and "has 20 frames, but they do not cover the range 15 to 25" in first.failed[0]
    assert numbers(folder / "1-2-head-3-8.mp4") == [3, 4, 5, 6, 7]
    written = (folder / "1-2-head-3-8.mp4").stat().st_mtime_ns
    clips = cut_clips(names, rule, folder, workers=workers)
    assert sorted(clips.present) == ["1-2-head-0-2", "1-2-head-3-8"] and clips.cut == []
    assert (folder / "1-2-head-3-8.mp4").stat().st_mtime_ns == written
    assert sorted(file.name for file in folder.iterdir()) == ["1-2-head-0-2.mp4", "1-2-head-3-8.mp4"]


# ---------------------------------------------------------------- processes


def double_or_die(number: int) -> int:
    if number == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    if number == 5:
        os._exit(7)
    if number == 6:
        raise ValueError("six")
    if number == 12:
        raise DataError("row 12: unusable")
    return 2 * number


def test_dead_process_fails_only_its_task() -> None:
    tasks = dict(run_tasks(double_or_die, range(13), "task {}".format, workers=2))
    assert {number: str(tasks.pop(number)) for number in (3, 5, 6, 12)} == {
        3: "task 3: the process that worked on it was killed by SIGKILL (often: out of memory; see the kernel log)",
        5: "task 5: the process that worked on it ended with exit code 7",
        6: "task 6: ValueError: six",
        12: "row 12: unusable",
    }
    assert tasks == {number: 2 * number for number in range(12) if number not in (3, 5, 6)}


def test_tasks_run_in_this_process_without_workers() -> None:
    (_, failed), (_, done) = run_tasks(os.path.getsize, ["/nowhere", "/"], str, workers=0)
    assert str(failed).startswith("/nowhere: FileNotFoundError")
    assert done == os.path.getsize("/")
    assert list(run_tasks(lambda task: os.getpid(), [0], str, workers=0)) == [(0, os.getpid())]


def test_processes_end_when_results_are_dropped() -> None:
    results = run_tasks(lambda task: os.getpid(), range(100), str, workers=1)
    pid = next(results)[1]
    results.close()
    with pytest.raises((ChildProcessError, ProcessLookupError)):
        for _ in range(1000):
            os.waitpid(pid, 0)
