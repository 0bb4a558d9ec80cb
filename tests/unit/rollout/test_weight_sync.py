"""Fingerprints of weights, and the frozen tensors that a layer-wise reload can omit, tested without an engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from dsreason.families import FAMILIES
from dsreason.rollout.protocol import SyncError
from dsreason.rollout.weight_sync import (
    TensorSlot,
    WeightStream,
    compute_fingerprint,
    compute_fingerprints,
    find_changed,
    find_complete_layers,
    find_engine_names,
    find_part,
    find_rows,
    is_same_fingerprint,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fingerprint_detects_smallest_value_change(dtype: torch.dtype) -> None:
    values = torch.randn(4096, generator=torch.Generator().manual_seed(0)).to(dtype)
    before = compute_fingerprint(values)
    assert is_same_fingerprint(compute_fingerprint(*values.chunk(7)), before)  # summed in another order
    assert is_same_fingerprint(compute_fingerprint(values, values), before)  # the same tensor twice
    assert not is_same_fingerprint(before, compute_fingerprint(values, values))
    values[17] = torch.nextafter(values[17], torch.tensor(9.0, dtype=dtype))
    assert not is_same_fingerprint(compute_fingerprint(values), before)


class Transfers(TorchDispatchMode):
    """A counter of single numbers that are read from tensors, because each read waits for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default)
        return function(*args, **(kwargs or {}))


def test_fingerprints_reach_cpu_in_one_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[torch.Size] = []
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: moved.append(tensor.shape) or tensor)
    tensors = {str(i): torch.full((3, i + 1), float(i)) for i in range(4)}
    with Transfers() as transfers:
        result = compute_fingerprints(tensors.items())
    assert (transfers.count, moved) == (0, [(4, 3)])
    assert {name: numbers.tolist() for name, numbers in result.items()} == {
        str(i): [3 * (i + 1), 3 * (i + 1) * i, 3 * (i + 1) * i * i] for i in range(4)
    }


def test_weights_are_measured_on_engine_device() -> None:
    weights = {"a": torch.ones(2, 3), "b": torch.full((4,), 2.0)}
    shapes = {name: tensor.shape for name, tensor in weights.items()}
    remaining = {"c": torch.tensor([1.0, 5.0, 25.0], dtype=torch.float64)}
    sending = WeightStream(iter(weights.items()), shapes, torch.bfloat16, torch.device("meta"), dict(remaining))
    assert {name: (copy.device.type, copy.dtype) for name, copy in sending} == dict.fromkeys(
        "ab", ("meta", torch.bfloat16)
    )
    assert [sending.fingerprints[name].device.type for name in "cab"] == ["cpu", "meta", "meta"]
    sending = WeightStream(iter(weights.items()), shapes, torch.bfloat16, torch.device("cpu"), dict(remaining))
    sending.read_remaining()
    sending.finish()
    assert {name: numbers.tolist() for name, numbers in sending.fingerprints.items()} == {
        "c": [1, 5, 25], "a": [6, 6, 6], "b": [4, 8, 16],
    }  # fmt: skip


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_nonfinite_constant_does_not_count_as_changed(value: float) -> None:
    tensors = {"mask": torch.tensor([0.0, value]), "same": torch.ones(2), "moved": torch.ones(3)}
    before = compute_fingerprints(tensors.items())
    tensors["moved"][1] = 2
    assert find_changed(before, compute_fingerprints(tensors.items())) == ["moved"]
    assert find_changed(before, {}) == ["mask", "same", "moved"]


def test_layers_are_skipped_only_as_a_whole() -> None:
    qkv, norm, embed, head = (nn.Module() for _ in range(4))
    filled = [(qkv, "q"), (qkv, "k"), (qkv, "v"), (norm, "norm"), (embed, "embed"), (head, "embed")]
    places = [TensorSlot(name, "", layer, "weight", slice(None)) for layer, name in filled]
    assert find_complete_layers(places, {"q", "v", "norm", "embed"}) == {"norm", "embed"}
    assert find_complete_layers(places, {"q", "k", "v"}) == {"q", "k", "v"}
    assert find_complete_layers(places, set()) == set()


