"""Comparison of clips' frame numbers, sizes and tokens in dsreason and in qwen-vl-utils, called as in cosmos-rl.

    python benchmarks/pixels.py [--all]

The comparison covers both families, with the processor files of published checkpoints (`tests/published/`), clips from 1 s to
5 min and from 240p to 4K, and settings from none to those in the recipes of cosmos-reason1 and the cookbook. It takes seconds and
needs no GPU. The clips exist only as headers, because the frames of 5 min in 4K would take 15 GB. The real `fetch_video` of
qwen-vl-utils runs on a reader that returns tensors without data, so everything except decoding is the library's code.

The output is the combinations that differ (with `--all`, every combination), followed by their number. `docs/data.md` lists the
intended differences.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

PUBLISHED = Path(__file__).resolve().parents[1] / "tests" / "published"
PATCH_SIZES = {"qwen2_5_vl": 14, "qwen3_vl": 16}


class ClipFile(NamedTuple):
    num_frames: int
    fps: float
    height: int
    width: int

    @property
    def path(self) -> str:
        return f"{self.width}x{self.height}, {self.num_frames / self.fps:.4g} s at {self.fps:.4g}/s"


NTSC, FILM = 30000 / 1001, 24000 / 1001
CLIPS = [
    ClipFile(30, 30, 240, 426),
    ClipFile(45, NTSC, 480, 854),
    ClipFile(24, 5, 480, 640),  # BridgeData
    ClipFile(80, 10, 256, 320),
    ClipFile(250, 25, 720, 1280),
    ClipFile(600, 30, 1920, 1080),
    ClipFile(719, FILM, 1080, 1920),
    ClipFile(1800, 24, 1080, 1920),
    ClipFile(3600, 30, 2160, 3840),
    ClipFile(4500, 15, 480, 640),
    ClipFile(18000, 60, 240, 426),
    ClipFile(9000, 30, 2160, 3840),
]
SETTINGS: list[dict[str, float]] = [
    {},
    {"fps": 1},
    {"fps": 4},
    {"fps": 0.3},
    {"nframes": 8},
    {"nframes": 16, "max_pixels": 360_000},  # cookbook, driving captions
    {"fps": 1, "max_pixels": 81_920, "min_pixels": 3136},  # cosmos-reason1, with a `min_pixels` that 0.0.14 accepts
    {"fps": 2, "max_pixels": 16 * 9 * 28 * 28 + 1},  # cookbook, AV captions
    {"max_pixels": 200_000},
    {"total_pixels": 6_422_528, "fps": 4},  # cosmos-reason1's inference
    {"total_pixels": 3_774_873, "fps": 1},  # cosmos-reason2 at 4,096 tokens
    {"total_pixels": 8_388_608, "fps": 1},  # cookbook, Cosmos-Reason2
    {"min_pixels": 300_000},
    {"min_frames": 12, "max_frames": 40},
]
LIMITED: list[dict[str, float]] = [{"fps": 1, "max_pixels": 81_920}, {"fps": 1, "max_pixels": 40_960}]
"""Settings that qwen-vl-utils 0.0.14 refuses without `min_pixels`: `max_pixels` below its smallest frame, 128 tokens."""


class ShownPixels(NamedTuple):
    """The frame numbers, frame size and number of tokens that a model sees of a clip."""

    indices: list[int]
    size: tuple[int, int]
    tokens: int


# ---------------------------------------------------------------- qwen-vl-utils


class HeaderOnly:
    """A stand-in for torchcodec's `VideoDecoder` that reads only headers."""

    def __init__(self, path: str, num_ffmpeg_threads: int) -> None:
        self.clip = next(clip for clip in CLIPS if clip.path == path)
        self.metadata = SimpleNamespace(num_frames=self.clip.num_frames, average_fps=self.clip.fps)

    def get_frames_at(self, indices: list[int]) -> Any:
        import torch

        shape = (len(indices), 3, self.clip.height, self.clip.width)
        return SimpleNamespace(data=torch.empty(shape, dtype=torch.uint8, device="meta"))


@contextmanager
def patch_decoding() -> Iterator[Any]:
    """Patch qwen-vl-utils so that it reads all of `CLIPS` from their headers and reports its own errors."""
    from qwen_vl_utils import vision_process

    decoders = ModuleType("torchcodec.decoders")
    vars(decoders)["VideoDecoder"] = HeaderOnly
    modules = {"torchcodec": ModuleType("torchcodec"), "torchcodec.decoders": decoders}
    read = vision_process._read_video_torchcodec
    readers = {
        "torchcodec": read,
        "torchvision": read,
    }  # qwen-vl-utils would try torchvision after an error, and hide the error
    with (
        patch.dict(sys.modules, modules),
        patch.object(vision_process, "get_video_reader_backend", return_value="torchcodec"),
        patch.object(vision_process, "VIDEO_READER_BACKENDS", readers),
    ):
        yield vision_process


