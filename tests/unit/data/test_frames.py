"""Rows whose videos are lists of frames: their columns, tokens and times for both families."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoConfig, AutoProcessor

from dsreason.config.schema_data import DataConfig, VisionConfig
from dsreason.data import messages
from dsreason.data.chat import Encoder
from dsreason.data.media_plan import describe_video
from dsreason.data.sources import DataSource, finish_part, open_source
from dsreason.data.types import Sample
from dsreason.errors import DataError
from dsreason.families import get_family
from dsreason.media.frames import read_frame_list
from dsreason.media.vision import FrameChoice, VideoInfo
from dsreason.models.mrope import compute_position_ids
from dsreason.rollout.vllm_requests import compute_digest
from dsreason.tools.datasets.show import describe_medium, iter_json
from tests.unit.media.videos import number_frame, read_number


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data folder with the frames `pour/0.png` to `pour/5.png`, each of which shows its number."""
    monkeypatch.setenv("COSMOS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "data" / "pour").mkdir(parents=True)
    for number in range(6):
        Image.fromarray(number_frame(number, 56, 112)).save(tmp_path / "data" / "pour" / f"{number}.png")
    return tmp_path / "data"


def open_row(folder: Path, config: dict[str, Any] | None = None, **columns: Any) -> DataSource:
    row = {"id": "r", "question": "What moves?", "answer": "a box", **columns}
    (folder / "rows.jsonl").write_text(json.dumps(row))
    settings = {"adapter": "auto", "path": str(folder / "rows.jsonl"), **(config or {})}
    return open_source(DataConfig.model_validate(settings).list_sources()[0])


def read_part(source: DataSource) -> dict[str, Any]:
    return source.sample(0).messages[0]["content"][0]


def list_numbers(source: DataSource) -> list[int]:
    return [int(Path(path).stem) for path in read_frame_list(read_part(source)["video"]).paths]


# ---------------------------------------------------------------- rows


@pytest.mark.parametrize(
    ("video", "numbers"),
    [
        (["pour/3.png", "pour/1.png"], [3, 1]),
        ("pour", range(6)),
        ("pour/*.png", range(6)),
        ("pour/[24].png", [2, 4]),
    ],
)
def test_frame_columns_become_one_video_part(folder, video, numbers):
    source = open_row(folder, video=video, fps=2)
    assert list_numbers(source) == list(numbers)
    assert all(Path(path).is_absolute() for path in read_frame_list(read_part(source)["video"]).paths)


def test_embedded_frames_are_kept_in_the_cache(folder):
    embedded = [{"bytes": (folder / "pour" / f"{number}.png").read_bytes(), "path": None} for number in (4, 2)]
    part = finish_part({"type": "video", "video": embedded, "fps": 2}, VisionConfig(), folder)
    frames = read_frame_list(part["video"])
    assert [read_number(np.asarray(Image.open(path))) for path in frames.paths] == [4, 2]


def test_frame_rate_is_separate_from_sampling_rate(folder):
    source = open_row(folder, {"vision": {"fps": 1, "max_pixels": 5000}}, video="pour", fps=2)
    part = read_part(source)
    assert part == {"type": "video", "video": part["video"], "fps": 1.0, "max_pixels": 5000}
    assert read_frame_list(part["video"]).fps == 2
    assert "fps" not in read_part(open_row(folder, video="pour", fps=2))


def test_video_part_keeps_its_sampling_settings(folder):
    content = [{"type": "video", "video": "pour", "timestamps": [0, 1, 2, 3, 4, 9], "nframes": 4}]
    source = open_row(
        folder, {"vision": {"fps": 1}}, question=None, messages=[{"role": "user", "content": [*content, "?"]}]
    )
    part = read_part(source)
    assert part == {"type": "video", "video": part["video"], "nframes": 4}
    assert read_frame_list(part["video"]).timestamps == (0, 1, 2, 3, 4, 9)


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"video": "pour"}, "6 frames, and their times are missing"),
        ({"video": "pour", "fps": 2, "timestamps": [0, 1]}, "given twice"),
        ({"video": "pour", "timestamps": [0, 1]}, "2 timestamps for 6 frames"),
        ({"video": ["pour/1.png", "pour/7.png"], "fps": 2}, r"row 1 \(sample 'r'\): video: no such file: .*pour/7\.png"),
        ({"video": "pour/*.jpg", "fps": 2}, r"row 1 \(sample 'r'\): video: no such file: .*pour/\*\.jpg"),
        ({"video": ["pour/1.png", "../secret.png"], "fps": 2}, r"frame: \.\./secret\.png points outside"),
        ({"video": "../*.png", "fps": 2}, r"\.\./\*\.png points outside"),
        ({"video": ["ftp://host/1.png", "ftp://host/2.png"], "fps": 2}, "is a URL"),
        ({"video": "gone", "fps": 2}, "no such file: .*gone"),
    ],
)  # fmt: skip
def test_unusable_frames_are_refused(folder, columns, words):
    with pytest.raises(DataError, match=words):
        open_row(folder, **columns).sample(0)


