"""Wire format of cosmos-rl's reward service, for the client and the server.

    POST …/enqueue   a line of JSON, a line break, and an array in numpy's `.npy` format
                     {"prompts": [str], "reward_fn": {name: weight}, "video_infos": [{"video_fps": 16.0}], "media_type": "video"}
    200              {"uuid": "…", "replica_id": "…"}        replica_id only if there are several replicas
    POST …/pull      a form with `uuid` and `type`, the function's name; the header X-Lepton-Replica-Target names the replica
    200              {"scores": {key: [float]}, …};  400 if the scores are not ready: retry

Arrays by `media_type`: `video` uint8 `[B, C, T, H, W]`, `image` uint8 `[B, H, W, C]`, `latent` `[B, C, T, h, w]`, normalised.
`media_type` defaults to `latent`. Latents of type uint8 contain the bytes of bfloat16 numbers.
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args
from urllib.parse import urlencode

import numpy as np
from numpy.typing import NDArray

from dsreason.files.npy import read_npy

Media = Literal["video", "image", "latent"]
Array = NDArray[Any]

ENQUEUE_TYPE = "application/octet-stream"
FORM_TYPE = "application/x-www-form-urlencoded"
REPLICA = "X-Lepton-Replica-Target"
NUM_AXES = {"video": 5, "image": 4, "latent": 5}
CHANNEL_AXIS = {"video": 1, "image": 3}
MAX_HEAD_BYTES = 2 * 2**20
"""Maximum size of the JSON in bytes; once parsed, it takes twenty times as much memory."""
KNOWN = ("prompts", "reward_fn", "video_infos", "media_type")


@dataclass(frozen=True)
class ScoringRequest:
    """The content of a request to enqueue clips.

    Example: `ScoringRequest(["a red ship"], {"dance_grpo": 1.0}, [{"video_fps": 16.0}], "video", array)`.
    """

    prompts: Sequence[str]
    reward_fn: Mapping[str, float]
    """Weights by function name. The server does not apply the weights; it only ignores functions whose weight is not positive."""
    video_infos: Sequence[Mapping[str, Any]]
    media_type: Media
    array: Array
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Additional keys, such as `geneval_tags`."""


def build_enqueue_body(request: ScoringRequest) -> bytes:
    head = {key: getattr(request, key) for key in KNOWN} | dict(request.extra)
    buffer = io.BytesIO()
    buffer.write(json.dumps(head, allow_nan=False).encode() + b"\n")
    np.save(buffer, request.array, allow_pickle=False)
    return buffer.getvalue()


def build_pull_body(uuid: str, name: str) -> bytes:
    return urlencode({"uuid": uuid, "type": name}).encode()


def read_body(body: bytes | bytearray) -> ScoringRequest:
    """Parse the body of an enqueue request; the array shares the body's memory. Raise ValueError if the body is invalid."""
    end = body.find(b"\n", 0, MAX_HEAD_BYTES)
    if end < 0:
        raise ValueError(
            f"the JSON must end with a line break within {MAX_HEAD_BYTES} bytes; send fewer clips or shorter prompts"
        )
    try:
        head = parse_strict_json(bytes(body[:end]))
    except ValueError as error:
        raise ValueError(f"the first line is not JSON: {error}") from None
    if not isinstance(head, dict):
        raise ValueError("the first line is not a JSON object")
    media_type = head.get("media_type", "latent")
    if media_type not in get_args(Media):
        raise ValueError(f"media_type must be video, image or latent; got {media_type!r}")
    try:
        array = read_npy(memoryview(body)[end + 1 :])
    except ValueError as error:
        raise ValueError(f"the array after the JSON: {error}") from None
    _check_array(media_type, array)
    prompts, infos, weights = head.get("prompts"), head.get("video_infos"), head.get("reward_fn")
    if not isinstance(prompts, list) or not all(isinstance(prompt, str) for prompt in prompts):
        raise ValueError("prompts must be a list of strings")
    if len(prompts) != len(array):
        raise ValueError(f"got {len(prompts)} prompts for {len(array)} clips")
    infos = [{}] * len(array) if infos is None else infos
    if not isinstance(infos, list) or len(infos) != len(array) or not all(isinstance(info, dict) for info in infos):
        raise ValueError(f"video_infos must be a list of {len(array)} objects")
    if not isinstance(weights, dict) or not all(_is_number(weight) for weight in weights.values()):
        raise ValueError("reward_fn must be an object that maps function names to weights")
    extra = {key: value for key, value in head.items() if key not in KNOWN}
    return ScoringRequest(prompts, weights, infos, media_type, array, extra)


def parse_strict_json(text: str | bytes) -> Any:
    """Parse JSON. Raise ValueError if it is invalid, or contains NaN or a number that overflows to infinity."""
    try:
        value = json.loads(text)
        json.dumps(value, allow_nan=False)
    except RecursionError as error:
        raise ValueError(str(error)) from None
    return value


def _check_array(media_type: Media, array: Array) -> None:
    shape, axes = list(array.shape), NUM_AXES[media_type]
    if array.ndim != axes:
        raise ValueError(f"{media_type} must have {axes} axes; got shape {shape}")
    if 0 in shape:
        raise ValueError(f"{media_type} must not have an axis of length 0; got shape {shape}")
    if media_type != "latent" and (array.dtype != np.uint8 or shape[CHANNEL_AXIS[media_type]] != 3):
        form = "[B, 3, T, H, W]" if media_type == "video" else "[B, H, W, 3]"
        raise ValueError(f"{media_type} must be uint8 with 3 channels, {form}; got {array.dtype} with shape {shape}")


def decode_bfloat16(array: Array) -> Array:
    """Convert the bytes of bfloat16 numbers to float32: uint8 `[…, 2·w]` → `[…, w]`."""
    if array.shape[-1] % 2:
        raise ValueError(f"latents of type uint8 must have a last axis of even length; got {array.shape[-1]}")
    bits = np.ascontiguousarray(array).view("<u2").astype(np.uint32) << 16
    return bits.view(np.float32)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
