"""Speed of decoding clips into a model's pixels, in dsreason and in qwen-vl-utils with the Hugging Face processor.

    python benchmarks/video_decode.py [--media F]... [--seconds 30 120] [--fps 2 4] [--max-pixels 81920 default]
                                      [--readers decord torchcodec] [--rounds 5] [--threads 1]

All sides convert the same conversation to token ids and pixels: dsreason with `Encoder.encode_prompt`, the others with
`process_vision_info` and the processor of Qwen2.5-VL (without resizing, as its authors advise). Each side runs in a separate
process on the same `--threads` cores, like a data worker; the sides take turns (A B C, A B C, …), and the median round counts.
The CPU time of all threads is the better measure if other work on the machine disturbs the wall-clock time. dsreason's cache of
file headers is cleared before every round. First, videos of `--seconds` are made: a moving texture in H.264, 1280x720 at 30
frames per second.

The column `frames` shows whether the frames and their size equal dsreason's. Pixels are normalised: one step of an 8-bit pixel is
0.0145 to 0.0153, depending on the standard deviation of the colour channel.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import math
import multiprocessing
import os
import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

GOAL = 1.5
OURS = "dsreason"
HEIGHT, WIDTH, RATE = 720, 1280, 30
SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"
FRAME_LIMITS = {"shortest_edge": 128 * 28**2, "longest_edge": 768 * 28**2}
"""Limits on the pixels of Qwen2.5-VL's frames in qwen-vl-utils; the video processor gets the same limits."""


class Encoded(NamedTuple):
    """One side's result for a clip."""

    indices: list[int]
    grid: list[int]
    pixels: np.ndarray


def make_video(path: Path, seconds: float) -> Path:
    """Write a video in which the camera moves over a texture."""
    import av
    from PIL import Image

    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (90, 160, 3), np.uint8))
    texture = np.asarray(noise.resize((1920, 1080), Image.Resampling.BICUBIC))
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=RATE, options={"preset": "veryfast"})
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuv420p"
        for number in range(round(seconds * RATE)):
            x, y = round(320 + 300 * math.sin(number / 50)), round(180 + 170 * math.cos(number / 70))
            window = np.ascontiguousarray(texture[y : y + HEIGHT, x : x + WIDTH])
            container.mux(stream.encode(av.VideoFrame.from_ndarray(window, format="rgb24")))
        container.mux(stream.encode())
    return path


# ---------------------------------------------------------------- in each side's process

side: Any = None


def start(name: str, threads: int) -> None:
    """Set the variables that libraries read on import, then build the side."""
    global side
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
    os.environ |= {"FORCE_QWENVL_VIDEO_READER": name, "TORCHCODEC_NUM_THREADS": str(threads)}
    import torch

    torch.set_num_threads(threads)
    side = Ours() if name == OURS else Theirs()


def load_processor() -> tuple[Any, Path]:
    """Load Qwen2.5-VL's processor, with its limits; return it and the folder of its tiny model."""
    from dsreason.files.cache import get_cache_dir
    from dsreason.models.load import build_tiny_model
    from dsreason.models.processors import loading

    folder = build_tiny_model("qwen2_5_vl", get_cache_dir() / "models")
    processor = loading.load_processor(folder)
    processor.video_processor.size = FRAME_LIMITS
    return processor, folder


class Ours:
    def __init__(self) -> None:
        from functools import partial

        from dsreason.data.chat import Encoder
        from dsreason.families import get_family
        from dsreason.models.load import read_model_config
        from dsreason.models.mrope import compute_position_ids

        processor, folder = load_processor()
        config = read_model_config(folder)
        family = get_family(config.model_type)
        positions = partial(compute_position_ids, family.grids, config=config)
        self.encoder = Encoder(processor, family, positions, max_length=10**9)

    def encode(self, messages: list[dict[str, Any]]) -> Encoded:
        from dsreason.data.types import Sample
        from dsreason.media import videos

        videos._probe_cached.cache_clear()
        prompt = self.encoder.encode_prompt(Sample("clip", messages))
        inputs, (_, metadata) = prompt.encoded.mm_kwargs, prompt.media[0]
        grid = inputs["video_grid_thw"][0].tolist()
        return Encoded(metadata["frames_indices"], grid, inputs["pixel_values_videos"].numpy())


