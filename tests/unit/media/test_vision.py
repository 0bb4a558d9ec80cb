import math
import subprocess
import sys

import pytest

from dsreason.errors import DataError
from dsreason.families import FAMILIES
from dsreason.media import vision
from dsreason.media.vision import (
    PixelLimits,
    VideoInfo,
    compute_image_size,
    compute_video_size,
    fit_size,
    sample_frames,
)

QWEN2_5_VISION, QWEN3_VISION = FAMILIES["qwen2_5_vl"].vision, FAMILIES["qwen3_vl"].vision
QWEN2_5 = PixelLimits(factor=28, min_pixels=128 * 784, max_pixels=768 * 784)
QWEN3 = PixelLimits(factor=32, min_pixels=4 * 1024, max_pixels=24576 * 1024)


def video(num_frames: int, rate: float, **fields) -> VideoInfo:
    return VideoInfo(num_frames, rate, 28, 28, num_frames / rate, **fields)


def frames(num_frames: int, rate: float, **part) -> list[int]:
    return list(sample_frames(video(num_frames, rate), part, QWEN2_5_VISION).indices)


def test_vision_module_does_not_import_torch():
    code = "import sys, dsreason.media.vision; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("num_frames", "rate", "part", "expected"),
    [
        (100, 10, {}, 20),  # 10 s x default 2 fps
        (100, 10, {"fps": 1}, 10),
        (100, 10, {"fps": 0.5}, 4),  # 5, floored to 4
        (100, 10, {"fps": 0.1}, 4),  # 1, but at least 4
        (100, 10, {"fps": 0.1, "min_frames": 7}, 8),  # 7 rounded up to even
        (100, 10, {"fps": 0.1, "min_frames": 2}, 2),
        (100, 10, {"fps": 30}, 100),  # no more than the video has
        (100, 10, {"max_frames": 9}, 8),
        (3, 10, {}, 2),  # fewer than 4 frames: rounded down to even
        (9, 3, {"fps": 2}, 6),
        (20000, 10, {}, 768),
        (100, 10, {"nframes": 8}, 8),
        (100, 10, {"nframes": 7}, 8),  # 3.5 pairs round to 4
        (100, 10, {"nframes": 5}, 4),  # 2.5 pairs round to 2 (half to even, as in qwen-vl-utils)
        (100, 10, {"nframes": 1}, 2),
        (7, 10, {"nframes": 7}, 6),  # 8 would be more than the video has
    ],
)
def test_number_of_sampled_frames_follows_settings(num_frames, rate, part, expected):
    assert len(frames(num_frames, rate, **part)) == expected


def test_sampled_frames_are_even_and_include_ends():
    assert frames(10, 4, nframes=4) == [0, 3, 6, 9]
    assert frames(100, 10, nframes=4) == [0, 33, 66, 99]


def test_single_frame_is_repeated_to_fill_patch():
    assert frames(1, 10) == [0, 0]


def test_video_start_and_end_limit_sampling():
    frames = sample_frames(video(100, 10.0), {"fps": 2, "video_start": 2.0, "video_end": 5.0}, QWEN2_5_VISION)
    assert frames.indices[0] == 20 and frames.indices[-1] == 50
    assert frames.range_frames == 31 and len(frames.indices) == 6


def test_video_end_is_clamped_to_the_video():
    assert frames(100, 10, nframes=2, video_start=9, video_end=60) == [90, 99]


@pytest.mark.parametrize("fps", [10, 29.97, 30, 24000 / 1001])
def test_time_on_frame_boundary_selects_that_frame(fps):
    for number in range(1, 90):
        assert frames(100, fps, nframes=2, video_start=number / fps, video_end=99 / fps)[0] == number


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"fps": 1, "nframes": 4}, r"fps \(1\) and nframes \(4\)"),
        ({"nframes": 101}, r"nframes is 101.* has only 100 frames"),
        ({"nframes": 12, "video_start": 9.0}, r"nframes is 12.* has only 10 frames"),
        ({"video_start": 5.0, "video_end": 4.0}, r"video_start \(5.0 s\).*video_end \(4.0 s\)"),
        ({"video_start": 5.0, "video_end": 5.0}, r"video_start \(5.0 s\).*video_end \(5.0 s\)"),
        ({"video_start": 10.0}, r"video_start \(10.0 s\) must be before the end of the video \(10 s\)"),
        ({"video_start": 5.01, "video_end": 5.09}, r"no frame lies between"),
        ({"fps": 0}, r"fps must be greater than 0 .*; got 0"),
        ({"fps": "2"}, r"fps must be a number; got '2'"),
        ({"nframes": -2}, r"nframes must be greater than 0 .*; got -2"),
        ({"min_frames": 8, "max_frames": 4}, r"min_frames \(8\) is greater than max_frames \(4\)"),
    ],
)
def test_impossible_settings_error_names_both_numbers(part, message):
    with pytest.raises(DataError, match=message):
        frames(100, 10.0, **part)


