"""A model that does not fit on one GPU answers as it does on one: over two GPUs, and with weights left in their files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dsreason.config.schema import SFTConfig
from dsreason.models import placement
from dsreason.models.placement import load_where_it_fits
from dsreason.models.tiny import build_tiny
from dsreason.rollout.protocol import Sampling
from dsreason.rollout.transformers_engine import draw_tokens
from dsreason.train.common.preflight import build_encoder

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]
GPU = torch.device("cuda", 0)


@pytest.mark.parametrize("gpus", [1, 2])
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_answers_do_not_depend_on_weight_placement(
    family: str, gpus: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if torch.cuda.device_count() < gpus:
        pytest.skip(f"{gpus} GPUs are needed")
    folder = build_tiny(family, tmp_path / "model", num_layers=4, intermediate_size=2048)
    encoder = build_encoder(SFTConfig(), folder)
    image, video = encoder.build_dummy("image"), encoder.build_dummy("video")

    def drawn(model: object) -> tuple[list[list[int]], torch.Tensor]:
        steps = list(
            draw_tokens(
                model,  # type: ignore[arg-type]
                [image, video, image],
                [0, 1, 2],
                Sampling(max_completion_length=4, seed=1),
                banned_ids=torch.tensor([5, 6], device=GPU),
                stop_ids=torch.tensor([7], device=GPU),
            )
        )
        return [token.tolist() for token, _ in steps], torch.stack([logprob for _, logprob in steps])

    full = load_where_it_fits(folder, dtype=torch.float32, device=GPU)
    size = sum(parameter.nbytes for parameter in full.parameters())
    expected_ids, expected_logprobs = drawn(full)
    monkeypatch.setattr(placement, "compute_budget", lambda device: int((0.9 if gpus == 2 else 0.7) * size))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    model = load_where_it_fits(folder, dtype=torch.float32, device=GPU)
    places = {str(parameter.device) for parameter in model.parameters()}
    assert places == ({"cuda:0", "cuda:1"} if gpus == 2 else {"cuda:0", "meta"})
    ids, logprobs = drawn(model)
    assert ids == expected_ids
    torch.testing.assert_close(logprobs, expected_logprobs, rtol=0, atol=1e-5)
