"""The bytes of any image or video are either decoded as the header specifies, or rejected with an error that names the file,
within the limits.

Each file is read in a separate process, with limits on time and memory, because decoders crash.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import strategies as st

from dsreason.errors import DataError
from dsreason.media import images, videos
from dsreason.media.images import load_image, probe_image
from dsreason.media.videos import load_video, probe_video
from tests.fuzz.fuzzing import Fuzz, damaged
from tests.unit.hostile.guard import guarded
from tests.unit.hostile.test_images import KINDS, progressive
from tests.unit.media.videos import write_video

pytestmark = [pytest.mark.integration, pytest.mark.long]

VIDEOS = {"mp4": "libx264", "mov": "libx264", "mkv": "libx264", "ts": "libx264", "avi": "mpeg4", "webm": "libvpx-vp9"}


def test_damaged_media_raise_only_data_errors(fuzz: Fuzz, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (images, videos):
        monkeypatch.setattr(module, "MAX_IMAGE_PIXELS", 10_000_000)  # decoding larger ones takes long
    clips = [write_video(here / f"clip.{name}", codec=codec).read_bytes() for name, codec in VIDEOS.items()]
    pictures = [*KINDS.values(), progressive(64, 64, 3)]

    def check(case: tuple[bool, bytes]) -> None:
        is_picture, content = case
        (here / "a.mp4").write_bytes(content)
        try:
            guarded(lambda: use_picture(here / "a.mp4") if is_picture else use_clip(here / "a.mp4"))
        except DataError as error:
            assert "a.mp4" in str(error), str(error)

    damaged_pictures = st.tuples(st.just(True), damaged(st.sampled_from(pictures)))
    fuzz(check, st.one_of(damaged_pictures, st.tuples(st.just(False), damaged(st.sampled_from(clips)))))


def use_picture(path: Path) -> None:
    height, width = probe_image(path)
    assert load_image(path).size == (width, height)


def use_clip(path: Path) -> None:
    info = probe_video(path)
    assert info.num_frames > 0 and math.isfinite(info.fps) and info.fps > 0 and info.duration >= 0
    last = info.num_frames - 1
    assert load_video(path, sorted({0, last // 2, last}), size=(28, 28)).shape[1:] == (28, 28, 3)
