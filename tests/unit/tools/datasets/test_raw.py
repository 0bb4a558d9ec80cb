"""Downloads of raw videos, from stand-ins for the Hub and for the servers of HoloAssist and BridgeData V2."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from dsreason.errors import ConfigError, DataError
from dsreason.files.lock import hold_folder
from dsreason.tools.datasets import ranges, raw
from dsreason.tools.datasets.clip_rules import choose_rule
from dsreason.tools.datasets.raw import check_origin, fetch_raw, plan_raw, select_tars
from tests.unit.tools.datasets.hub import Hub
from tests.unit.tools.datasets.test_tfrecord import record

VIDEO = bytes(range(256)) * 200
ACTIONS = [{"video_name": "R1", "events": [{"label": "Fine grained action", "id": 4, "start": 1, "end": 2.5}]}]


def tar_of(*members: tuple[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for name, content in members:
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return packed.getvalue()


def png(colour: str) -> bytes:
    packed = io.BytesIO()
    Image.new("RGB", (8, 8), colour).save(packed, "PNG")
    return packed.getvalue()


def episode(folder: str, number: int, *colours: str) -> bytes:
    path = f"/nfs/kun2/users/homer/datasets/bridge_data_all/{folder}/out.npy".encode()
    return record(
        episode_metadata__file_path=[path],
        episode_metadata__episode_id=[number],
        steps__observation__image_0=[png(colour) for colour in colours],
    )


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Serve two tasks of AgiBot, recordings R1 and R2 of HoloAssist, and three shards of BridgeData V2."""
    files = {
        "observations/327/100-199.tar": tar_of(
            ("150/depth/0.png", b"d" * 700), ("150/videos/head_color.mp4", VIDEO), ("150/videos/back.mp4", b"b" * 999)
        ),
        "observations/327/200-299.tar": tar_of(("./200/videos/head_color.mp4", VIDEO[::-1])),
        "observations/328/all.tar": tar_of(("7/videos/head_color.mp4", b"h" * 50)),
        "README.md": b"#",
    }
    train = [episode("a/b/train", 1, "red") + episode("a/b/train", 2, "red", "blue"), episode("c/train", 1, "green")]
    splits = [{"name": "train", "shardLengths": ["2", "1"]}, {"name": "val", "shardLengths": ["1"]}]
    videos = [(f"./{name}/Export_py/Video_pitchshift.mp4", name.encode() * 4000) for name in ("R0", "R1", "R2")]
    plain = {
        "/holo/video_pitch_shifted.tar": tar_of(*videos),
        "/holo/data-annotation-trainval-v1_1.json": json.dumps(ACTIONS).encode(),
        "/bridge/dataset_info.json": json.dumps({"splits": splits}).encode(),
        "/bridge/bridge_dataset-val.tfrecord-00000-of-00001": episode("a/b/val", 9, "black"),
        **{f"/bridge/bridge_dataset-train.tfrecord-{i:05d}-of-00002": shard for i, shard in enumerate(train)},
    }
    with Hub("agibot-world/AgiBotWorld-Beta", files, plain=plain) as served:
        monkeypatch.setenv("HF_ENDPOINT", served.address)
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        monkeypatch.setattr(ranges, "PAUSE_S", 0.0)
        for name in ("holo", "bridge"):
            key = {"holo": "holoassist", "bridge": "bridgev2"}[name]
            monkeypatch.setitem(raw.ORIGINS, key, f"{served.address}/{name}")
        yield served


def fetch(folder: Path, dataset: str, *names: str) -> list[str]:
    return fetch_raw(plan_raw(dataset, names, folder / "clips", folder / "raw"))


def source_of(folder: Path, dataset: str, name: str) -> Path:
    return choose_rule(dataset, folder / "raw")(name).source


def requested(hub: Hub) -> list[str]:
    return [name.rpartition("/")[2] for name, _ in hub.ranges]


# ---------------------------------------------------------------- AgiBot


def test_episode_views_are_extracted_from_tars(hub: Hub, tmp_path: Path) -> None:
    names = ["327-150-head-1-2", "327-150-head-3-9", "327-200-head_color-0-5", "328-7-head_color-0-1"]
    assert fetch(tmp_path, "agibot", *names) == []
    assert source_of(tmp_path, "agibot", names[0]).read_bytes() == VIDEO
    assert source_of(tmp_path, "agibot", names[2]).read_bytes() == VIDEO[::-1]
    assert source_of(tmp_path, "agibot", names[3]).read_bytes() == b"h" * 50
    assert not list((tmp_path / "raw").rglob("back*"))
    assert {token for _, token in hub.tokens} == {"Bearer hf_secret"}
    hub.ranges.clear()
    assert fetch(tmp_path, "agibot", *names) == []
    assert hub.ranges == []