def test_tensor_of_incomplete_layer_is_sent() -> None:
    shared, other = nn.Module(), nn.Module()
    places = [
        TensorSlot(name, "", layer, "weight", slice(None))
        for layer, name in ((shared, "a"), (shared, "b"), (other, "b"))
    ]
    places.append(TensorSlot("trained", "", other, "bias", slice(None)))
    assert find_complete_layers(places, {"a", "b"}) == set()


def test_empty_share_counts_as_unchanged() -> None:
    empty = torch.empty(0, 4)
    assert find_changed(compute_fingerprints([("share", empty)]), compute_fingerprints([("share", empty)])) == []


def test_unexpected_or_missing_tensors_are_reported() -> None:
    expected = {name: torch.Size((2,)) for name in ("a", "b", "c")}
    sent = [("a", torch.ones(2)), ("a", torch.zeros(2)), ("b", torch.ones(3)), ("x", torch.ones(2))]
    stream = WeightStream(iter(sent), expected, torch.float32, torch.device("cpu"))
    assert [(name, tensor.tolist()) for name, tensor in stream] == [("a", [1, 1])]
    with pytest.raises(SyncError) as caught:
        stream.finish()
    assert str(caught.value) == (
        "weight sync failed for 5 tensors: a was sent twice; b has shape (3,) instead of (2,); x is unknown; "
        "b did not arrive; c did not arrive"
    )


def test_tensor_may_fill_several_parts() -> None:
    layer = SimpleNamespace(output_partition_sizes=[2, 2, 4, 4])  # query, key, value, z
    model = SimpleNamespace(packed_modules_mapping={"in_proj_qkvz": ["in_proj_qkv", "in_proj_z"]})
    fused = "layers.0.in_proj_qkvz.weight"
    for name, partitions, rows in (("in_proj_qkv", slice(0, 3), slice(0, 8)), ("in_proj_z", slice(3, 4), slice(8, 12))):
        part = find_part(model, f"layers.0.{name}.weight", {fused: (layer, "weight")}, FAMILIES["qwen3_5"])
        assert part == (fused, partitions)
        assert find_rows(layer, partitions) == rows


def test_fused_layer_parts_occupy_consecutive_rows() -> None:
    layer = SimpleNamespace(output_partition_sizes=[4, 2, 2])  # query, key, value
    assert [find_rows(layer, slice(part, part + 1)) for part in range(3)] == [slice(0, 4), slice(4, 6), slice(6, 8)]
    vocabulary = SimpleNamespace(shard_indices=SimpleNamespace(num_org_elements=5))  # further rows are padding
    assert find_rows(vocabulary, None) == slice(0, 5)
    assert find_rows(SimpleNamespace(), None) == slice(None)


def test_engine_layer_names_separate_fused_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM puts attention and feed-forward block into separate layers: `layers.N` → layers 2 N and 2 N + 1."""
    # setuptools, which vLLM imports, would refuse a distutils that another test has imported.
    monkeypatch.setenv("SETUPTOOLS_USE_DISTUTILS", "stdlib")
    from vllm.model_executor.models.cosmos3_edge import Cosmos3EdgeForConditionalGeneration as VLLMModel

    family = FAMILIES["cosmos3_edge"]
    names = {
        "model.language_model.layers.1.self_attn.k_proj.weight": "layers.2.mixer.k_proj.weight",
        "model.language_model.layers.1.self_attn.o_proj.weight": "layers.2.mixer.o_proj.weight",
        "model.language_model.layers.1.mlp.fc1.weight": "layers.3.mixer.up_proj.weight",
        "model.language_model.layers.1.post_attention_layernorm.weight": "layers.3.norm.weight",
    }
    assert find_engine_names(VLLMModel, list(names), family) == [
        f"language_model.model.{name}" for name in names.values()
    ]
    assert find_engine_names(VLLMModel, ["model.visual.encoder.layers.0.self_attn.q_proj.bias"], family) == [
        "visual.encoder.encoder.layers.0.self_attn.q_proj.bias"
    ]