def test_timestamps_for_video_file_are_rejected(folder):
    content = [{"type": "video", "video": "v.mp4", "timestamps": [0, 1]}]
    source = open_row(folder, question=None, messages=[{"role": "user", "content": content}])
    with pytest.raises(DataError, match=r"timestamps are for videos given as frames, but .*v\.mp4 is neither"):
        source.sample(0)


@pytest.mark.parametrize("form", ["list", "folder", "pattern"])
def test_absolute_frame_paths_follow_media_path_rules(folder, tmp_path, form):
    (tmp_path / "private").mkdir()
    Image.new("RGB", (28, 28)).save(tmp_path / "private" / "0.png")
    private = tmp_path / "private"
    video = {"list": [str(private / "0.png")], "folder": str(private), "pattern": f"{private}/*.png"}[form]
    assert list_numbers(open_row(folder, video=video, fps=1)) == [0]
    with pytest.raises(DataError, match=r"private/0\.png is outside"):
        open_row(folder, {"media_path": str(folder)}, video=video, fps=1).sample(0)


@pytest.mark.parametrize(
    ("times", "shown"),
    [
        ({"fps": 2}, {"fps": 2}),
        ({"timestamps": [0, 0.5, 1, 1.5, 2, 2.5]}, {"fps": 2}),
        ({"timestamps": [0, 1, 2, 3, 4, 10]}, {"fps": 0.5, "timestamps": [0, 1, 2, 3, 4, 10]}),
    ],
)
def test_data_show_prints_frame_lists_as_json(folder, times, shown):
    source = open_row(folder, video="pour", **times)
    [row] = iter_json(source, range(1), "sft")
    expected = {"type": "video", "frames": [f"pour/{number}.png" for number in range(6)], **shown}
    assert row["messages"][0]["parts"][0] == expected
    times = ", from 0 to 10 s" if "timestamps" in shown else ""
    assert describe_medium(read_part(source), source) == (
        f"video pour/0.png … 5.png (112x56, 6 frames, {shown['fps']} per second{times})"
    )


def test_frames_at_urls_are_fetched(folder, monkeypatch):
    monkeypatch.setattr(messages, "fetch_url", lambda url, allow_private: folder / "pour" / url.rpartition("/")[2])
    source = open_row(folder, video=["https://host/5.png", "pour/1.png", "https://host/3.png"], timestamps=[0, 1, 3])
    assert list_numbers(source) == [5, 1, 3]
    assert read_frame_list(read_part(source)["video"]).timestamps == (0, 1, 3)
    with pytest.raises(DataError, match=r"https://host/5\.png is outside"):
        open_row(folder, {"media_path": str(folder)}, video=["https://host/5.png"], fps=1).sample(0)


# ---------------------------------------------------------------- tokens and times


@pytest.fixture(scope="module")
def encoder(tiny_of_each_architecture: Path) -> Encoder:
    tiny = tiny_of_each_architecture
    config = AutoConfig.from_pretrained(tiny)
    family = get_family(config.model_type)
    positions = partial(compute_position_ids, family.grids, config=config)
    return Encoder(AutoProcessor.from_pretrained(tiny), family, positions, max_length=4096)


TIMES = [
    # 0 and 0.5 s, 1 and 1.5 s, 2 and 2.5 s; frame groups are 2 x 0.5 s apart
    ({"fps": 2}, {}, [0, 1, 2, 3, 4, 5], ["0.2", "1.2", "2.2"], 1.0),
    ({"fps": 0.1}, {}, [0, 1, 2, 3, 4, 5], ["5.0", "25.0", "45.0"], 20.0),
    # (10 + 10.4) / 2, (12 + 17) / 2, (17.1 + 20) / 2; the mean spacing is 2 s
    ({"timestamps": [10, 10.4, 12, 17, 17.1, 20]}, {}, [0, 1, 2, 3, 4, 5], ["10.2", "14.5", "18.6"], 4.0),
    # at 0, 3.33, 6.67 and 10 s; the nearest are 0, 3, 6 and 10 s, so that the mean spacing is 3.33 s
    ({"timestamps": [0, 1, 3, 5, 6, 10]}, {"nframes": 4}, [0, 2, 4, 5], ["1.5", "8.0"], 20 / 3),
    # an odd number: the last frame is repeated, and its group is at its own time
    ({"timestamps": [0, 1, 3, 5, 6, 10]}, {"video_end": 7}, [0, 1, 2, 3, 4, 4], ["0.5", "4.0", "6.0"], 3.0),
    ({"fps": 2}, {"video_end": 2}, [0, 1, 2, 3, 4, 4], ["0.2", "1.2", "2.0"], 1.0),
]  # fmt: skip