def test_concurrent_raw_fetch_into_folder_is_refused(hub: Hub, tmp_path: Path) -> None:
    with hold_folder(tmp_path / "raw"), pytest.raises(ConfigError, match="raw: is in use by process"):
        fetch(tmp_path, "agibot", "327-150-head-1-2")
    assert hub.ranges == []


def test_missing_raw_videos_are_reported_by_clip(hub: Hub, tmp_path: Path) -> None:
    missing = fetch(tmp_path, "agibot", "327-151-head-1-2", "999-1-head-1-2", "327-150-head-1-2")
    assert missing == [
        "327-151-head-1-2: its raw video 327/151/head was not found in agibot-world/AgiBotWorld-Beta",
        "999-1-head-1-2: its raw video 999/1/head was not found in agibot-world/AgiBotWorld-Beta",
    ]
    assert source_of(tmp_path, "agibot", "327-150-head-1-2").read_bytes() == VIDEO


def test_searched_tar_is_not_searched_again(hub: Hub, tmp_path: Path) -> None:
    fetch(tmp_path, "agibot", "327-151-head-1-2")
    hub.ranges.clear()
    assert len(fetch(tmp_path, "agibot", "327-151-head-1-2")) == 1
    assert [requested for _, requested in hub.ranges] == ["bytes=0-0"]  # a request for the size
    assert fetch(tmp_path, "agibot", "327-150-back-0-3") == []
    assert source_of(tmp_path, "agibot", "327-150-back-0-3").read_bytes() == b"b" * 999


@pytest.mark.parametrize(
    ("episode", "tars"), [(100, ["o/100-199.tar"]), (250, ["o/200-299.tar"]), (500, ["o/more.tar"])]
)
def test_tars_are_selected_by_episode_range(episode: int, tars: list[str]) -> None:
    assert select_tars(["o/100-199.tar", "o/200-299.tar", "o/more.tar"], episode) == tars


def test_unaccepted_terms_are_reported_with_manual_steps(hub: Hub, tmp_path: Path) -> None:
    hub.gated, hub.token = True, "hf_other"
    with pytest.raises(DataError) as error:
        fetch(tmp_path, "agibot", "327-150-head-1-2")
    page = f"{hub.address}/datasets/agibot-world/AgiBotWorld-Beta"
    assert f"is gated; accept its terms on {page}" in str(error.value)
    assert (
        f"To get the videos manually: accept the terms on {page}, set HF_TOKEN, download observations/<task>/*.tar"
        in str(error.value)
    )
    assert "hf_secret" not in str(error.value)


# ---------------------------------------------------------------- HoloAssist


def test_recordings_are_fetched_without_hub_token(hub: Hub, tmp_path: Path) -> None:
    assert fetch(tmp_path, "holoassist", "R1_coarse_0_fine_4") == []
    cut = choose_rule("holoassist", tmp_path / "raw")("R1_coarse_0_fine_4")
    assert (cut.source.read_bytes(), cut.start, cut.end) == (b"R1" * 4000, 1, 2.5)
    assert [file.name for file in (tmp_path / "raw" / "videos").iterdir()] == ["R1"]
    assert {token for _, token in hub.tokens} == {None}


@pytest.mark.parametrize("cut_at", [3, 600, 5000])
def test_broken_download_resumes(hub: Hub, tmp_path: Path, cut_at: int) -> None:
    fetch(tmp_path, "holoassist", "R0_coarse_0_fine_4")
    hub.cut_at = cut_at
    assert fetch(tmp_path, "holoassist", "R2_coarse_0_fine_4") == []
    assert (tmp_path / "raw/videos/R2/Export_py/Video_pitchshift.mp4").read_bytes() == b"R2" * 4000


