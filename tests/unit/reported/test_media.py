"""Correct results for publicly reported faults with images and videos.

Covered by other tests:

- sglang#33464 and ollama#18418 (the EXIF orientation is ignored):
  tests/unit/media/test_media.py::test_exif_rotation_applies_to_size_and_pixels
- ms-swift#6523 and Qwen3-VL#1712 (frames given as a list always count as 2 per second):
  tests/unit/data/test_frames.py::test_models_receive_actual_frame_times
- Qwen3-VL#1031 and lmms-eval#1393 (temporal positions at more than 2 frames per second):
  tests/unit/models/test_mrope.py::test_qwen2_5_video_time_is_truncated
- 2U1/Qwen-VL-Series-Finetune#218 and #125 (number of vision tokens and features):
  tests/unit/data/test_chat.py::test_vision_tokens_are_never_trained,
  tests/unit/data/formats/test_media_columns.py::test_mismatched_media_are_rejected
- LlamaFactory#8329, LlamaFactory#9313 and Qwen3-VL#556 (truncation cuts an image's tokens):
  tests/unit/data/test_chat.py::test_too_long_sample_error_shows_both_lengths,
  tests/unit/data/test_loader.py::test_too_long_samples_are_skipped_or_rejected
"""

from __future__ import annotations

import io
import json
import struct
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from dsreason.config.schema_data import DataConfig
from dsreason.data.chat import Encoder
from dsreason.data.sources import open_source
from dsreason.data.types import EncodedSample, Sample
from dsreason.errors import DataError
from dsreason.media.images import load_image, probe_image
from tests.unit.data.test_chat import assistant, user, video
from tests.unit.hostile.inputs import orientation, with_exif
from tests.unit.media.videos import write_video
from tests.unit.reported.chats import ask, call_lamp, reply, reported


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COSMOS_CACHE", str(tmp_path / "cache"))
    return tmp_path


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The path of a video of 6 s at 10 frames per second."""
    return str(write_video(tmp_path_factory.mktemp("clips") / "clip.mp4", 60))


def read_sample(folder: Path, row: dict[str, Any], **vision: float) -> Sample:
    (folder / "rows.jsonl").write_text(json.dumps(row))
    config = DataConfig.model_validate({"path": str(folder / "rows.jsonl"), "vision": vision})
    return open_source(config.list_sources()[0]).sample(0)


def list_marks(encoder: Encoder, encoded: EncodedSample) -> list[str]:
    """Return the seconds that the model reads before the frame groups of a video."""
    text = encoder.processor.tokenizer.decode(encoded.input_ids)
    return [piece.split("<")[-1] for piece in text.split(" seconds>")[:-1]]


# ---------------------------------------------------------------- images


def write_jpeg(path: Path, *, exif: bytes | None = None, xmp: bytes | None = None) -> Path:
    """Write a JPEG of 24x16 pixels with these metadata."""
    buffer = io.BytesIO()
    Image.new("RGB", (24, 16), "red").save(buffer, "JPEG")
    content = buffer.getvalue()
    if xmp is not None:
        segment = b"http://ns.adobe.com/xap/1.0/\0" + xmp
        content = content[:2] + b"\xff\xe1" + struct.pack(">H", len(segment) + 2) + segment + content[2:]
    path.write_bytes(content if exif is None else with_exif(content, exif))
    return path


ROTATED = orientation(3, 1, b"\0\6")
ZERO_DENOMINATOR = b"".join(
    [
        b"MM\0*\0\0\0\x08\0\x02",
        struct.pack(">HHI", 0x0112, 3, 1) + b"\0\6\0\0",  # orientation 6
        struct.pack(">HHII", 0x011A, 5, 1, 38) + bytes(4),  # the resolution is at byte 38
        struct.pack(">II", 72, 0),
    ]
)


@pytest.mark.parametrize(
    ("metadata", "size"),
    [
        pytest.param({"xmp": b"<x>\xa8\xff</x>"}, (24, 16), id="datasets#7668"),
        pytest.param({"xmp": b"<x>\xa8\xff</x>", "exif": ROTATED}, (16, 24), id="datasets#7668-rotated"),
        pytest.param({"exif": ZERO_DENOMINATOR}, (16, 24), id="datasets#8173"),
    ],
)
def test_broken_metadata_do_not_hide_image(tmp_path: Path, metadata: dict[str, bytes], size: tuple[int, int]) -> None:
    path = write_jpeg(tmp_path / "a.jpg", **metadata)
    assert load_image(path).size == size
    assert probe_image(path) == size[::-1]


@reported("unsloth#2251")
def test_untagged_image_gets_its_tokens(qwen2_5_vl: Encoder, folder: Path) -> None:
    write_jpeg(folder / "a.jpg")
    row = {"messages": [ask("What is it?"), reply("red")], "images": ["a.jpg"]}
    encoded = qwen2_5_vl.encode(read_sample(folder, row))
    num_tokens = int((encoded.input_ids == qwen2_5_vl.processor.image_token_id).sum())
    assert num_tokens == int(encoded.mm_kwargs["image_grid_thw"].prod()) // 4 > 0
    assert len(encoded.mm_kwargs["pixel_values"]) == 4 * num_tokens


@pytest.mark.parametrize("token", ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>"])
@pytest.mark.parametrize("place", ["system", "question", "reply", "tool", "call"])
@reported("2U1/Qwen-VL-Series-Finetune#181")
def test_written_vision_tokens_are_refused(qwen2_5_vl: Encoder, place: str, token: str) -> None:
    """Refuse written vision tokens, which would count as tokens of an image that does not exist."""
    texts = dict.fromkeys(["system", "question", "reply", "tool", "call"], "a") | {place: f"Say {token}"}
    messages = [
        {"role": "system", "content": texts["system"]},
        ask(texts["question"]),
        call_lamp({"on": texts["call"]}),
        {"role": "tool", "content": texts["tool"]},
        reply(texts["reply"]),
    ]
    with pytest.raises(
        DataError, match=rf"message \d: the text contains the model's special token '{token}'".replace("|", r"\|")
    ):
        qwen2_5_vl.encode(Sample("1", messages))


# ---------------------------------------------------------------- seconds of frames

EVEN = [0, 54, 108, 162, 217, 271, 325, 379]
UNEVEN = [10, 98, 120, 180, 200, 250, 272, 310]


@pytest.mark.parametrize(
    ("frames", "marks"),
    [(EVEN, ["0.9", "4.5", "8.1", "11.7"]), (UNEVEN, ["1.8", "5.0", "7.5", "9.7"])],
    ids=["evenly", "unevenly"],
)
@reported("Qwen3-VL#2117")
def test_chosen_frames_keep_their_seconds(qwen3_vl: Encoder, folder: Path, frames: list[int], marks: list[str]) -> None:
    """Use eight of the 380 frames of a video at 30 frames per second; each mark is the mean of two frames' times."""
    write_jpeg(folder / "a.jpg")
    row = {"question": "?", "answer": "a", "video": ["a.jpg"] * 8, "timestamps": [number / 30 for number in frames]}
    assert list_marks(qwen3_vl, qwen3_vl.encode(read_sample(folder, row))) == marks