class Theirs:
    def __init__(self) -> None:
        import qwen_vl_utils.vision_process as utils

        def raise_reader_error(*_: Any) -> None:
            raise RuntimeError(f"the reader {utils.FORCE_QWENVL_VIDEO_READER} does not work here")

        utils.VIDEO_READER_BACKENDS = {**utils.VIDEO_READER_BACKENDS}
        if utils.FORCE_QWENVL_VIDEO_READER != "torchvision":  # qwen-vl-utils falls back to torchvision without an error
            utils.VIDEO_READER_BACKENDS["torchvision"] = raise_reader_error
        self.process_vision_info = utils.process_vision_info
        self.processor, _ = load_processor()

    def encode(self, messages: list[dict[str, Any]]) -> Encoded:
        text = self.processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        images, videos, options = self.process_vision_info(
            messages, return_video_kwargs=True, return_video_metadata=True
        )
        frames, metadata = zip(*videos, strict=True)
        inputs = self.processor(
            text=[text],
            images=images,
            videos=list(frames),
            video_metadata=list(metadata),
            do_resize=False,
            return_tensors="pt",
            **options,
        )
        grid = inputs["video_grid_thw"][0].tolist()
        return Encoded(list(map(int, metadata[0]["frames_indices"])), grid, inputs["pixel_values_videos"].numpy())


def measure(messages: list[dict[str, Any]]) -> tuple[float, float]:
    """Encode the conversation; return the wall-clock seconds, and the CPU seconds of all threads."""
    started, cpu_started = time.perf_counter(), time.process_time()
    side.encode(messages)
    return time.perf_counter() - started, time.process_time() - cpu_started


def save_pixels(messages: list[dict[str, Any]], file: Path) -> tuple[list[int], list[int]]:
    """Encode the conversation; save the pixels to `file`, and return the frame numbers and the grid."""
    encoded = side.encode(messages)
    np.save(file, encoded.pixels)
    return encoded.indices, encoded.grid


# ---------------------------------------------------------------- in the parent


def measure_differences(ours: Path, theirs: Path) -> tuple[float, float]:
    """Return the mean and the largest absolute difference between normalised pixels, which are read piece by piece."""
    a, b = np.load(ours, mmap_mode="r"), np.load(theirs, mmap_mode="r")
    total, largest = 0.0, 0.0
    for first in range(0, len(a), 4096):
        apart = np.abs(a[first : first + 4096] - b[first : first + 4096])
        total, largest = total + float(apart.sum(dtype=np.float64)), max(largest, float(apart.max()))
    return total / a.size, largest


def build_conversation(file: Path, fps: float, max_pixels: int | None) -> list[dict[str, Any]]:
    part: dict[str, Any] = {"type": "video", "video": str(file), "fps": fps}
    if max_pixels is not None:
        part |= {"max_pixels": max_pixels, "min_pixels": min(max_pixels, FRAME_LIMITS["shortest_edge"])}
    return [{"role": "user", "content": [part, {"type": "text", "text": "What happens?"}]}]


class Found(NamedTuple):
    """One side's medians, and how its result differs from dsreason's."""

    seconds: float
    cpu_seconds: float
    apart: str


