"""Comparison with the real qwen-vl-utils, on clips that consist only of headers, with processor files of published models."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from PIL import Image

from benchmarks.pixels import (
    CLIPS,
    LIMITED,
    PATCH_SIZES,
    SETTINGS,
    ClipFile,
    ShownPixels,
    compare,
    open_published,
    show_with_qwen,
)
from benchmarks.pixels import patch_decoding as qwen_without_decoding
from dsreason.config.schema_data import DataConfig
from dsreason.data.chat import Encoder
from dsreason.data.sources import open_datasets
from dsreason.data.types import Sample
from dsreason.errors import DataError
from dsreason.media import images, qwen_vl_utils, videos
from dsreason.media.frames import write_frame_list
from dsreason.media.vision import VideoInfo
from tests.unit.media.videos import number_frame, read_number


@pytest.fixture(scope="module")
def utils() -> Iterator[Any]:
    with qwen_without_decoding() as result:
        yield result


@pytest.fixture(scope="module", params=PATCH_SIZES)
def model_type(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def encoder(model_type: str, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Encoder:
    tiny = request.getfixturevalue(f"tiny_{model_type}")
    return open_published(tiny, model_type, tmp_path_factory.mktemp("published") / "model")


def test_pixel_limits_match_published_processor_files(encoder: Encoder, model_type: str) -> None:
    processor = encoder.processor
    sizes = [dict(part.size) for part in (processor.image_processor, processor.video_processor)]
    result = [(size["shortest_edge"], size["longest_edge"]) for size in sizes]
    assert (
        result
        == {
            "qwen2_5_vl": [(4 * 28**2, 16384 * 28**2)] * 2,
            "qwen3_vl": [(64 * 32**2, 16384 * 32**2), (4 * 32**2, 24576 * 32**2)],
        }[model_type]
    )
    assert processor.video_processor.patch_size == PATCH_SIZES[model_type]


def test_clips_match_qwen_vl_utils(encoder: Encoder, utils: Any, model_type: str) -> None:
    result = [compare(encoder, utils, *item, PATCH_SIZES[model_type]) for item in product(CLIPS, SETTINGS + LIMITED)]
    assert [item.text for item in result if not item.same] == []
    assert len(result) == 12 * 16
    assert sum(item.refused for item in result) == 12 * {"qwen2_5_vl": 2, "qwen3_vl": 3}[model_type]


def test_given_frame_sizes_match_qwen_vl_utils(encoder: Encoder, utils: Any, model_type: str) -> None:
    settings = {"resized_height": 275, "resized_width": 430, "max_pixels": 81_920, "fps": 1}
    result = [compare(encoder, utils, clip, settings, PATCH_SIZES[model_type]) for clip in CLIPS]
    assert [item.text for item in result if not item.same] == []


@pytest.mark.parametrize("settings", [{}, {"fps": 1, "total_pixels": 3_774_873}, {"nframes": 6, "max_pixels": 200_000}])
def test_data_set_settings_match_cosmos_rl(
    encoder: Encoder, utils: Any, model_type: str, settings: dict[str, float], tmp_path: Path
) -> None:
    clip = CLIPS[3]
    (tmp_path / "clip.mp4").touch()
    row = {"id": "1", "video": "clip.mp4", "question": "What happens?", "answer": "Nothing."}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    dataset, _ = open_datasets(DataConfig(adapter="jsonl", path=str(tmp_path / "rows.jsonl"), vision=settings))
    info = VideoInfo(*clip, duration=clip.num_frames / clip.fps)
    with patch.object(videos, "probe_video", return_value=info):
        (planned,) = encoder.plan_media(dataset[0])
        tokens = encoder.measure(dataset[0])
    expected = show_with_qwen(utils, clip, settings, PATCH_SIZES[model_type])
    assert isinstance(expected, ShownPixels)
    assert (list(planned.indices), planned.size) == (expected.indices, expected.size)
    assert tokens == len(cosmos_rl_ids(encoder, utils, clip, dataset[0], settings))


def cosmos_rl_ids(
    encoder: Encoder, utils: Any, clip: ClipFile, sample: Sample, settings: dict[str, float]
) -> list[int]:
    """Return the token ids as cosmos-rl's data packers make them.

    The packers pass the frames of qwen-vl-utils through the processor, which resizes Qwen2.5-VL's frames again.
    """
    patch_size = encoder.processor.video_processor.patch_size
    part = {"type": "video", "video": clip.path, **settings}
    frames, metadata = utils.fetch_video(part, image_patch_size=patch_size, return_video_metadata=True)
    question, answer = sample.messages
    question = {**question, "content": [{"type": item["type"]} | part_text(item) for item in question["content"]]}
    text = encoder.processor.apply_chat_template([question, answer], tokenize=False)
    inputs = encoder.processor(
        text=[text],
        videos=[torch.zeros(frames.shape)],
        video_metadata=[metadata],
        do_sample_frames=False,
        do_resize=patch_size == 14,
        cap_pixels_per_frame=False,
    )
    return inputs["input_ids"][0]


def part_text(part: dict[str, Any]) -> dict[str, str]:
    return {"text": part["text"]} if part["type"] == "text" else {}


IMAGE_SIZES = [(480, 640), (100, 60), (30, 20), (333, 1000), (4800, 3600)]
IMAGE_SETTINGS: list[dict[str, float]] = [
    {},
    {"max_pixels": 81_920},
    {"min_pixels": 300_000},
    {"resized_height": 275, "resized_width": 430, "max_pixels": 81_920},
]


def test_image_sizes_match_qwen_vl_utils(encoder: Encoder, utils: Any, model_type: str) -> None:
    for (height, width), settings in product(IMAGE_SIZES, IMAGE_SETTINGS):
        part = {"type": "image", "image": "a.png", **settings}
        with patch.object(images, "probe_image", return_value=(height, width)):
            (planned,) = encoder.plan_media(Sample("image", [{"role": "user", "content": [part]}]))
        image = Image.new("RGB", (width, height))
        with patch.object(Image.Image, "resize", lambda self, size: Image.new("1", size)):
            expected = utils.fetch_image({**part, "image": image}, image_patch_size=PATCH_SIZES[model_type])
        assert planned.size == (expected.height, expected.width), (height, width, settings)


@pytest.mark.parametrize("count", [1, 4, 7])
def test_given_frames_match_qwen_vl_utils(
    encoder: Encoder, utils: Any, model_type: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sides are multiples of 56 and 64, so that qwen-vl-utils does not resize each frame twice."""
    monkeypatch.setenv("COSMOS_CACHE", str(tmp_path / "cache"))
    height, width = 9 * 64 * 7 // 8, 16 * 64 * 7 // 8
    paths = [str(tmp_path / f"{number}.png") for number in range(count)]
    for number, path in enumerate(paths):
        Image.fromarray(number_frame(number, height, width)).save(path)
    part = {"type": "video", "video": paths, "sample_fps": 4.0}
    expected, metadata = utils.fetch_video(part, PATCH_SIZES[model_type], return_video_metadata=True)
    video = {"type": "video", "video": str(write_frame_list(paths, {"fps": 4.0}))}
    prompt = encoder.encode_prompt(Sample("frames", [{"role": "user", "content": [video]}]))
    [(frames, own_metadata)] = prompt.media
    assert frames.shape[1:3] == expected.shape[-2:]
    assert [read_number(frame) for frame in frames] == [*range(count), *[count - 1] * (count % 2)]
    assert np.abs(frames - expected.permute(0, 2, 3, 1).numpy()).max() <= 1  # qwen-vl-utils rounds later
    assert (own_metadata["fps"], own_metadata["total_num_frames"]) == (metadata["fps"], metadata["total_num_frames"])