@pytest.mark.parametrize(
    ("settings", "marks"),
    [
        # frames 0 12, 24 35, 47 59
        pytest.param({"fps": 1}, ["0.6", "3.0", "5.3"], id="LlamaFactory#10335"),
        # frames 0 20, 39 59
        pytest.param({"nframes": 4}, ["1.0", "4.9"], id="vllm#27104"),
        # frames 0 8, 17 25, 34 42, 51 59
        pytest.param({"nframes": 8}, ["0.4", "2.1", "3.8", "5.5"], id="vllm#35909"),
    ],
)
def test_sampled_frames_keep_their_seconds(
    qwen3_vl: Encoder, clip: str, settings: dict[str, float], marks: list[str]
) -> None:
    encoded = qwen3_vl.encode(Sample("1", [user(video(clip, **settings), "?"), assistant("a")]))
    assert list_marks(qwen3_vl, encoded) == marks
    assert encoded.mm_kwargs["video_grid_thw"][0, 0] == len(marks)


@pytest.mark.parametrize(("fps", "groups"), [(1, 3), (2, 6), (4, 12), (10, 30)])
@reported("LlamaFactory#9620")
def test_configured_rate_decides_frames(qwen3_vl: Encoder, clip: str, folder: Path, fps: float, groups: int) -> None:
    encoded = qwen3_vl.encode(read_sample(folder, {"question": "?", "answer": "a", "video": clip}, fps=fps))
    assert encoded.mm_kwargs["video_grid_thw"][0, 0] == groups
    assert len(list_marks(qwen3_vl, encoded)) == groups
