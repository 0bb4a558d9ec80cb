"""Videos given as image files: their order, their times, and their pixels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from dsreason.errors import DataError
from dsreason.media import frames
from dsreason.media.videos import load_video, probe_video
from dsreason.media.vision import VideoInfo
from tests.unit.media.videos import number_frame, read_number


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COSMOS_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with twelve frames, `f_0.png` to `f_11.png`, which show their number, and with files that are not frames."""
    folder = tmp_path / "clip [1]"
    folder.mkdir()
    for number in range(12):
        Image.fromarray(number_frame(number)).save(folder / f"f_{number}.png")
    (folder / "times.txt").write_text("0 1")
    (folder / ".hidden.png").write_text("")
    (folder / "depth").mkdir()
    return folder


def write(folder: Path, numbers: list[int], **times: Any) -> str:
    return str(frames.write_frame_list([str(folder / f"f_{number}.png") for number in numbers], times))


def list_names(path: Path) -> list[str]:
    listed = frames.list_frames(str(path))
    assert listed is not None
    return [Path(file).name for file in listed]


def test_folder_is_ordered_by_numbers(folder):
    assert list_names(folder) == [f"f_{number}.png" for number in range(12)]


@pytest.mark.parametrize(
    ("pattern", "numbers"),
    [("f_*.png", range(12)), ("f_1?.png", [10, 11]), ("f_[135].png", [1, 3, 5]), ("../clip*/f_[02].png", [0, 2])],
)
def test_pattern_is_ordered_by_numbers(folder, pattern, numbers):
    assert list_names(folder / pattern) == [f"f_{number}.png" for number in numbers]


def test_frame_files_are_sorted_in_natural_order():
    names = ["b2", "a10", "a9b10", "a9b9", "a09", "a", "10", "9"]
    assert sorted(names, key=frames.make_natural_key) == ["9", "10", "a", "a09", "a9b9", "a9b10", "a10", "b2"]


@pytest.mark.parametrize("path", ["clip [1]/f_0.png", "gone.mp4", "gone", "clip [1]/*.jpg", "clip [1]/dep*"])
def test_ordinary_paths_are_not_frame_lists(folder, path):
    assert frames.list_frames(str(folder.parent / path)) is None


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("clip [1]/depth", "depth has no images"),
        ("a.frames.json", "a file of dsreason's cache"),
    ],
)
def test_paths_without_frames_are_refused(folder, path, words):
    with pytest.raises(DataError, match=words):
        frames.list_frames(str(folder.parent / path))


def test_pattern_on_s3_is_refused():
    with pytest.raises(DataError, match=r"s3://bucket/a/\*\.png is a pattern, which is not supported on S3"):
        frames.list_frames("s3://bucket/a/*.png")
    assert frames.list_frames("s3://bucket/clip[1].mp4") is None


@pytest.mark.parametrize(
    ("times", "words"),
    [
        ({}, "3 frames, and their times are missing; set either 'fps'"),
        ({"fps": None, "timestamps": None}, "missing"),
        ({"fps": 2, "timestamps": [0, 1, 2]}, "given twice, as 'fps' and 'timestamps'"),
        ({"fps": 0}, "fps is 0; it must be"),
        ({"fps": "two"}, "fps is 'two'"),
        ({"fps": "nan"}, "fps is nan"),
        ({"fps": True}, "fps is True"),
        ({"fps": float("nan")}, "fps is nan"),
        ({"timestamps": 2.0}, "timestamps is 2.0; it must be a list"),
        ({"timestamps": [0, "one", 2]}, "it must be a list of the time of each frame"),
        ({"timestamps": [0, 1]}, "2 timestamps for 3 frames"),
        ({"timestamps": [0, 1, 1]}, r"timestamps\[2\] \(1\) is not after timestamps\[1\] \(1\)"),
        ({"timestamps": [0, 2, 1]}, r"timestamps\[2\] \(1\) is not after"),
        ({"timestamps": [0, 0.0004, 1]}, r"by at least 0\.001 s"),
        ({"timestamps": [-1, 0, 1]}, r"timestamps\[0\] is -1; they must be seconds between 0 and 1000000"),
        ({"timestamps": [1.7e9, 1.7e9 + 1, 1.7e9 + 2]}, "subtract the time at which the video starts"),
        ({"timestamps": [0, 1, float("nan")]}, r"timestamps\[2\] is nan"),
    ],
)
def test_invalid_frame_times_are_rejected(times, words):
    with pytest.raises(DataError, match=words):
        frames.write_frame_list(["a.png", "b.png", "c.png"], times)