@pytest.mark.parametrize("settings", [{}, {"max_pixels": 150_000}, {"min_pixels": 300_000}, {"total_pixels": 400_000}])
@pytest.mark.parametrize(("height", "width"), [(480, 640), (100, 60), (333, 1000), (1080, 1920)])
def test_given_frames_are_predicted_without_qwen_vl_utils(
    utils: Any, model_type: str, height: int, width: int, settings: dict[str, Any]
) -> None:
    patch_size = PATCH_SIZES[model_type]
    image = Image.new("RGB", (width, height))
    part = {"type": "video", "video": [image] * 5, **settings}
    expected = utils.fetch_video(part, patch_size)
    info = VideoInfo(5, 2.0, height, width, 2.5, is_frames=True)
    shown = qwen_vl_utils.fit_video(info, settings, 2 * patch_size)
    assert (len(shown.indices), shown.height, shown.width) == (6, *expected.shape[-2:])


# ---------------------------------------------------------------- our account of it, for `data inspect`

MORE_SETTINGS: list[dict[str, float]] = [
    {"video_start": 0.5},
    {"video_end": 0.7},
    {"video_start": 0.1, "video_end": 0.9, "nframes": 4},
    {"video_start": 0.3, "video_end": 0.3},
    {"video_end": 1000},
    {"nframes": 1},
    {"nframes": 31},
    {"nframes": 5},
    {"max_frames": 1},
    {"max_frames": 2},
    {"min_frames": 1000},
]


def test_clips_are_predicted_without_qwen_vl_utils(utils: Any, model_type: str) -> None:
    patch_size = PATCH_SIZES[model_type]
    for clip, settings in product(CLIPS, SETTINGS + MORE_SETTINGS):
        if (expected := show_with_qwen(utils, clip, settings, patch_size)) != told(clip, settings, patch_size):
            assert isinstance(expected, str), (clip.path, settings)
            if "max_pixels" not in settings:  # with it, `told` follows version 0.0.11, which does not refuse
                assert told(clip, settings, patch_size) is None, (clip.path, settings)


def told(clip: ClipFile, settings: dict[str, float], patch_size: int) -> ShownPixels | None:
    info = VideoInfo(*clip, duration=clip.num_frames / clip.fps)
    try:
        video = qwen_vl_utils.fit_video(info, settings, 2 * patch_size)
    except DataError:
        return None
    return ShownPixels(list(video.indices), (video.height, video.width), video.tokens)


@pytest.mark.parametrize(
    ("height", "width", "settings", "expected"),
    [
        # 0.0.11: 320x240 is 9 x 11 tokens: below 81,920 pixels, but also below 128 tokens, so the size grows by 1.143
        (240, 320, {"max_pixels": 81_920}, (280, 392)),
        (1080, 1920, {"max_pixels": 81_920}, (196, 364)),
    ],
)
def test_max_pixels_follows_version_0_0_11(
    height: int, width: int, settings: dict[str, float], expected: tuple[int, int]
) -> None:
    video = qwen_vl_utils.fit_video(VideoInfo(40, 10.0, height, width, 4.0), settings, 28)
    assert (video.height, video.width) == expected


def test_images_are_predicted_without_qwen_vl_utils() -> None:
    assert qwen_vl_utils.fit_image(30, 20, {}, 28) == qwen_vl_utils.Shown(84, 56, 6)  # 3136 pixels at least: x 2.286
    assert qwen_vl_utils.fit_image(1080, 1920, {"max_pixels": 81_920}, 32) == qwen_vl_utils.Shown(192, 352, 66)
    with pytest.raises(DataError, match="rejects the aspect ratio 300"):
        qwen_vl_utils.fit_image(10, 3000, {}, 28)
