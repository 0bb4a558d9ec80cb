"""Digests of media items, which cover everything that the processor reads and are computed once per prompt."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
from PIL import Image

from dsreason.data.media_plan import Medium
from dsreason.rollout import vllm_requests
from dsreason.rollout.protocol import Sampling
from dsreason.rollout.vllm_requests import RolloutRequest, compute_digest, make_request_seed, to_inputs

PIXELS = np.arange(4 * 6 * 8 * 3, dtype=np.uint8).reshape(4, 6, 8, 3)


def video(frames: np.ndarray = PIXELS, **metadata: Any) -> Medium:
    return frames, {"fps": 2.0, "frames_indices": [0, 1, 2, 3], **metadata}


def test_digests_distinguish_only_different_media() -> None:
    different: list[Medium] = [
        Image.fromarray(PIXELS[0]),
        Image.fromarray(PIXELS[1]),
        Image.fromarray(PIXELS[0].reshape(8, 6, 3)),
        Image.fromarray(PIXELS[0]).convert("HSV"),
        video(),
        video(PIXELS + 1),
        video(PIXELS.reshape(4, 8, 6, 3)),
        video(PIXELS.astype(np.int8)),
        video(fps=1.0),
        video(frames_indices=[0, 1, 2, 4]),
    ]
    assert len({compute_digest(medium) for medium in different}) == len(different)
    assert compute_digest(Image.fromarray(PIXELS[0].copy())) == compute_digest(different[0])
    assert compute_digest(video(np.asfortranarray(PIXELS))) == compute_digest(
        different[4]
    )  # regardless of the memory layout


def test_completions_share_media_and_digest() -> None:
    image, clip = Image.fromarray(PIXELS[0]), video()
    prompt = RolloutRequest("a", [1], [1, 1], [clip, image, image], Sampling(), seed=0)
    other = RolloutRequest("b", [2], [2, 2], [video()], Sampling(), seed=1)  # decoded again from the same file
    text = RolloutRequest("c", [3], [3], [], Sampling(), seed=2)
    with mock.patch.object(vllm_requests, "compute_digest", wraps=compute_digest) as computed:
        first, second, third, last = to_inputs([prompt, prompt, other, text])
    assert computed.call_count == 3
    assert first == second
    assert first["multi_modal_data"] == {"video": [clip], "image": [image, image]}
    assert first["multi_modal_uuids"] == {"video": [compute_digest(clip)], "image": [compute_digest(image)] * 2}
    assert third["multi_modal_uuids"] == {"video": [compute_digest(clip)]}
    assert last == {"prompt_token_ids": [3]}


def test_streams_have_distinct_valid_vllm_seeds() -> None:
    seeds = [make_request_seed(seed, stream) for seed in (0, 1) for stream in range(50)]
    assert len(set(seeds)) == 100
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert make_request_seed(1, 3) == make_request_seed(1, 3)