def test_resumed_fetch_downloads_only_missing_bytes(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_raw("holoassist", ["R1_coarse_0_fine_4"], tmp_path / "clips", tmp_path / "raw")
    source = ranges.ServedFile(f"{plan.origin}/video_pitch_shifted.tar")
    fetch(tmp_path, "holoassist", "R0_coarse_0_fine_4")
    members = raw.find_members(source, {"R1/Export_py/Video_pitchshift.mp4": "R1"}, tmp_path / "raw" / raw.INDICES)
    _, start, size = members["R1"]
    needed: list[int] = []
    monkeypatch.setattr(raw, "check_room", lambda folder, size: needed.append(size))
    hub.cut_at, hub.refuse = 3000, 403
    with pytest.raises(
        DataError, match=r"the server responds with status 403\..*manually: download video_pitch_shifted\.tar"
    ):
        fetch_raw(plan)
    hub.refuse = None
    hub.ranges.clear()
    assert fetch_raw(plan) == []
    assert hub.ranges[-1] == ("/holo/video_pitch_shifted.tar", f"bytes={start + 3000}-{start + size - 1}")
    assert needed == [8000, 5000]
    assert not (tmp_path / "raw" / raw.PARTIALS).exists()


@pytest.mark.parametrize("more", [0, 100])
def test_replaced_tar_is_not_continued(hub: Hub, tmp_path: Path, more: int) -> None:
    fetch(tmp_path, "holoassist", "R0_coarse_0_fine_4", "R9_coarse_0_fine_4")  # searches the whole archive
    hub.cut_at, hub.refuse = 3000, 403
    with pytest.raises(DataError, match="403"):
        fetch(tmp_path, "holoassist", "R1_coarse_0_fine_4")
    hub.refuse = None
    videos = [(f"./{name}/Export_py/Video_pitchshift.mp4", b"new" * (2000 + more)) for name in ("R3", "R2", "R1")]
    old = len(hub.plain["/holo/video_pitch_shifted.tar"])
    hub.plain["/holo/video_pitch_shifted.tar"] = tar_of(*videos)[: old if more == 0 else None].ljust(old, b"\0")
    assert fetch(tmp_path, "holoassist", "R1_coarse_0_fine_4") == []
    assert (tmp_path / "raw/videos/R1/Export_py/Video_pitchshift.mp4").read_bytes() == b"new" * (2000 + more)


def test_replaced_shard_is_fetched_from_start(hub: Hub, tmp_path: Path) -> None:
    name, shard = "a-b-val.9.totalframe001.clipframe001", "/bridge/bridge_dataset-val.tfrecord-00000-of-00001"
    hub.plain[shard] = episode("a/b/val", 8, *["green"] * 9) + episode("a/b/val", 9, "red")
    hub.cut_at, hub.refuse = 300, 403
    with pytest.raises(DataError, match="403"):
        fetch(tmp_path, "bridgev2", name)
    hub.refuse = None
    hub.plain[shard] = episode("a/b/val", 8, *["white"] * 9) + episode("a/b/val", 9, "blue")
    assert fetch(tmp_path, "bridgev2", name) == []
    assert (source_of(tmp_path, "bridgev2", name) / "im_0.png").read_bytes() == png("blue")


def test_server_without_file_sizes_is_rejected(hub: Hub, tmp_path: Path) -> None:
    hub.tells_sizes = False
    with pytest.raises(DataError, match=r"does not report the size of the file \(\*\).*manually"):
        fetch(tmp_path, "holoassist", "R1_coarse_0_fine_4")


def test_server_without_ranges_is_rejected(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranges, "build_hf_headers", dict)
    monkeypatch.setattr("tests.unit.tools.datasets.hub.re.fullmatch", lambda pattern, text: None)
    with pytest.raises(DataError, match="does not support HTTP range requests"):
        fetch(tmp_path, "holoassist", "R1_coarse_0_fine_4")


def test_missing_connection_is_reported_with_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranges, "PAUSE_S", 0.0)
    monkeypatch.setitem(raw.ORIGINS, "holoassist", "http://127.0.0.1:1")
    with pytest.raises(
        DataError, match=r"holoassist: http://127\.0\.0\.1:1/data-annotation.*same command again.*manually"
    ):
        fetch(tmp_path, "holoassist", "R1_coarse_0_fine_4")


# ---------------------------------------------------------------- BridgeData V2


def test_only_frames_of_shard_are_kept(hub: Hub, tmp_path: Path) -> None:
    name = "a-b-train.2._.totalframe002.clipframe002"
    assert fetch(tmp_path, "bridgev2", name) == []
    frames = sorted(source_of(tmp_path, "bridgev2", name).iterdir())
    assert [frame.name for frame in frames] == ["im_0.png", "im_1.png"]
    assert frames[1].read_bytes() == png("blue")
    assert not list((tmp_path / "raw").rglob("*tfrecord*"))
    assert "bridge_dataset-train.tfrecord-00001-of-00002" not in requested(hub)  # the episode is in the first shard