def compare(
    sides: dict[str, ProcessPoolExecutor], messages: list[dict[str, Any]], rounds: int, scratch: Path
) -> dict[str, Found]:
    """Measure all sides. Each side's first call is a warm-up, and also provides the result to compare."""
    times: dict[str, list[tuple[float, float]]] = {}
    apart: dict[str, str] = {}
    for name, process in sides.items():
        try:
            encoding = process.submit(save_pixels, messages, scratch / f"{name}.npy").result()
        except (RuntimeError, AttributeError, ImportError) as error:
            print(f"  {name} skipped: {str(error).splitlines()[0]}")
            continue
        times[name] = []
        if name == OURS:
            expected, apart[name] = encoding, ""
        elif encoding != expected:
            apart[name] = "different"
        else:
            mean, largest = measure_differences(scratch / f"{OURS}.npy", scratch / f"{name}.npy")
            apart[name] = f"same    {mean:9.5f} {largest:9.4f}"
    for _ in range(rounds):
        for name, side_times in times.items():
            side_times.append(sides[name].submit(measure, messages).result())
    return {name: Found(*map(statistics.median, zip(*times[name], strict=True)), apart[name]) for name in times}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    real = [SHARED / name for name in ("sample.mp4", "packer.mp4") if (SHARED / name).is_file()]
    parser.add_argument("--media", type=Path, nargs="*", default=real, help="video files to measure")
    parser.add_argument(
        "--seconds", type=float, nargs="*", default=[30, 120], help="lengths, in seconds, of the videos to make"
    )
    parser.add_argument("--fps", type=float, nargs="+", default=[2, 4])
    parser.add_argument("--max-pixels", nargs="+", default=["81920", "default"])
    parser.add_argument(
        "--readers", nargs="+", default=["decord", "torchcodec"], choices=["decord", "torchcodec", "torchvision"]
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="cores that each side may use")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    versions = ", ".join(
        f"{name} {importlib.metadata.version(name)}"
        for name in ("av", "torch", "torchvision", "transformers", "qwen-vl-utils", *arguments.readers)
    )
    print(f"{versions}; {arguments.threads} core(s) each, medians of {arguments.rounds}; load {os.getloadavg()[0]:.1f}")
    columns = f"{'file':14}{'fps':>4} {'max_pixels':>10}  {'side':11}{'clips/s':>8}{'ratio':>7}{'CPU s':>8}{'ratio':>7}"
    print(f"{columns}  frames  mean diff  max diff")
    ratios: dict[str, list[tuple[float, float]]] = {name: [] for name in arguments.readers}
    spawn = multiprocessing.get_context("spawn")  # forked processes would share the libraries' state
    sides = {
        name: ProcessPoolExecutor(1, mp_context=spawn, initializer=start, initargs=(name, arguments.threads))
        for name in (OURS, *arguments.readers)
    }
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        files = arguments.media + [make_video(scratch / f"{s:g} s.mp4", s) for s in arguments.seconds]
        for file, fps, pixels in ((f, s, p) for f in files for s in arguments.fps for p in arguments.max_pixels):
            limit = None if pixels == "default" else int(pixels)
            results = compare(sides, build_conversation(file, fps, limit), arguments.rounds, scratch)
            dsreason = results[OURS]
            for name, result in results.items():
                ratio = result.seconds / dsreason.seconds, result.cpu_seconds / dsreason.cpu_seconds
                row = f"{file.name:14}{fps:4g} {pixels:>10}  {name:11}{1 / result.seconds:8.2f}{ratio[0]:7.2f}"
                print(f"{row}{result.cpu_seconds:8.3f}{ratio[1]:7.2f}  {result.apart}", flush=True)
                if name != OURS:
                    ratios[name].append(ratio)
    for process in sides.values():
        process.shutdown()
    for name, results in ratios.items():
        for title, values in zip(("on the clock", "in CPU time"), zip(*results, strict=True), strict=False):
            spread = f"{min(values):.2f} to {max(values):.2f}, median {statistics.median(values):.2f}"
            print(f"clips/s, ours / {name}, {title}: {spread} (goal {GOAL})")


if __name__ == "__main__":
    main()