@pytest.mark.parametrize(
    "value", [1e308, 10**400, 1e16, math.inf, math.nan, -(10**400)], ids=lambda value: str(value)[:6]
)
@pytest.mark.parametrize("key", sorted(vision.PART_SETTINGS))
def test_excessive_vision_settings_are_rejected_with_limit(key, value):
    most = 150_000_000 if key == "min_pixels" else 10**15
    for use in (
        lambda part: sample_frames(video(100, 10.0), part, QWEN2_5_VISION),
        lambda part: compute_image_size(100, 100, part, QWEN2_5),
        lambda part: compute_video_size(100, 100, 8, part, QWEN3, QWEN3_VISION),
    ):
        with pytest.raises(DataError, match=rf"^{key} must be .*0 .*at most {most}; got \S{{1,100}}$"):
            use({key: value})


@pytest.mark.parametrize("key", ["resized_height", "resized_width"])
def test_resized_height_requires_resized_width(key):
    with pytest.raises(DataError, match=rf"^{key} \(100\) needs resized_\w+; add it, or remove {key}$"):
        compute_image_size(100, 100, {key: 100}, QWEN2_5)


@pytest.mark.parametrize("key", sorted(vision.PART_SETTINGS - {"resized_height", "resized_width"}))
def test_extreme_setting_values_are_accepted(key):
    most = 150_000_000 if key == "min_pixels" else 10**15
    for value in (5e-324, most, float(most)):
        used = [
            lambda part: compute_image_size(100, 100, part, QWEN2_5),
            lambda part: compute_video_size(100, 100, 8, part, QWEN3, QWEN3_VISION),
        ]
        if key not in ("nframes", "video_start", "video_end"):  # a range with such limits may contain no frame
            used.append(lambda part: sample_frames(video(100, 10.0), part, QWEN2_5_VISION))
        for use in used:
            use({key: value})


@pytest.mark.parametrize(
    ("height", "width", "factor", "low", "high", "expected"),
    [
        (280, 280, 28, 784, 10**6, (280, 280)),
        (100, 210, 28, 784, 10**6, (112, 224)),  # 3.57 cells -> 4, 7.5 -> 8
        (1000, 1000, 28, 784, 28 * 28 * 100, (280, 280)),  # beta 3.571: 280 / 28 = 10
        (10, 10, 28, 28 * 28 * 16, 10**6, (112, 112)),
        (5, 300, 28, 784, 10**6, (28, 308)),
        (4000, 30, 32, 1024, 4096, (736, 32)),  # beta 5.413: 23.09 cells; the short side keeps one cell
    ],
)
def test_resized_size_matches_expected_values(height, width, factor, low, high, expected):
    assert fit_size(height, width, factor=factor, min_pixels=low, max_pixels=high) == expected


def test_extreme_aspect_ratio_is_rejected():
    with pytest.raises(DataError, match="aspect ratio of 2010x10 pixels is 201, but the maximum is 200"):
        fit_size(10, 2010, factor=28, min_pixels=1, max_pixels=10**9)


def test_image_bounds_in_sample_override_the_processor():
    limits = PixelLimits(factor=28, min_pixels=16 * 784, max_pixels=100 * 784)
    assert compute_image_size(1000, 1000, {}, limits) == (280, 280)
    assert compute_image_size(1000, 1000, {"max_pixels": 4 * 784}, limits) == (
        56,
        56,
    )  # below the processor's own minimum
    assert compute_image_size(10, 10, {"min_pixels": 400 * 784}, limits) == (560, 560)  # above its maximum
    assert compute_image_size(10, 10, {}, limits) == (112, 112)


def test_cosmos_reason1_max_pixels_gives_91_tokens():
    height, width = compute_video_size(1080, 1920, 8, {"max_pixels": 81920}, QWEN2_5, QWEN2_5_VISION)
    assert (height, width) == (196, 364) and height * width // 784 == 91 <= 81920 // 784


