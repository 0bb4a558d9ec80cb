"""Videos that claim excessive sizes, refer to other files, or are damaged."""

from __future__ import annotations

import os
import random
import struct
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from dsreason.errors import DataError
from dsreason.families import FAMILIES
from dsreason.media import videos
from dsreason.media.videos import load_video, probe_video
from dsreason.media.vision import PixelLimits, compute_video_size, sample_frames
from tests.unit.hostile.guard import guarded, refused
from tests.unit.hostile.inputs import SAMPLE_TABLE, box_start, damaged, edited
from tests.unit.media.videos import write_video

SIZES, TIMES, CHUNKS = (*SAMPLE_TABLE, b"stsz"), (*SAMPLE_TABLE, b"stts"), (*SAMPLE_TABLE, b"stsc")
TRACK, MEDIA = (b"moov", b"trak", b"tkhd"), (b"moov", b"trak", b"mdia", b"mdhd")
VISION = FAMILIES["qwen2_5_vl"].vision


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Videos of twelve frames of 64x48 pixels in several container formats."""
    folder = tmp_path_factory.mktemp("videos")
    made = {name: write_video(folder / f"a.{name}").read_bytes() for name in ("mp4", "mov", "mkv", "ts")}
    made["avi"] = write_video(folder / "a.avi", codec="mpeg4").read_bytes()
    made["long"] = write_video(folder / "long.mp4", 100, options={"movflags": "faststart"}).read_bytes()
    large = [np.full((96, 128, 3), 9, np.uint8)] * 12
    made["large ts"] = write_video(folder / "large.ts", frames=large).read_bytes()
    return made


CLAIMS: dict[str, tuple[Any, list[str]]] = {
    "2 billion frames": (
        lambda mp4: edited(mp4, TIMES, 16, ">II", 2**31 - 1, 1),
        ["claims to have 2147483647 frames", "2000000"],
    ),
    "2 billion frames of one size": (lambda mp4: edited(mp4, SIZES, 12, ">II", 1, 2**31 - 1), []),
    "10 million frames of one size": (lambda mp4: edited(mp4, SIZES, 12, ">II", 1, 10**7), []),
    "150 million frames in one chunk": (
        lambda mp4: edited(edited(mp4, SIZES, 12, ">II", 1, 150 * 10**6), CHUNKS, 16, ">III", 1, 2**31 - 1, 1),
        [],
    ),
    "no time between frames": (lambda mp4: edited(mp4, TIMES, 16, ">II", 12, 0), ["frame rate cannot be determined"]),
    "no index": (lambda mp4: mp4[: box_start(mp4, [b"moov"])], []),
    "index only": (lambda mp4: mp4[box_start(mp4, [b"moov"]) :], ["truncated"]),
    "another codec's name": (lambda mp4: mp4.replace(b"avc1", b"zzzz"), ["no decoder"]),
}


@pytest.mark.parametrize("name", CLAIMS)
def test_header_with_false_claims_is_rejected(here: Path, files: dict[str, bytes], name: str) -> None:
    change, words = CLAIMS[name]
    (here / "a.mp4").write_bytes(change(files["mp4"]))
    refused(lambda: probe_video(here / "a.mp4"), DataError, "a.mp4", *words)


@pytest.mark.parametrize(
    ("path", "offset", "layout", "values"),
    [
        (MEDIA, 20, ">II", (1, 2**32 - 1)),
        (MEDIA, 20, ">II", (0, 0)),
        (MEDIA, 20, ">II", (2**32 - 1, 1)),
        (TIMES, 16, ">II", (12, 2**31 - 1)),
        (TRACK, 84, ">II", (2**31, 2**31)),
        (TRACK, 48, ">9I", (0,) * 9),
        (TRACK, 48, ">9I", (2**31 - 1,) * 9),
    ],
    ids=["136 years", "no time base", "fine time base", "frames of 2 days", "track size", "no matrix", "huge matrix"],
)
def test_absurd_header_fails_or_yields_few_frames(
    here: Path, files: dict[str, bytes], path: Any, offset: int, layout: str, values: tuple[int, ...]
) -> None:
    (here / "a.mp4").write_bytes(edited(files["mp4"], path, offset, layout, *values))

    def use() -> tuple[int, ...]:
        info = probe_video(here / "a.mp4")
        frames = sample_frames(info, {"fps": 2}, VISION)
        size = compute_video_size(
            info.height, info.width, len(frames.indices), {}, PixelLimits(28, 784, 784 * 16), VISION
        )
        return load_video(here / "a.mp4", frames.indices, size=size).shape

    try:
        count, height, width, _ = guarded(use)
    except DataError as error:
        assert "a.mp4" in str(error)
    else:
        assert 2 <= count <= 12 and height * width <= 784 * 16


PLAYLISTS = {
    "concat.mp4": "ffconcat version 1.0\nfile real.ts\n",
    "absolute.mp4": "ffconcat version 1.0\nfile {folder}/real.ts\n",
    "passwd.mp4": "ffconcat version 1.0\nfile /etc/passwd\n",
    "hls.mp4": "#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:1,\nreal.ts\n#EXT-X-ENDLIST\n",
    "hls.m3u8": "#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:1,\nreal.ts\n#EXT-X-ENDLIST\n",
    "hls_passwd.m3u8": "#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:1,\nfile:///etc/passwd\n#EXT-X-ENDLIST\n",
    "hls_http.m3u8": "#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:1,\nhttp://127.0.0.1:1/a.ts\n#EXT-X-ENDLIST\n",
    "dash.mpd": '<?xml version="1.0"?><MPD xmlns="urn:mpeg:dash:schema:mpd:2011" type="static" '
    'mediaPresentationDuration="PT1S" profiles="urn:mpeg:dash:profile:isoff-on-demand:2011"><Period><AdaptationSet '
    'mimeType="video/mp2t"><Representation id="1" bandwidth="1"><BaseURL>real.ts</BaseURL></Representation>'
    "</AdaptationSet></Period></MPD>",
    "stream.sdp": "v=0\no=- 0 0 IN IP4 127.0.0.1\ns=a\nc=IN IP4 127.0.0.1\nt=0 0\nm=video 5004 RTP/AVP 96\n"
    "a=rtpmap:96 H264/90000\n",
    "text.mp4": "hello\n" * 200,
    "terminal.mp4": "\x1b[2J\x1b[31mhello" * 50,
    "lavfi.mp4": "testsrc=size=64x48:rate=10",
}


@pytest.mark.parametrize("name", PLAYLISTS)
def test_playlist_is_not_followed(here: Path, files: dict[str, bytes], name: str) -> None:
    (here / "real.ts").write_bytes(files["ts"])
    (here / name).write_text(PLAYLISTS[name].replace("{folder}", str(here)))
    refused(lambda: probe_video(here / name), DataError, name, "not a usable video")
    refused(lambda: load_video(here / name, [0]), DataError, name, "not a usable video")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"GIF89a" + struct.pack("<HH", 65535, 65535) + bytes(3) + b";", ""),
        (b"YUV4MPEG2 W30000 H30000 F25:1\nFRAME\n" + bytes(100), "not a usable video"),
        (b"", "empty (0 bytes)"),
        (bytes(5000), "not a usable video"),
    ],
    ids=["GIF of 65535x65535", "raw frames of 30000x30000", "no bytes", "zeros"],
)
def test_malformed_video_of_other_format_is_rejected(here: Path, content: bytes, words: str) -> None:
    (here / "a.mp4").write_bytes(content)
    refused(lambda: probe_video(here / "a.mp4"), DataError, "a.mp4", words)


def test_avi_claiming_2_billion_frames_is_rejected(here: Path, files: dict[str, bytes]) -> None:
    content = bytearray(files["avi"])
    for name, offset in ((b"avih", 24), (b"strh", 40)):  # number of frames in the file's header and in the stream's
        struct.pack_into("<I", content, content.index(name) + offset, 2**31 - 1)
    (here / "a.avi").write_bytes(content)
    refused(
        lambda: probe_video(here / "a.avi"),
        DataError,
        "a.avi",
        "claims to have 2147483647 frames, but the maximum is 2000000",
    )


def test_sound_file_is_rejected_as_video(here: Path) -> None:
    with wave.open("a.mp4", "wb") as sound:
        sound.setparams((1, 2, 8000, 0, "NONE", ""))
        sound.writeframes(bytes(16000))
    refused(lambda: probe_video(here / "a.mp4"), DataError, "a.mp4", "has no video stream")


def test_picture_is_rejected_as_video(here: Path) -> None:
    Image.new("RGB", (9, 9)).save("a.png")
    os.rename("a.png", "a.mp4")
    refused(lambda: probe_video(here / "a.mp4"), DataError, "a.mp4", "is an image")


def test_endless_pipe_is_not_opened(here: Path) -> None:
    os.mkfifo("a.mp4")
    refused(lambda: probe_video(here / "a.mp4"), DataError, "a.mp4", "is not a file")
    refused(lambda: load_video(here / "a.mp4", [0]), DataError, "a.mp4", "is not a file")


def test_repeated_or_decreasing_times_keep_every_frame(here: Path, files: dict[str, bytes]) -> None:
    (here / "a.ts").write_bytes(files["ts"] * 2)
    info = guarded(lambda: probe_video(here / "a.ts"))
    assert info.num_frames == 24
    shape = guarded(lambda: load_video(here / "a.ts", range(24)).shape)
    assert shape == (24, 48, 64, 3)


def test_frames_of_changing_size_are_resized(here: Path, files: dict[str, bytes]) -> None:
    (here / "a.ts").write_bytes(files["ts"] + files["large ts"])
    assert guarded(lambda: load_video(here / "a.ts", [0, 20], size=(28, 28)).shape) == (2, 28, 28, 3)


def test_frames_beyond_size_limit_are_rejected(
    here: Path, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(videos, "MAX_IMAGE_PIXELS", 100 * 100)
    (here / "a.ts").write_bytes(files["ts"] + files["large ts"])
    refused(lambda: load_video(here / "a.ts", [0, 20], size=(28, 28)), DataError, "a.ts")


@pytest.mark.parametrize("name", ["mp4", "ts", "avi"])
@pytest.mark.parametrize("wanted", [[99], [0, 99]])
def test_frames_too_costly_to_decode_are_rejected(
    here: Path, monkeypatch: pytest.MonkeyPatch, name: str, wanted: list[int]
) -> None:
    """Read a hundred frames after a single key frame, with and without (AVI) usable timestamps."""
    write_video(here / f"a.{name}", 100, gop=1000, codec="mpeg4" if name == "avi" else "libx264")
    monkeypatch.setattr(videos, "DECODED_PIXELS_PER_BYTE", 0)
    monkeypatch.setattr(videos, "FEWEST_DECODED_PIXELS", 50 * 48 * 64)
    words = ["1.6e+05 pixels would be decoded, but the limit for a file of", "more key frames"]
    refused(lambda: load_video(here / f"a.{name}", wanted, size=(28, 28)), DataError, f"a.{name}", *words)
    assert guarded(lambda: load_video(here / f"a.{name}", [0, 40], size=(28, 28)).shape) == (2, 28, 28, 3)


def test_undecodable_packets_are_not_all_tried(
    here: Path, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(videos, "MAX_UNUSABLE_PACKETS", 0)
    (here / "a.mp4").write_bytes(files["mp4"])
    refused(lambda: probe_video(here / "a.mp4"), DataError, "a.mp4", "can be decoded")


@pytest.mark.parametrize("name", ["mp4", "mov", "mkv", "ts", "avi", "long"])
def test_random_damage_is_an_error_or_harmless(here: Path, files: dict[str, bytes], name: str) -> None:
    chance = random.Random(0)

    def use_damaged() -> None:
        for _ in range(40):
            (here / "a.mp4").write_bytes(damaged(files[name], chance, most=12))
            try:
                info = probe_video(here / "a.mp4")
                assert load_video(here / "a.mp4", [0, info.num_frames - 1], size=(28, 28)).shape == (2, 28, 28, 3)
            except DataError as error:
                assert "a.mp4" in str(error)

    guarded(use_damaged)