def list_times(times: dict) -> list[float]:
    return times.get("timestamps") or [i / times["fps"] for i in range(6)]


@pytest.mark.parametrize(("times", "vision", "numbers", "marks", "seconds"), TIMES)
def test_models_receive_actual_frame_times(encoder, folder, times, vision, numbers, marks, seconds):
    sample = open_row(folder, {"vision": vision}, video="pour", **times).sample(0)
    encoded, [(frames, metadata)] = encoder.encode(sample), encoder.encode_prompt(sample).media
    if encoder.family.model_type == "cosmos3_edge":  # frames are not grouped, so none is repeated
        numbers = list(dict.fromkeys(numbers))
        marks = [f"{list_times(times)[number]:.1f}" for number in numbers]
    assert [read_number(frame) for frame in frames] == numbers
    assert encoder.measure(sample) == len(encoded)
    if encoder.family.model_type != "qwen2_5_vl":
        tokens = encoder.processor.tokenizer.decode(encoded.input_ids)
        assert [piece.split("<")[-1] for piece in tokens.split(" seconds>")[:-1]] == marks
    else:
        assert encoded.mm_kwargs["second_per_grid_ts"].tolist() == pytest.approx([seconds], abs=1e-3)
    assert all(isinstance(index, int) for index in (metadata["total_num_frames"], *metadata["frames_indices"]))


@pytest.mark.parametrize(("times", "vision", "numbers", "marks", "seconds"), TIMES)
def test_frame_token_ids_match_the_processor(encoder, folder, times, vision, numbers, marks, seconds):
    """Compare with the processor's token ids for the same frames and for times computed in this test."""
    sample = open_row(folder, {"vision": vision}, video="pour", **times).sample(0)
    encoded, [(frames, _)] = encoder.encode(sample), encoder.encode_prompt(sample).media
    if encoder.family.model_type == "cosmos3_edge":
        numbers = list(dict.fromkeys(numbers))
    shown = [list_times(times)[number] for number in numbers]
    total = len(numbers) * 1000 * seconds / 2
    metadata = {"fps": 1000.0, "frames_indices": [1000 * second for second in shown], "total_num_frames": total}
    messages = [
        {"role": "user", "content": [{"type": "video"}, {"type": "text", "text": "What moves?"}]},
        {"role": "assistant", "content": "a box"},
    ]
    text = encoder.processor.apply_chat_template(messages, tokenize=False)
    inputs = encoder.processor(
        text=[text],
        videos=[frames],
        video_metadata=[metadata],
        do_sample_frames=False,
        do_resize=False,
        return_metadata=True,
        return_tensors="pt",
    )
    assert inputs["input_ids"][0].tolist() == encoded.input_ids.tolist()
    assert torch.equal(inputs["pixel_values_videos"], encoded.mm_kwargs["pixel_values_videos"])
    if "second_per_grid_ts" in inputs:
        expected = torch.as_tensor(inputs["second_per_grid_ts"])
        assert torch.allclose(expected.float(), encoded.mm_kwargs["second_per_grid_ts"], atol=1e-3)


def test_video_digest_depends_on_frame_times(encoder, folder):
    media = [
        encoder.encode_prompt(open_row(folder, video="pour", timestamps=[0, 1, 2, 3, 4, last]).sample(0)).media[0]
        for last in (6, 6, 7)
    ]
    digests = [compute_digest(medium) for medium in media]
    assert digests[0] == digests[1] != digests[2]


def test_frame_errors_name_the_affected_frames(encoder, folder):
    sample = open_row(folder, {"vision": {"nframes": 8}}, video="pour", fps=2).sample(0)
    with pytest.raises(DataError, match=r"pour/0\.png … 5\.png: nframes is 8, but the video .* has only 6 frames"):
        encoder.encode(sample)


def test_frame_list_is_encoded_like_video_file(encoder, folder):
    """Sampled frames have the times that a video file with the same frame rate would get."""
    sample = open_row(folder, {"vision": {"nframes": 4}}, video="pour", fps=2).sample(0)
    [(_, metadata)] = encoder.encode_prompt(sample).media
    assert metadata == describe_video(VideoInfo(6, 2.0, 56, 112, 3.0), FrameChoice((0, 2, 3, 5), 6))


def test_text_model_refuses_frames(encoder, folder):
    sample: Sample = open_row(folder, video="pour", fps=2).sample(0)
    text_only = replace(encoder, family=get_family("qwen3"))
    with pytest.raises(DataError, match=r"contains .*pour/0\.png … 5\.png, but Qwen3 accepts only text"):
        text_only.encode(sample)
