"""Limits for a model folder's image and video processors that match those in training, as far as processors can express them.

Image processors limit the pixels of each image, as training does. For videos, `size` limits each frame in Qwen2.5-VL and all
frames together in Qwen3-VL; `cap_pixels_per_frame` adds the other limit of qwen-vl-utils. See `resize` in transformers'
`video_processing_qwen2_vl.py` and `video_processing_qwen3_vl.py`, and `compute_video_size` for the rule of training.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsreason.checkpoints.trained_vision import TrainedVision, format_settings
from dsreason.families.family import Vision
from dsreason.media import vision

IMAGE_FILE, VIDEO_FILE, BOTH_FILE = (
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
)
VIDEO_BUDGET = 0.9
"""Fraction of `max_video_tokens` that Qwen2.5-VL's processor uses for a video's frames."""


@dataclass(frozen=True)
class ProcessorLimits:
    """Keys and values for the processor files that give media the same sizes as in training."""

    trained: TrainedVision
    image: dict[str, Any]
    video: dict[str, Any]
    server: dict[str, Any]
    """Settings with which vLLM reads the same frames from a clip as training does."""
    unexpressed: list[str] = field(default_factory=list)
    """Training settings that the files cannot express."""

    def describe(self) -> dict[str, str]:
        """Return rows for the model card's table: label → value."""
        settings = self.trained.settings
        rows = {"vision settings": f"`{format_settings(settings)}`" if settings else "the defaults"}
        if self.trained.differing:
            rows["other vision settings"] = f"were used for {', '.join(self.trained.differing)}"
        if self.unexpressed:
            rows["not in the processor files"] = "; ".join(self.unexpressed)
        return rows | {"frames in vLLM": f"`--media-io-kwargs '{json.dumps({'video': self.server})}'`"}


def compute_limits(processor: Any, trained: TrainedVision, family: Vision) -> ProcessorLimits:
    """Compute the limits for a transformers processor whose model was trained with the settings `trained`."""
    settings = trained.settings
    image, video = processor.image_processor, processor.video_processor
    low, high = vision.compute_image_bounds(settings, vision.choose_image_limits(get_pixel_limits(image), family))
    compute_video = compute_total_limits if family.bounds_are_per_video else compute_frame_limits
    video_keys, unexpressed = compute_video(settings, get_pixel_limits(video), family, video.temporal_patch_size)
    frames = compute_frames(settings, family, video.temporal_patch_size)
    return ProcessorLimits(
        trained,
        image={"size": {"shortest_edge": low, "longest_edge": high}},
        video=video_keys | {key: frames[key] for key in ("fps", "min_frames", "max_frames")},
        server={"video_backend": "qwen3_vl", "num_frames": -1, **frames},
        unexpressed=unexpressed,
    )


def get_pixel_limits(processor: Any) -> vision.PixelLimits:
    factor = processor.patch_size * processor.merge_size
    return vision.PixelLimits(factor, processor.size["shortest_edge"], processor.size["longest_edge"])


def compute_frames(settings: dict[str, float], family: Vision, patch: int) -> dict[str, float]:
    """Return `fps` and the bounds on the number of frames, which are equal if the number is fixed."""
    if "nframes" in settings:
        count = max(patch, round(settings["nframes"] / patch) * patch)
        return {"fps": family.fps, "min_frames": count, "max_frames": count}
    low, high = vision.compute_frame_count_bounds(settings, family, patch)
    return {"fps": settings.get("fps", family.fps), "min_frames": low, "max_frames": high}


def compute_frame_limits(
    settings: dict[str, float], own: vision.PixelLimits, family: Vision, patch: int
) -> tuple[dict[str, Any], list[str]]:
    """Return the keys for a processor whose `size` limits each frame, and the settings that they cannot express."""
    smallest, largest, total = vision.choose_frame_bounds(patch, own, family, patch)
    low = int(settings.get("min_pixels", smallest))
    most, floor = settings.get("max_pixels"), int(low * 1.05)
    unexpressed = [
        "the frames that are sampled: training shows the first and the last frame, Qwen2VLVideoProcessor not the last one"
    ]
    if most is not None and most <= floor:  # `total_pixels` then has no effect
        size = {"shortest_edge": min(low, 1 if most < low else low), "longest_edge": int(most)}
        return {"size": size, "cap_pixels_per_frame": False}, unexpressed
    size = {"shortest_edge": low, "longest_edge": int(min(largest, most or largest))}
    budget = settings.get("total_pixels", total)
    tokens = math.ceil(budget / own.token_pixels / VIDEO_BUDGET)
    return {"size": size, "cap_pixels_per_frame": True, "max_video_tokens": tokens}, unexpressed


def compute_total_limits(
    settings: dict[str, float], own: vision.PixelLimits, family: Vision, patch: int
) -> tuple[dict[str, Any], list[str]]:
    """Return the keys for a processor whose `size` limits all frames together, and the settings that they cannot express.

    The processor keeps its own total limit unless `total_pixels` is set: for a higher limit, vLLM would reserve more memory.
    """
    smallest, largest, total = vision.choose_frame_bounds(patch, own, family, patch)
    most = min(largest, settings.get("max_pixels", largest))
    longest = int(patch * settings["total_pixels"]) if "total_pixels" in settings else own.max_pixels
    keys: dict[str, Any] = {"size": {"shortest_edge": own.min_pixels, "longest_edge": longest}}
    unexpressed = []
    if patch > 1:
        unexpressed.append("an even number of frames: Qwen3VLVideoProcessor also takes odd numbers")
    if family.caps_frames:
        keys |= {"cap_pixels_per_frame": True, "max_video_tokens": max(1, int(most // own.token_pixels))}
    low = settings.get("min_pixels", smallest if smallest * patch != own.min_pixels else None)
    if low is not None and low <= most:
        unexpressed.append(f"at least {low:.15g} pixels per frame")
    if "total_pixels" not in settings and patch * total > longest:
        unexpressed.append(f"at most {total:.15g} pixels per video (two frames count once), not {longest // patch}")
    if not family.caps_frames:
        unexpressed += [f"at most {most:.15g} pixels per frame"] * (most < longest)
    elif most % own.token_pixels:
        unexpressed.append(f"at most {most:.15g} pixels per frame, which are rounded down to whole tokens")
    return keys, unexpressed


def write_limits(folder: Path, limits: ProcessorLimits) -> None:
    """Change the processor files in a model folder; if both processors share a file, create a separate one for videos."""
    if not (folder / VIDEO_FILE).is_file() and (shared := folder / IMAGE_FILE).is_file():
        write_json(folder / VIDEO_FILE, read_json(shared))
    for name, keys in ((IMAGE_FILE, limits.image), (VIDEO_FILE, limits.video)):
        if (file := folder / name).is_file():
            write_json(file, change_limits(read_json(file), keys))
    if (file := folder / BOTH_FILE).is_file():
        document = read_json(file)
        for name, keys in (("image_processor", limits.image), ("video_processor", limits.video)):
            if name in document:
                document[name] = change_limits(document[name], keys)
        write_json(file, document)


def change_limits(document: dict[str, Any], keys: dict[str, Any]) -> dict[str, Any]:
    """Return a processor's settings with `keys` applied, including under the older names `min_pixels` and `max_pixels` if
    present."""
    older = {"min_pixels": keys["size"]["shortest_edge"], "max_pixels": keys["size"]["longest_edge"]}
    return document | keys | {name: value for name, value in older.items() if name in document}


def read_json(file: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return document


def write_json(file: Path, document: dict[str, Any]) -> None:
    file.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