@pytest.mark.parametrize("num_frames", [8, 40, 76])
def test_total_pixels_bounds_the_vision_tokens(num_frames):
    total = int(4096 * 1024 * 0.9)  # Cosmos-Reason2's default at 4,096 tokens: 3,686
    height, width = compute_video_size(
        720, 1280, num_frames, {"total_pixels": total, "min_pixels": 4096}, QWEN3, QWEN3_VISION
    )
    tokens = num_frames // 2 * height * width // 1024
    assert tokens <= 3686
    assert tokens > 0.7 * min(3686, num_frames // 2 * 768)


@pytest.mark.parametrize(("more", "size"), [({}, (256, 480)), ({"min_pixels": 40_960}, (224, 416))])
def test_total_pixels_yield_to_min_pixels(more, size):
    """Use 75 s at 1 fps, as in docs/data.md: 120 and 91 tokens per two frames."""
    assert compute_video_size(1080, 1920, 74, {"total_pixels": 3_774_873, **more}, QWEN3, QWEN3_VISION) == size


def test_min_pixels_win_over_total_pixels():
    # 784 x 100 pixels for 10 pairs leave 10 cells per frame, but the minimum requires 128 x 1.05
    height, width = compute_video_size(1000, 1000, 20, {"total_pixels": 78400}, QWEN2_5, QWEN2_5_VISION)
    assert (height, width) == (308, 308)  # 11 x 11 = 121 <= 134.4


def test_qwen2_5_video_defaults_apply_per_frame():
    assert compute_video_size(2000, 2000, 8, {}, QWEN2_5, QWEN2_5_VISION) == (756, 756)  # 27 x 27 = 729 <= 768
    assert compute_video_size(100, 100, 8, {}, QWEN2_5, QWEN2_5_VISION) == (336, 336)  # 12 x 12 = 144 >= 128


@pytest.mark.parametrize(
    ("limits", "family"),
    [
        (PixelLimits(28, 4 * 784, 16384 * 784), QWEN2_5_VISION),  # published values; the limits apply to each frame
        (
            PixelLimits(32, 4 * 1024, 24576 * 1024),
            QWEN3_VISION,
        ),  # published values; the limits apply to all frames together
        (PixelLimits(32, 1, 2 * 768 * 1024), QWEN3_VISION),  # exactly two frames of the maximum size fit
    ],
)
def test_limits_wider_than_training_sizes_are_ignored(limits, family):
    side = limits.factor
    assert compute_video_size(10 * side, 10 * side, 8, {}, limits, family) == (12 * side, 12 * side)  # 144 >= 128
    assert compute_video_size(99 * side, 99 * side, 8, {}, limits, family) == (27 * side, 27 * side)  # 729 <= 768
    # 115,200 / 384 pairs = 300 a frame
    assert compute_video_size(99 * side, 99 * side, 768, {}, limits, family) == (17 * side, 17 * side)


def test_qwen3_images_have_at_least_4_tokens():
    pixel_limits = PixelLimits(32, 64 * 1024, 16384 * 1024)  # published
    assert compute_image_size(32, 32, {}, vision.choose_image_limits(pixel_limits, QWEN3_VISION)) == (64, 64)


def test_narrower_limits_of_one_frame_decide():
    pixel_limits = PixelLimits(28, 784, 256 * 784)
    assert vision.choose_image_limits(pixel_limits, QWEN2_5_VISION) == pixel_limits
    assert compute_video_size(280, 280, 8, {}, pixel_limits, QWEN2_5_VISION) == (280, 280)
    assert compute_video_size(2800, 2800, 8, {}, pixel_limits, QWEN2_5_VISION) == (448, 448)  # 16 x 16 = 256


def test_narrower_limits_of_all_frames_decide():
    pixel_limits = PixelLimits(32, 2 * 1024, 768 * 1024)
    assert compute_video_size(320, 320, 4, {}, pixel_limits, QWEN3_VISION) == (320, 320)
    assert compute_video_size(3200, 3200, 4, {}, pixel_limits, QWEN3_VISION) == (
        416,
        416,
    )  # 768 / 4 = 192 a frame: 13 x 13 = 169


@pytest.mark.parametrize(
    ("height", "width", "expected"),
    [
        (240, 320, (252, 308)),  # 99 tokens: fewer than the default minimum of 128, and at most 104
        (56, 56, (56, 56)),
        (1080, 1920, (196, 364)),
    ],
)
def test_max_pixels_below_smallest_frame_enlarges_nothing(height, width, expected):
    assert compute_video_size(height, width, 8, {"max_pixels": 81920}, QWEN2_5, QWEN2_5_VISION) == expected


def test_frames_are_rounded_in_float32_like_torch():
    assert frames(18000, 60)[568] == 17068  # 17067.499…, which in float32 is 17067.5
    assert frames(18000, 60)[567] == 17037 and frames(18000, 60)[-1] == 17999


def test_frame_count_matches_qwen_vl_utils_rounding():
    assert len(frames(2000, 12, fps=0.3)) == 48  # 166.67 s x 0.3 is 49.999… in binary


# ---------------------------------------------------------------- videos given as frames


@pytest.mark.parametrize(
    ("num_frames", "rate", "part", "expected"),
    [
        (4, 10, {}, [0, 1, 2, 3]),  # a video file at the default of 2 frames per second would be sampled with 2 frames
        (5, 0.5, {}, [0, 1, 2, 3, 4, 4]),
        (1, 2, {}, [0, 0]),
        (5, 2, {"max_frames": 6}, [0, 1, 2, 3, 4, 4]),
        (5, 2, {"max_frames": 5}, [0, 1, 3, 4]),
        (9, 2, {"max_frames": 4}, [0, 3, 5, 8]),
        (10, 3, {"fps": 3}, list(range(10))),
        (5, 2, {"fps": 7}, [0, 1, 2, 3, 4, 4]),
        (10, 2, {"fps": 1}, [0, 3, 6, 9]),  # 5 s, so 5 frames, which is rounded to 4
        (10, 2, {"nframes": 2}, [0, 9]),
        (10, 2, {"video_start": 1, "video_end": 2}, [2, 3, 4, 4]),
        (3, 2, {"fps": 0.5, "min_frames": 4}, [0, 1, 2, 2]),
    ],
)
def test_frame_list_sampling_follows_settings(num_frames, rate, part, expected):
    info = video(num_frames, rate, is_frames=True)
    assert list(sample_frames(info, part, QWEN3_VISION).indices) == expected


def test_more_frames_than_default_are_sampled():
    chosen = sample_frames(video(769, 10, is_frames=True), {}, QWEN3_VISION)
    assert len(chosen.indices) == len(set(chosen.indices)) == 768
    assert (chosen.indices[0], chosen.indices[-1]) == (0, 768)


@pytest.mark.parametrize(
    ("timestamps", "part", "expected"),
    [
        ((0, 0.5, 4, 4.5, 5), {}, [0, 1, 2, 3, 4, 4]),
        ((0, 0.1, 0.2, 6, 7, 9), {"nframes": 4}, [0, 2, 3, 5]),  # for 0, 3, 6 and 9 s; 3 s is nearest to 0.2 s
        ((0, 0.1, 0.2, 5.7, 7, 9), {"nframes": 4}, [0, 3, 5, 5]),  # 3 s and 6 s are both nearest to 5.7 s
        ((10, 11, 12, 20), {"video_start": 10.5, "video_end": 20}, [1, 2, 3, 3]),
        ((10, 11, 12, 20), {"fps": 0.2}, [0, 1, 2, 3]),  # 4 frames in 13.3 s would be 2.7, and 4 is the least
        ((0, 1, 2, 3, 4, 5, 6, 14), {"fps": 0.25}, [0, 5, 6, 7]),  # 16 s x 0.25 = 4: 0, 4.7, 9.3 and 14 s
    ],
)
def test_unevenly_spaced_frames_are_sampled_by_time(timestamps, part, expected):
    rate = (len(timestamps) - 1) / (timestamps[-1] - timestamps[0])
    info = video(len(timestamps), rate, is_frames=True, timestamps=timestamps)
    assert list(sample_frames(info, part, QWEN3_VISION).indices) == expected


def test_empty_range_between_frames_is_refused():
    info = video(3, 0.2, is_frames=True, timestamps=(0.0, 1.0, 10.0))
    with pytest.raises(DataError, match=r"no frame lies between .*; the first is at 0 s, the last at 10 s"):
        sample_frames(info, {"video_start": 2, "video_end": 9}, QWEN3_VISION)
