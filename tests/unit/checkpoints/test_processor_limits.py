"""Processor files of an export, with which AutoProcessor resizes media as in training, as far as the files can express it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoProcessor
from transformers.video_utils import VideoMetadata

from benchmarks.pixels import open_published
from dsreason.checkpoints.export import find_limits
from dsreason.checkpoints.processor_limits import ProcessorLimits, write_limits
from dsreason.checkpoints.trained_vision import TrainedVision
from dsreason.data.chat import Encoder
from dsreason.data.types import Sample
from dsreason.models.processors.loading import open_encoder
from tests.unit.media.videos import write_video

IMAGE_SIZE, CLIP_SIZE, NUM_FRAMES, RATE = (900, 700), (480, 640), 40, 10
SETTINGS: list[dict[str, float]] = [
    {},
    {"fps": 5.0, "min_frames": 5, "max_frames": 9},
    {"nframes": 7},
    {"fps": 2.0, "max_pixels": 256 * 32**2},
    {"fps": 2.0, "total_pixels": 8 * 128 * 32**2},
    {"fps": 2.0, "max_pixels": 64 * 32**2},
]


Model = tuple[Path, Encoder]


@pytest.fixture(scope="module", params=("published", "tiny"))
def model(request: pytest.FixtureRequest, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """A tiny model with its own processor files, or with those of a published model of its family."""
    if request.param == "tiny":
        return tiny, open_trained(tiny)
    folder = tmp_path_factory.mktemp("published") / "model"
    return folder, open_published(tiny, tiny.name, folder)


@pytest.fixture(scope="module")
def media(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("media")
    Image.new("RGB", IMAGE_SIZE).save(folder / "i.png")
    frames = np.zeros((NUM_FRAMES, *CLIP_SIZE, 3), np.uint8)
    write_video(folder / "v.mp4", NUM_FRAMES, frames=frames, rate=RATE)
    return folder


def open_trained(folder: Path) -> Encoder:
    return open_encoder(folder, dtype=torch.float32, max_length=10**6, max_length_key="")


def limits_of(folder: Path, settings: dict[str, float]) -> ProcessorLimits:
    limits = find_limits(folder, TrainedVision(settings), None)
    assert limits is not None
    return limits


def export(folder: Path, settings: dict[str, float], output: Path) -> Path:
    shutil.copytree(folder, output)
    write_limits(output, limits_of(folder, settings))
    return output


def plan_as_training(encoder: Encoder, settings: dict[str, float], media: Path) -> list[list[int]]:
    bounds = {key: value for key, value in settings.items() if key in ("min_pixels", "max_pixels")}
    parts: list[dict[str, Any]] = [
        {"type": "image", "image": str(media / "i.png"), **bounds},
        {"type": "video", "video": str(media / "v.mp4"), **settings},
    ]
    return [list(plan.grid) for plan in encoder.plan_media(Sample("1", [{"role": "user", "content": parts}]))]


def process_with_transformers(folder: Path) -> list[list[int]]:
    processor = AutoProcessor.from_pretrained(folder)
    image = processor.image_processor(Image.new("RGB", IMAGE_SIZE), return_tensors="pt")
    metadata = VideoMetadata(total_num_frames=NUM_FRAMES, fps=float(RATE), duration=NUM_FRAMES / RATE)
    clip = torch.zeros((NUM_FRAMES, 3, *CLIP_SIZE), dtype=torch.uint8)
    video = processor.video_processor([clip], video_metadata=[metadata], do_sample_frames=True, return_tensors="pt")
    return [image["image_grid_thw"][0].tolist(), video["video_grid_thw"][0].tolist()]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: ",".join(settings) or "defaults")
def test_exported_processor_gives_grids_of_training(
    model: Model, settings: dict[str, float], media: Path, tmp_path: Path
) -> None:
    folder, encoder = model
    output = export(folder, settings, tmp_path / "export")
    assert process_with_transformers(output) == plan_as_training(encoder, settings, media)


def test_export_is_read_with_the_same_grids(model: Model, media: Path, tmp_path: Path) -> None:
    folder, encoder = model
    settings = {"fps": 2.0, "max_pixels": 64 * 32**2}
    exported = open_trained(export(folder, settings, tmp_path / "export"))
    assert plan_as_training(exported, settings, media) == plan_as_training(encoder, settings, media)


@pytest.mark.parametrize(
    ("family", "settings", "video"),
    [
        # 120,000 / 784 / 0.9 = 170.07 tokens; rounded up, 171 tokens are 171 * 784 * 0.9 = 120,657 pixels.
        (
            "qwen2_5_vl",
            {"fps": 1.0, "max_pixels": 81920, "min_pixels": 784, "total_pixels": 120_000},
            {
                "size": {"shortest_edge": 784, "longest_edge": 81920},
                "cap_pixels_per_frame": True,
                "max_video_tokens": 171,
                "fps": 1.0,
                "min_frames": 4,
                "max_frames": 768,
            },
        ),
        # Both limits equal those of training: 81,920 pixels are 80 tokens, and frames count twice in the total.
        (
            "qwen3_vl",
            {"nframes": 7, "max_pixels": 81920, "total_pixels": 2_000_000},
            {
                "size": {"shortest_edge": 4096, "longest_edge": 4_000_000},
                "cap_pixels_per_frame": True,
                "max_video_tokens": 80,
                "fps": 2.0,
                "min_frames": 8,
                "max_frames": 8,
            },
        ),
    ],
)
def test_video_limits_have_the_meaning_of_training(
    family: str, settings: dict[str, float], video: dict[str, Any], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    open_published(request.getfixturevalue(f"tiny_{family}"), family, folder)
    limits = limits_of(folder, settings)
    assert limits.video == video
    high = {"longest_edge": 81920}
    assert limits.image["size"] == high | {
        "shortest_edge": settings.get("min_pixels", 4 * (784 if "2_5" in family else 1024))
    }
    write_limits(folder, limits)
    files = [
        json.loads((folder / name).read_text())
        for name in ("preprocessor_config.json", "video_preprocessor_config.json")
    ]
    assert [file["size"] for file in files] == [limits.image["size"], video["size"]]
    assert files[0].get("max_pixels", 81920) == 81920


def test_model_card_names_what_is_not_expressed(tiny_qwen3_vl: Path, tmp_path: Path) -> None:
    open_published(tiny_qwen3_vl, "qwen3_vl", tmp_path / "model")
    trained = TrainedVision({"fps": 1.0, "max_pixels": 200_000}, ["other.jsonl"])
    limits = find_limits(tmp_path / "model", trained, None)
    assert limits is not None
    rows = limits.describe()
    assert rows["vision settings"] == "`fps = 1, max_pixels = 200000`"
    assert rows["other vision settings"] == "were used for other.jsonl"
    missing = rows["not in the processor files"]
    # The published processor allows 25,165,824 pixels in all frames of a video, half as many if two frames count once.
    assert "at most 117964800 pixels per video (two frames count once), not 12582912" in missing
    assert "at least 131072 pixels per frame" in missing
    assert "at most 200000 pixels per frame, which are rounded down to whole tokens" in missing
    server = {"video_backend": "qwen3_vl", "num_frames": -1, "fps": 1.0, "min_frames": 4, "max_frames": 768}
    assert rows["frames in vLLM"] == f"`--media-io-kwargs '{json.dumps({'video': server})}'`"