@pytest.mark.parametrize(
    ("times", "seconds", "fps", "timestamps"),
    [
        ({"fps": 4}, (0, 0.25, 0.5), 4, ()),
        ({"fps": "4"}, (0, 0.25, 0.5), 4, ()),
        ({"timestamps": ["0", "0.5", "2"]}, (0, 0.5, 2), 1, (0, 0.5, 2)),
        ({"timestamps": [0, 0.5, 1]}, (0, 0.5, 1), 2, ()),
        ({"timestamps": [0, 0.5, 2]}, (0, 0.5, 2), 1, (0, 0.5, 2)),
        ({"timestamps": [8, 8.5, 9]}, (8, 8.5, 9), 2, (8, 8.5, 9)),
        ({"timestamps": [0, 0.001, 0.002]}, (0, 0.001, 0.002), 1000, ()),
    ],
)
def test_frame_times_follow_rate_or_timestamps(times, seconds, fps, timestamps):
    written = frames.read_frame_list(str(frames.write_frame_list(["a.png", "b.png", "c.png"], times)))
    assert (written.paths, written.seconds, written.fps) == (("a.png", "b.png", "c.png"), seconds, pytest.approx(fps))
    assert written.timestamps == timestamps


def test_equal_frames_share_one_list_file(folder):
    assert write(folder, [0, 1], fps=2) == write(folder, [0, 1], fps=2.0) == write(folder, [0, 1], timestamps=[0, 0.5])
    assert write(folder, [0, 1], fps=2) != write(folder, [1, 0], fps=2)


def test_frames_are_probed_and_decoded(folder):
    path = write(folder, [7, 3, 9], timestamps=[1, 2, 5])
    assert probe_video(path) == VideoInfo(3, 0.5, 48, 64, 6.0, is_frames=True, timestamps=(1, 2, 5))
    decoded = load_video(path, [0, 1, 2, 2])
    assert (decoded.shape, decoded.dtype) == ((4, 48, 64, 3), np.uint8)
    assert [read_number(frame) for frame in decoded] == [7, 3, 9, 9]


def test_frames_are_resized_like_video_frames(folder):
    import torch
    from torchvision.transforms.v2 import InterpolationMode
    from torchvision.transforms.v2 import functional as tvf

    full = torch.from_numpy(number_frame(5)).permute(2, 0, 1)
    expected = tvf.resize(full, [28, 56], interpolation=InterpolationMode.BICUBIC, antialias=True)
    resized = load_video(write(folder, [5], fps=1), [0], size=(28, 56), decoder="torchcodec")
    assert np.array_equal(resized[0], expected.permute(1, 2, 0).numpy())


def test_frames_of_different_sizes_are_refused(folder):
    Image.new("RGB", (64, 50)).save(folder / "f_2.png")
    with pytest.raises(DataError, match=r"f_2\.png: has 64x50 pixels, but the first frame \(.*f_1\.png\) has 64x48"):
        probe_video(write(folder, [1, 2], fps=1))


def test_frame_changed_after_probing_is_refused(folder):
    path = write(folder, [1, 2], fps=1)
    probe_video(path)
    Image.new("RGB", (64, 50)).save(folder / "f_2.png")
    with pytest.raises(DataError, match=r"f_2\.png: its size has changed"):
        load_video(path, [0, 1])


@pytest.mark.parametrize(
    ("content", "words"), [(b"", "empty"), (b"%!PS-Adobe-3.0", "not a usable image"), (None, "no such file")]
)
def test_unusable_frame_is_named(folder, content, words):
    file = folder / "f_1.png"
    file.unlink() if content is None else file.write_bytes(content)
    with pytest.raises(DataError, match=rf"f_1\.png: .*{words}"):
        probe_video(write(folder, [0, 1], fps=1))


def test_lists_outside_the_cache_are_not_read(folder, tmp_path):
    planted = tmp_path / "planted.frames.json"
    planted.write_text(json.dumps({"frames": [str(folder / "f_0.png")], "seconds": [0], "fps": 1}))
    with pytest.raises(DataError, match="is not in the cache"):
        probe_video(planted)


def test_damaged_list_is_reported(folder):
    path = write(folder, [0], fps=1)
    Path(path).write_text("{")
    with pytest.raises(DataError, match="this list of frames cannot be read"):
        probe_video(path)


def test_frame_list_is_expanded_for_other_programs(folder):
    part = {"type": "video", "video": write(folder, [0, 1], timestamps=[1, 3]), "fps": 4, "max_pixels": 9}
    files = [str(folder / f"f_{number}.png") for number in (0, 1)]
    assert frames.expand_part(part) == {"type": "video", "video": files, "timestamps": [1, 3], "max_pixels": 9}
    part["video"] = write(folder, [0, 1], fps=3)
    assert frames.expand_part(part)["fps"] == 3
    image = {"type": "image", "image": "a.png"}
    assert frames.expand_part(image) is image
