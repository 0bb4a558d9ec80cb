"""Inputs for the transformer: the format of cached prompts, and the clips that are read."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from dsreason.world.data import WorldDataset
from dsreason.world.schema import WorldConfig
from dsreason.world.training.clips import ClipIndex
from dsreason.world.training.inputs import Inputs
from dsreason.world.training.preflight import is_projection_kept
from dsreason.world.types import ClipSize, WorldRow

UPSTREAM = ["to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2"]


@pytest.mark.parametrize(
    ("rank", "targets", "frozen", "projected"),
    [
        (32, [], False, True),
        (32, UPSTREAM, False, True),
        (32, [*UPSTREAM, "crossattn_proj.0"], False, False),
        (32, ["to_q", "0"], False, False),  # the suffix of a name suffices, and this one belongs to the layer
        (0, [], False, False),
        (0, [], True, True),
    ],
)
def test_projected_text_is_kept_unless_layer_trains(
    rank: int, targets: list[str], frozen: bool, projected: bool
) -> None:
    document = {"lora": {"rank": rank, "targets": targets}, "model": {"freeze_text_projection": frozen}}
    config = WorldConfig.model_validate(document)
    assert is_projection_kept(config) is projected


class Source:
    """A source of clips, embeddings and latents that counts the requests."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()

    def read_clip(self, row: WorldRow, size: ClipSize) -> Tensor:
        self.asked[row.id] += 1
        return torch.full((3, 5, 16, 16), int(row.id), dtype=torch.uint8)

    def read(self, prompts: list[str]) -> Tensor:
        self.asked.update(prompts)
        return torch.full((len(prompts), 4, 8), float(prompts[0][-1]))

    def encode(self, clips: Tensor) -> Tensor:
        return clips[:, :1, :2, :2, :2].float()


def inputs_of(source: Any, algorithm: str, **world: Any) -> Inputs:
    config = WorldConfig.model_validate({"world": {"algorithm": algorithm, **world}, "data": {"workers": 0}})
    return Inputs(config, source, source, ClipSize(5, 16, 16, 16.0), (1, 2, 2, 2))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_shared_group_inputs_are_read_once(size: int) -> None:
    """Use two prompts with three clips each, micro-batches that may contain both, and a placeholder for another rank's row."""
    source = Source()
    dataset = WorldDataset([WorldRow(str(n), f"prompt {n}", clip="x") for n in range(9)], source.read_clip)
    places = [ClipIndex(prompt, clip) for prompt in (1, 2) for clip in range(3)]
    groups = [(tuple(places[i : i + size]), True) for i in range(0, 6, size)]
    groups.append(((ClipIndex(0, 0),), False))
    batches = inputs_of(source, "ddrl", conditional_frames=(1, 1)).build_micro_batches(
        groups, dataset, [7, 4, 8], 1, with_clean=True
    )
    assert source.asked == Counter({"4": 1, "8": 1, "prompt 4": 1, "prompt 8": 1, "prompt 7": 1})
    for batch in batches[:-1]:
        expected = torch.tensor([float({1: 4, 2: 8}[place.prompt]) for place in batch.places])
        assert batch.clean is not None
        assert batch.conditioning is not None
        assert batch.clean[:, 0, 0, 0, 0].equal(expected)
        assert batch.conditioning.latents[:, 0, 0, 0, 0].equal(expected)
        assert batch.text.shape == (len(batch), 4, 8)
        assert batch.text[:, 0, 0].equal(expected)
        if len({place.prompt for place in batch.places}) == 1:
            assert batch.text.untyped_storage().nbytes() == 4 * 8 * 4
    assert not batches[-1].counted


def test_clips_are_read_only_when_needed() -> None:
    source = Source()
    dataset = WorldDataset([WorldRow("3", "prompt 3", clip="x")], source.read_clip)
    (batch,) = inputs_of(source, "ddrl").build_micro_batches(
        [((ClipIndex(0, 0),), True)], dataset, [0], 0, with_clean=False
    )
    assert source.asked == Counter({"prompt 3": 1})
    assert batch.clean is None