def show_with_qwen(utils: Any, clip: ClipFile, settings: dict[str, float], patch_size: int) -> ShownPixels | str:
    """Return the pixels that qwen-vl-utils produces for a clip, or its error message if it refuses the clip."""
    part = {"type": "video", "video": clip.path, **settings}
    try:
        frames, metadata = utils.fetch_video(part, image_patch_size=patch_size, return_video_metadata=True)
    except (AssertionError, ValueError) as error:
        return str(error)
    height, width = frames.shape[-2:]
    return ShownPixels(
        list(metadata["frames_indices"]), (height, width), len(frames) // 2 * height * width // (2 * patch_size) ** 2
    )


# ---------------------------------------------------------------- dsreason


def build_published(tiny: Path, model_type: str, folder: Path) -> Path:
    """Copy the tiny model, and replace its processor files with the published model's."""
    shutil.copytree(tiny, folder, ignore=shutil.ignore_patterns("*processor_config.json"))
    for file in (PUBLISHED / model_type).iterdir():
        shutil.copy(file, folder)
    return folder


def open_published(tiny: Path, model_type: str, folder: Path) -> Any:
    """Open an encoder for the tiny model, with the published model's processor files."""
    import torch

    from dsreason.models.processors.loading import open_encoder

    path = build_published(tiny, model_type, folder)
    return open_encoder(path, dtype=torch.bfloat16, max_length=10**6, max_length_key="model.max_length")


def show_with_dsreason(encoder: Any, clip: ClipFile, settings: dict[str, float]) -> ShownPixels:
    from dsreason.data.types import Sample
    from dsreason.media import videos
    from dsreason.media.vision import VideoInfo

    info = VideoInfo(*clip, duration=clip.num_frames / clip.fps)
    part = {"type": "video", "video": clip.path, **settings}
    with patch.object(videos, "probe_video", return_value=info):
        (planned,) = encoder.plan_media(Sample("clip", [{"role": "user", "content": [part]}]))
    return ShownPixels(list(planned.indices), planned.size, planned.grid[0] * planned.grid[1] * planned.grid[2] // 4)


# ---------------------------------------------------------------- the comparison


def describe(shown: ShownPixels | str) -> str:
    if isinstance(shown, str):
        return f"refused: {shown}"
    return f"{len(shown.indices):3} x {shown.size[1]}x{shown.size[0]} = {shown.tokens}"


class Comparison(NamedTuple):
    text: str
    same: bool
    refused: bool


def compare(encoder: Any, utils: Any, clip: ClipFile, settings: dict[str, float], patch_size: int) -> Comparison:
    """Compare dsreason's frames and sizes with those of qwen-vl-utils. If qwen-vl-utils rejects the clip, call it again with
    `min_pixels` = 1."""
    planned, reference = show_with_dsreason(encoder, clip, settings), show_with_qwen(utils, clip, settings, patch_size)
    if refused := isinstance(reference, str):
        reference = show_with_qwen(utils, clip, {"min_pixels": 1, **settings}, patch_size)
    setting_text = ", ".join(f"{key} {value:g}" for key, value in settings.items())
    note = "  (with min_pixels 1; refused without)" if refused else ""
    return Comparison(
        f"{clip.path:31} {setting_text:46} {describe(planned):28} {describe(reference)}{note}",
        planned == reference,
        refused,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="print every combination")
    arguments = parser.parse_args()
    os.environ.setdefault("DS_ACCELERATOR", "cpu")

    from dsreason.files.cache import get_cache_dir
    from dsreason.models.load import build_tiny_model

    print(f"{'family':11} {'clip':31} {'settings':46} {'ours: frames, size, tokens':28} qwen-vl-utils")
    for model_type, patch_size in PATCH_SIZES.items():
        with patch_decoding() as utils, tempfile.TemporaryDirectory() as folder:
            encoder = open_published(
                build_tiny_model(model_type, get_cache_dir() / "models"), model_type, Path(folder, "model")
            )
            comparisons = [compare(encoder, utils, *case, patch_size) for case in product(CLIPS, SETTINGS + LIMITED)]
        for comparison in comparisons:
            if arguments.all or not comparison.same:
                print(f"{model_type:11} {comparison.text}")
        same, refused = (
            sum(comparison.same for comparison in comparisons),
            sum(comparison.refused for comparison in comparisons),
        )
        print(
            f"{model_type}: {len(comparisons)} combinations, {same} the same, {len(comparisons) - same} different; qwen-vl-utils "
            f"refuses {refused} of them without min_pixels"
        )


if __name__ == "__main__":
    main()