def test_known_shards_prevent_needless_fetches(hub: Hub, tmp_path: Path) -> None:
    names = ["c-train.1.totalframe001.clipframe001", "a-b-val.9.totalframe001.clipframe001"]
    assert fetch(tmp_path, "bridgev2", *names) == []
    hub.ranges.clear()
    missing = fetch(tmp_path, "bridgev2", "c-train.2.totalframe001.clipframe001")
    assert len(missing) == 1 and requested(hub) == ["dataset_info.json"]
    assert fetch(tmp_path, "bridgev2", "a-b-train.1.totalframe001.clipframe001") == []
    assert {name for name in requested(hub) if "tfrecord" in name} == {"bridge_dataset-train.tfrecord-00000-of-00002"}


def test_damaged_shard_is_reported_and_refetched(hub: Hub, tmp_path: Path) -> None:
    name, shard = "a-b-val.9.totalframe001.clipframe001", "/bridge/bridge_dataset-val.tfrecord-00000-of-00001"
    content, hub.plain[shard] = hub.plain[shard], b"damaged" * 99
    with pytest.raises(DataError, match="record 1: is not a TFRecord"):
        fetch(tmp_path, "bridgev2", name)
    hub.plain[shard] = content
    assert fetch(tmp_path, "bridgev2", name) == []


def test_unexpected_episode_paths_are_rejected_early(hub: Hub, tmp_path: Path) -> None:
    other = record(episode_metadata__file_path=[b"/data/a/out.npy"], episode_metadata__episode_id=[1])
    hub.plain["/bridge/bridge_dataset-train.tfrecord-00000-of-00002"] = other
    with pytest.raises(DataError, match=r"file_path is /data/a/out\.npy, but it must contain bridge_data_all/"):
        fetch(tmp_path, "bridgev2", "c-train.1.totalframe001.clipframe001")


# ---------------------------------------------------------------- all


def test_existing_clips_and_raw_videos_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "clips").mkdir()
    (tmp_path / "clips" / "327-150-head-1-2.mp4").write_bytes(b"")
    (tmp_path / "raw/327/200").mkdir(parents=True)
    (tmp_path / "raw/327/200/head.mp4").write_bytes(b"")
    names = ["327-150-head-1-2", "327-200-head-1-2", "327-300-head-1-2", "327-300-head-5-9"]
    plan = plan_raw("agibot", names, tmp_path / "clips", tmp_path / "raw", "mine/Copy")
    assert plan.videos == {"327/300/head": names[2:]}
    assert (plan.clips, plan.origin) == (4, "mine/Copy")


@pytest.mark.parametrize(
    ("file", "folder", "named"),
    [("raw/.partial", "raw", r"raw/\.partial"), ("raw", "raw/holoassist", r"raw(/holoassist)?")],
)
def test_folder_creation_failure_is_reported(hub: Hub, tmp_path: Path, file: str, folder: str, named: str) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text("")
    plan = plan_raw("holoassist", ["R1_coarse_0_fine_4"], tmp_path / "clips", tmp_path / folder)
    with pytest.raises(DataError, match=rf"^holoassist: \S*/{named}: cannot be written \(.*same command again"):
        fetch_raw(plan)


def test_empty_video_in_tar_is_ignored(hub: Hub, tmp_path: Path) -> None:
    hub.plain["/holo/video_pitch_shifted.tar"] = tar_of(("R1/Export_py/Video_pitchshift.mp4", b""))
    assert len(fetch(tmp_path, "holoassist", "R1_coarse_0_fine_4")) == 1


@pytest.mark.parametrize(
    ("dataset", "origin", "text"),
    [
        ("holoassist", "some/repo", "comes from a web server; specify the URL of a folder, such as http"),
        (
            "agibot",
            "https://me:hunter2@host/x",
            r"…@host/x: agibot comes from a data set on the Hub; specify it as owner/name",
        ),
        ("robovqa", "some/repo", "is not cut from raw videos"),
    ],
)
def test_invalid_origin_of_dataset_is_rejected(dataset: str, origin: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        check_origin(dataset, origin)


def test_insufficient_disk_is_reported_before_fetching(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(raw, "SPARE_BYTES", 10**18)
    with pytest.raises(DataError, match=r"GB are needed.*choose another --data-dir"):
        fetch(tmp_path, "agibot", "327-150-head-1-2")
    assert not list((tmp_path / "raw").rglob("*.mp4"))
