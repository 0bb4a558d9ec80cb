"""Clips from video files: their frames, their size, and the error if a video does not suffice."""

from __future__ import annotations

import io
import logging
import os
import pickle
import tarfile
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch

from dsreason.errors import DataError, StorageError
from dsreason.files import remote
from dsreason.files.address import S3Address
from dsreason.files.s3 import S3Object
from dsreason.media.vision import VideoInfo
from dsreason.world.data import open_world_data, shards
from dsreason.world.data.clips import choose_frames, fit_size
from dsreason.world.schema import WorldDataConfig
from dsreason.world.types import ClipSize

SIZE = ClipSize(5, 32, 32, 8.0)


def video(path: Path, frames: int = 24, fps: int = 8, height: int = 32, width: int = 64) -> Path:
    """Write a video whose frame i is grey (10·i), with black left and right quarters."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=fps, options={"crf": "4", "preset": "ultrafast"})
        stream.height, stream.width, stream.pix_fmt = height, width, "yuv420p"
        for number in range(frames):
            pixels = np.zeros((height, width, 3), np.uint8)
            pixels[:, width // 4 : -width // 4] = 10 * number
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts, frame.time_base = number, Fraction(1, fps)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def levels(clip: torch.Tensor) -> list[int]:
    return [round(value / 10) for value in clip.float().mean(dim=(0, 2, 3)).tolist()]


@pytest.mark.parametrize(
    ("fps", "wanted", "start", "indices"),
    [
        (16, 16, 0, [0, 1, 2, 3, 4]),
        (24, 16, 0, [0, 1, 3, 4, 6]),
        (30, 16, 0, [0, 1, 3, 5, 7]),
        (16, 16, 0.5, [8, 9, 10, 11, 12]),
        (29.97, 30, 0, [0, 1, 2, 3, 4]),
        (60, 10, 0.1, [6, 12, 18, 24, 30]),
    ],
)
def test_frame_shown_at_each_moment_is_chosen(fps: float, wanted: float, start: float, indices: list[int]) -> None:
    info = VideoInfo(100, fps, 32, 64, 100 / fps)
    assert choose_frames(info, ClipSize(5, 32, 32, wanted), start) == indices


@pytest.mark.parametrize(
    ("frames", "fps", "start", "said"),
    [
        (6, 24, 0, r"5 frames at 16 per second need 7 frames at its 24 per second, but it has only 6"),
        (4, 16, 0, r"need 5 frames at its 16 per second, but it has only 4; lower data.frames"),
        (20, 16, 1, r"need 5 frames at its 16 per second from second 1 on, but it has only 4"),
        (20, 16, 9, r"from second 9 on, but it has only 0"),
        (99, 12, 0, r"has 12 frames per second, fewer than data.fps \(16\).* lower data.fps to 12"),
    ],
)
def test_insufficient_video_is_reported_with_numbers(frames: int, fps: float, start: float, said: str) -> None:
    with pytest.raises(DataError, match=said):
        choose_frames(VideoInfo(frames, fps, 32, 64, frames / fps), ClipSize(5, 32, 32, 16.0), start)


def test_video_with_just_enough_frames_is_read() -> None:
    assert choose_frames(VideoInfo(93, 16, 1, 1, 5.8), ClipSize(93, 32, 32, 16.0), 0)[-1] == 92


@pytest.mark.parametrize(
    ("have", "wanted", "size"),
    [
        ((720, 1280), (704, 1280), (720, 1280)),
        ((1080, 1920), (704, 1280), (720, 1280)),
        ((64, 32), (32, 32), (64, 32)),
        ((31, 31), (32, 48), (48, 48)),
    ],
)
def test_smallest_covering_size_is_chosen(
    have: tuple[int, int], wanted: tuple[int, int], size: tuple[int, int]
) -> None:
    assert fit_size(have, wanted) == size


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    video(folder / "videos" / "a.mp4")
    video(folder / "videos" / "b.mp4", frames=3)
    (folder / "videos" / "c.mp4").write_bytes(b"no video")
    (folder / "metas").mkdir()
    for name, text in {"a": " a grey\nbox ", "b": "short", "c": "broken"}.items():
        (folder / "metas" / f"{name}.txt").write_text(text)
    return folder


def test_folder_yields_prompts_and_cropped_clips(folder: Path) -> None:
    rows, _ = open_world_data(WorldDataConfig(format="folder", path=str(folder)), 0)
    assert [(row.id, row.prompt) for row in rows.rows][0] == (f"{folder}/videos/a.mp4", "a grey box")
    clip = rows.read_clip(rows[0], SIZE)
    assert (clip.dtype, clip.shape) == (torch.uint8, (3, 5, 32, 32))
    assert levels(clip) == [0, 1, 2, 3, 4]
    assert levels(rows.read_clip(rows[0], ClipSize(5, 16, 16, 4.0))) == [0, 2, 4, 6, 8]
    with pytest.raises(DataError, match=r"videos/b.mp4: the video is too short: .*need 5 frames .*it has only 3"):
        rows.read_clip(rows[1], SIZE)
    with pytest.raises(DataError, match=r"videos/c.mp4: .*not a usable video"):
        rows.read_clip(rows[2], SIZE)


def test_clip_or_prompt_without_counterpart_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("videos/a.mp4", "videos/b.mp4", "metas/b.json", "metas/c.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"prompt": "x", "start": 1.5}')
    config = WorldDataConfig(format="folder", path=str(tmp_path))
    with pytest.raises(
        DataError, match=r"2 rows .*a.mp4: has no prompt: metas/a.txt does not exist; .*metas/c.txt: has no video"
    ):
        open_world_data(config, 0)
    with caplog.at_level(logging.WARNING):
        rows, _ = open_world_data(config.model_copy(update={"on_bad_row": "skip"}), 0)
    assert [(row.prompt, row.meta) for row in rows.rows] == [("x", {"start": 1.5})]
    with pytest.raises(DataError, match=r"must be a folder with videos/\*.mp4"):
        open_world_data(WorldDataConfig(format="folder", path=str(tmp_path / "videos")), 0)


def test_unreadable_prompt_is_a_bad_row(tmp_path: Path) -> None:
    (tmp_path / "videos").mkdir()
    (tmp_path / "videos" / "b.mp4").write_bytes(b"")
    (tmp_path / "metas" / "b.txt").mkdir(parents=True)
    with pytest.raises(DataError, match=r"1 rows .*b.mp4: metas/b.txt cannot be read: Is a directory"):
        open_world_data(WorldDataConfig(format="folder", path=str(tmp_path)), 0)


# ---------------------------------------------------------------- shards


def pack(path: Path, members: dict[str, bytes], mode: str = "w") -> Path:
    with tarfile.open(path, mode) as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DSREASON_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def opened(path: Path, **settings: Any) -> Any:
    return open_world_data(WorldDataConfig(format="shards", path=str(path), **settings), 0)[0]


def test_shard_rows_are_readable_in_any_order(tmp_path: Path, cache: Path) -> None:
    content = video(tmp_path / "v.mp4").read_bytes()
    (tmp_path / "shards").mkdir()
    pack(
        tmp_path / "shards" / "b-000001.tar",
        {"d/7.json": b'{"prompt": "third", "start": 0.5, "fps": 8}', "d/7.mp4": content, "d/7.text.npy": b"not read"},
    )
    pack(
        tmp_path / "shards" / "a-000000.tar",
        {"0.mp4": content, "0.txt": b"first\n", "1.json": b'{"prompt": "second"}', "1.latent.npy": b"not read"},
    )
    rows = pickle.loads(pickle.dumps(opened(tmp_path / "shards")))
    assert [row.prompt for row in rows.rows] == ["first", "second", "third"]
    assert [row.id.rpartition("/shards/")[2] for row in rows.rows] == [
        "a-000000.tar:0",
        "a-000000.tar:1",
        "b-000001.tar:d/7",
    ]
    assert levels(rows.read_clip(rows[2], SIZE)) == [4, 5, 6, 7, 8]
    assert levels(rows.read_clip(rows[0], SIZE)) == [0, 1, 2, 3, 4]
    with pytest.raises(DataError, match=r"a-000000.tar:1: the row has a prompt but no clip"):
        rows.read_clip(rows[1], SIZE)


def test_shard_is_indexed_once_per_version(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shard = pack(tmp_path / "a.tar", {"0.txt": b"one"})
    made, make = [], shards.make_index
    monkeypatch.setattr(shards, "make_index", lambda *given: made.append(given) or make(*given))
    assert [row.prompt for _ in range(2) for row in opened(shard).rows] == ["one", "one"]
    assert len(made) == 1
    pack(shard, {"0.txt": b"another"})
    os.utime(shard, ns=(1, 1))
    assert [row.prompt for row in opened(shard).rows] == ["another"]


def test_webdataset_and_long_name_shards_are_read(tmp_path: Path, cache: Path) -> None:
    key = "x" * 150
    shard = pack(tmp_path / "a.tar", {f"./{key}.json": b'{"prompt": "long"}', f"./{key}.mp4": b"1"})
    assert [(row.prompt, row.clip is not None) for row in opened(shard).rows] == [("long", True)]


@pytest.mark.parametrize("suffix", ["pickle", "pkl", "text.pyd", "latent.pth", "PT"])
def test_shard_with_pickle_is_rejected(tmp_path: Path, cache: Path, suffix: str) -> None:
    shard = pack(tmp_path / "a.tar", {"0.json": b'{"prompt": "x"}', f"0.{suffix}": b"cos\nsystem\n"})
    with pytest.raises(DataError, match=rf"a.tar: member '0.{suffix}' is a pickle, which could run code"):
        opened(shard)


def test_row_with_only_latents_has_no_clip(tmp_path: Path, cache: Path) -> None:
    (row,) = opened(pack(tmp_path / "a.tar", {"0.txt": b"x", "0.latent.npy": b"not read"})).rows
    assert row.clip is None


def test_suffix_case_is_ignored(tmp_path: Path, cache: Path) -> None:
    content = video(tmp_path / "v.mp4").read_bytes()
    (tmp_path / "shards").mkdir()
    pack(tmp_path / "shards" / "A.TAR", {"0.MP4": content, "0.Json": b'{"prompt": "x"}'})
    rows = opened(tmp_path / "shards")
    assert [row.prompt for row in rows.rows] == ["x"]
    assert levels(rows.read_clip(rows[0], SIZE)) == [0, 1, 2, 3, 4]


def test_shards_too_large_for_disk_are_rejected(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def source(name: str) -> S3Object:
        return S3Object(S3Address("bucket", f"clips/{name}"), 4 * 10**17, "etag", name)

    listed = {name: source(name) for name in ("a.tar", "b.tar", "c.tar", "notes.txt")}
    folder = remote._get_cache_folder(listed["c.tar"].address, "c.tar")
    folder.mkdir(parents=True)
    fetched: list[str] = []
    monkeypatch.setattr(shards, "list_objects", lambda address: listed)
    monkeypatch.setattr(shards, "fetch_file", fetched.append)
    with pytest.raises(StorageError, match=r"s3://bucket/clips: 800000000.0 GB .* [0-9.]+ GB are free"):
        open_world_data(WorldDataConfig(format="shards", path="s3://bucket/clips"), 0)
    assert not fetched


def test_rows_without_a_prompt_are_bad_rows(tmp_path: Path, cache: Path) -> None:
    shard = pack(
        tmp_path / "a.tar", {"0.mp4": b"x", "1.json": b"{", "2.json": b"{}", "3.txt": b"\xff", "4.txt": b"good"}
    )
    with pytest.raises(
        DataError,
        match=r"4 rows .*a.tar:0: has no prompt: neither 0.json nor 0.txt exists, only mp4.*a.tar:1: its .json",
    ):
        opened(shard)
    assert [row.prompt for row in opened(shard, on_bad_row="skip").rows] == ["good"]


def test_unusable_shards_are_reported(tmp_path: Path, cache: Path) -> None:
    content = pack(tmp_path / "a.tar", {"0.txt": b"x" * 3000}).read_bytes()
    (tmp_path / "cut.tar").write_bytes(content[:1500])
    pack(tmp_path / "zipped.tar", {"0.txt": b"x"}, "w:gz")
    with tarfile.open(tmp_path / "link.tar", "w") as tar:
        info = tarfile.TarInfo("0.txt")
        info.type, info.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(info)
    for name, message in (
        ("cut", "cut.tar: "),
        ("zipped", "if it is compressed, decompress it"),
        ("link", "'0.txt' is a link or a sparse file"),
    ):
        with pytest.raises(DataError, match=message):
            opened(tmp_path / f"{name}.tar")
    for path, message in (
        (tmp_path / "none", "must be a tar file"),
        (tmp_path / "wdinfo.pkl", "dsreason data unpickle"),
    ):
        with pytest.raises(DataError, match=message):
            opened(path)


def test_cosmos_shard_layout_is_rejected_with_advice(tmp_path: Path, cache: Path) -> None:
    for kind in ("metas", "video"):
        (tmp_path / kind).mkdir()
        pack(tmp_path / kind / "000.tar", {"0.json": b"{}"})
    with pytest.raises(
        DataError, match=r"a separate tar for each kind of member \(metas, video\), as in cosmos-rl; unpack"
    ):
        opened(tmp_path)
