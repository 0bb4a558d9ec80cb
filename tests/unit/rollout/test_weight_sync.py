"""Fingerprints, and which frozen tensors a layer-wise reload can leave out. No engine."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dsreason.rollout.weight_sync import Place, alike, changed, fingerprint, fingerprints, whole_layers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_step_of_one_value_shows_in_the_fingerprint(dtype: torch.dtype) -> None:
    values = torch.randn(4096, generator=torch.Generator().manual_seed(0)).to(dtype)
    before = fingerprint(values)
    assert alike(fingerprint(*values.chunk(7)), before)  # added up in another order
    assert alike(fingerprint(values, values), before)  # held twice
    assert not alike(before, fingerprint(values, values))
    values[17] = torch.nextafter(values[17], torch.tensor(9.0, dtype=dtype))
    assert not alike(fingerprint(values), before)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_constant_that_is_no_number_does_not_count_as_changed(value: float) -> None:
    tensors = {"mask": torch.tensor([0.0, value]), "same": torch.ones(2), "moved": torch.ones(3)}
    before = fingerprints(tensors.items())
    tensors["moved"][1] = 2
    assert changed(before, fingerprints(tensors.items())) == ["moved"]
    assert changed(before, {}) == ["mask", "same", "moved"]


def test_a_layer_is_left_out_as_a_whole_or_not_at_all() -> None:
    qkv, norm, embed, head = (nn.Module() for _ in range(4))
    filled = [(qkv, "q"), (qkv, "k"), (qkv, "v"), (norm, "norm"), (embed, "embed"), (head, "embed")]
    places = [Place(name, "", layer, "weight", slice(None)) for layer, name in filled]
    assert whole_layers(places, {"q", "v", "norm", "embed"}) == {"norm", "embed"}
    assert whole_layers(places, {"q", "k", "v"}) == {"q", "k", "v"}
    assert whole_layers(places, set()) == set()


def test_a_tensor_is_sent_where_any_of_its_layers_is_not_whole() -> None:
    shared, other = nn.Module(), nn.Module()
    places = [
        Place(name, "", layer, "weight", slice(None)) for layer, name in ((shared, "a"), (shared, "b"), (other, "b"))
    ]
    places.append(Place("trained", "", other, "bias", slice(None)))
    assert whole_layers(places, {"a", "b"}) == set()


def test_an_empty_share_is_like_itself() -> None:
    empty = torch.empty(0, 4)
    assert changed(fingerprints([("share", empty)]), fingerprints([("share", empty)])) == []
