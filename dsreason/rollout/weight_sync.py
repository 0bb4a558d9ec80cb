"""Weight sync into a vLLM engine, and the check that every tensor arrived: by name, then by fingerprint.

vLLM's `reload_weights` returns nothing and only warns about tensors that it did not load, so two checks are made here:

1. Every name and shape of the Hugging Face model must be sent exactly once, and nothing else (`WeightStream`); or it was
   sent before, is frozen, and the engine still holds it.
2. After loading, the count, the sum and the sum of squares (float64) of each sent tensor are compared with those of the
   rows that hold it in the engine (`check_arrival`): they differ if a tensor was dropped on the way or is an old one.
   Tensors that were not sent again are compared with their last sent values.

The fingerprint does not detect values that are permuted inside one tensor, or two tensors of equal sums. Parts of a fused
layer (query, key and value; gate and up) are compared separately, so swapped parts are detected.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from dsreason.families import Family
from dsreason.problems import join_first
from dsreason.rollout.protocol import SyncError

VLLMModule: TypeAlias = Any
"""An `nn.Module` of vLLM, with attributes that depend on its class."""
CHUNK = 2**24
"""Number of values that are converted to float64 at a time."""
TOLERANCE = 1e-12
"""Tolerance of a sum, relative to its upper bound: the order of addition changes it by less, one bfloat16 step by more."""


@dataclass(frozen=True)
class TensorSlot:
    """The place of a tensor, or of this rank's share of it, in the engine: some rows of a layer's parameter."""

    name: str
    """Name in the Hugging Face model."""
    engine_name: str
    layer: VLLMModule
    parameter: str
    rows: slice


@dataclass
class WeightStream:
    """The iterator that vLLM loads from: it passes on expected tensors and records the others as wrong.

    Tensors are copied to the engine's device: vLLM keeps the parts of a fused layer until all have arrived, and by then the
    gathered tensors are gone. `compute_fingerprints` starts with those of the tensors that the engine still holds, on the CPU;
    those of sent tensors are on the device until `finish`.
    """

    weights: Iterator[tuple[str, Tensor]]
    expected: dict[str, torch.Size]
    dtype: torch.dtype
    device: torch.device
    fingerprints: dict[str, Tensor] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self.weights:
            if name not in self.expected:
                self.wrong.append(f"{name} is unknown")
            elif tensor.shape != self.expected[name]:
                self.wrong.append(f"{name} has shape {tuple(tensor.shape)} instead of {tuple(self.expected[name])}")
            elif name in self.fingerprints:
                self.wrong.append(f"{name} came twice")
            else:
                copy = tensor.detach().to(self.device, self.dtype, copy=True)
                self.fingerprints[name] = compute_fingerprint(copy)
                yield name, copy

    def read_remaining(self) -> None:
        """Read the tensors that vLLM did not read, because every rank must take part in every gather."""
        for _ in self:
            pass

    def finish(self) -> None:
        """Raise SyncError if a tensor was wrong or is missing."""
        self.fingerprints = move_to_cpu(self.fingerprints)
        self.wrong += [f"{name} did not arrive" for name in self.expected if name not in self.fingerprints]
        raise_sync_error(self.wrong)


def raise_sync_error(wrong: list[str]) -> None:
    if wrong:
        raise SyncError(f"weight sync failed for {len(wrong)} tensors: {join_first(wrong)}")


def find_places(model: VLLMModule, names: list[str], family: Family) -> list[TensorSlot]:
    """Find the place of each tensor in vLLM's `model`; a tied output layer is a second place of the embedding.

    Raises:
        SyncError: a tensor has no place, or a parameter of the engine would get no tensor.
    """
    layers = dict(model.named_modules(remove_duplicate=False))
    parameters = {
        f"{layer_name}.{name}": (layer, name)
        for layer_name, layer in layers.items()
        for name, parameter in layer._parameters.items()
        if parameter is not None
    }
    places, wrong = [], []
    for name, engine_name in zip(names, find_engine_names(model, names, family), strict=True):
        engine_parameter, part = find_part(model, engine_name, parameters)
        if engine_parameter is None:
            wrong.append(f"{name} ({engine_name}) has no place in the engine")
            continue
        layer, parameter = parameters.pop(engine_parameter) if part is None else parameters[engine_parameter]
        places.append(TensorSlot(name, engine_parameter, layer, parameter, find_rows(layer, part)))
    fused = {place.engine_name for place in places}
    for engine_name, (layer, parameter) in parameters.items():
        twin = next((p for p in places if getattr(p.layer, p.parameter) is getattr(layer, parameter)), None)
        if engine_name in fused:
            continue
        if twin is None:
            wrong.append(f"the engine's {engine_name} gets its values from no tensor")
        else:
            places.append(TensorSlot(twin.name, engine_name, layer, parameter, find_rows(layer, None)))
    raise_sync_error(wrong)
    return places


def find_engine_names(model: VLLMModule, names: list[str], family: Family) -> list[str]:
    """Return vLLM's names for tensors of the model, with separate names for the parts of fused layers.

    vLLM's own table names the fused layer but not which part of it a tensor is.
    """
    engine_names: list[str] = replace(model.hf_to_vllm_mapper, orig_to_new_stacked={}).apply_list(
        [*map(family.to_exported_name, names)]
    )
    return engine_names


def find_part(
    model: VLLMModule, name: str, parameters: dict[str, tuple[VLLMModule, str]]
) -> tuple[str | None, int | None]:
    """Return the name of the engine's parameter; if it is fused, also the number of the part that `name` stands for."""
    if name in parameters:
        return name, None
    for fused, parts in model.packed_modules_mapping.items():
        for number, part in enumerate(parts):
            fused_name = name.replace(f".{part}.", f".{fused}.")
            if part != fused and fused_name != name and fused_name in parameters:
                return fused_name, number
    return None, None


def find_rows(layer: VLLMModule, part: int | None) -> slice:
    """Return the rows of this rank's weight that hold a part of a fused layer, or all rows but a vocabulary's padding."""
    if part is not None:
        sizes = layer.output_partition_sizes
        return slice(sum(sizes[:part]), sum(sizes[: part + 1]))
    if hasattr(layer, "shard_indices"):
        return slice(0, layer.shard_indices.num_org_elements)
    return slice(None)


def repair_tied_output(model: VLLMModule) -> None:
    """Repack the output weight on a CPU: vLLM computes logits from a copy that reloading a tied weight does not update."""
    for layer in model.modules():
        if is_output_layer(layer) and hasattr(layer, "cpu_linear"):
            layer.quant_method.process_weights_after_loading(layer)


def is_output_layer(layer: VLLMModule) -> bool:
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    return isinstance(layer, ParallelLMHead)


def find_complete_layers(places: list[TensorSlot], names: Collection[str]) -> set[str]:
    """Return those of `names` that fill whole layers together: vLLM reloads a layer completely or not at all."""
    names_by_layer: dict[VLLMModule, set[str]] = {}
    for place in places:
        names_by_layer.setdefault(place.layer, set()).add(place.name)
    names = set(names)
    while incomplete := {place.name for place in places if place.name in names and names_by_layer[place.layer] - names}:
        names -= incomplete
    return names


def check_arrival(places: list[TensorSlot], sent: dict[str, Tensor], group: dist.ProcessGroup) -> None:
    """Raise SyncError, naming the tensors, if the engine's weights differ from the fingerprints of the sent ones."""
    raise_sync_error(
        [
            f"{place.name} was sent, but the engine's {place.engine_name} holds other values"
            for place in find_different(places, sent, group)
        ]
    )


@torch.no_grad()
def find_different(places: list[TensorSlot], sent: dict[str, Tensor], group: dist.ProcessGroup) -> list[TensorSlot]:
    """Find the places whose values differ from those sent.

    Collective over the tensor-parallel `group`, whose shares are added up. A tensor that several ranks hold counts several
    times; the number of values shows how often.
    """
    if not places:
        return []
    fingerprints = torch.stack([compute_fingerprint(*iter_engine_values(place)) for place in places]).cpu()
    dist.all_reduce(fingerprints, group=group)
    return [
        place
        for place, numbers in zip(places, fingerprints, strict=True)
        if not is_same_fingerprint(numbers, sent[place.name])
    ]


def is_same_fingerprint(actual: Tensor, sent: Tensor) -> bool:
    """Return whether a fingerprint is that of the sent values, held once or several times."""
    (count, total, squares), (sent_count, sent_total, sent_squares) = actual.tolist(), sent.tolist()
    copies = count / sent_count if sent_count else 0
    return (
        copies >= 1
        and copies == int(copies)
        and abs(total - copies * sent_total) <= TOLERANCE * copies * math.sqrt(sent_count * sent_squares)
        and abs(squares - copies * sent_squares) <= TOLERANCE * copies * sent_squares
    )


def iter_engine_values(place: TensorSlot) -> Iterator[Tensor]:
    """Yield the values that the layer computes with, in blocks."""
    weight = getattr(place.layer, place.parameter)
    packed = getattr(place.layer, "cpu_linear", None)
    repacked = weight.numel() == 0 or is_output_layer(
        place.layer
    )  # an embedding reads rows of `weight` even if it repacked them
    if packed is None or not repacked or place.parameter != "weight":
        yield weight[place.rows]
        return
    # Only the layer's own kernel can read the repacked weight, so multiply unit vectors, which is exact.
    width = weight.shape[1] if weight.numel() else place.layer.input_size_per_partition
    for start in range(0, width, 1024):
        units = torch.zeros(min(1024, width - start), width, dtype=weight.dtype)
        units[:, start:].fill_diagonal_(1)
        yield packed(units, weight, None)[:, place.rows]


def compute_fingerprint(*blocks: Tensor) -> Tensor:
    """Compute the number of values, their sum and the sum of their squares: `[3]`, float64, on the device of the values.

    The computation does not wait for the device.
    """
    numbers = torch.zeros(3, dtype=torch.float64, device=blocks[0].device)
    for chunk in (chunk.double() for block in blocks for chunk in block.detach().reshape(-1).split(CHUNK)):
        numbers[0] += chunk.numel()
        numbers[1] += chunk.sum()
        numbers[2] += chunk.square().sum()
    return numbers


def move_to_cpu(numbers: dict[str, Tensor]) -> dict[str, Tensor]:
    """Move the fingerprints to the CPU, with one transfer per device."""
    names_by_device: dict[torch.device, list[str]] = {}
    for name, values in numbers.items():
        names_by_device.setdefault(values.device, []).append(name)
    cpu_numbers = {
        name: values
        for names in names_by_device.values()
        for name, values in zip(names, torch.stack([numbers[name] for name in names]).cpu(), strict=True)
    }
    return {name: cpu_numbers[name] for name in numbers}


@torch.no_grad()
def compute_fingerprints(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Compute the fingerprints of named tensors, on the CPU."""
    return move_to_cpu({name: compute_fingerprint(tensor) for name, tensor in tensors})


def find_changed(before: dict[str, Tensor], after: dict[str, Tensor]) -> list[str]:
    """Return the names whose fingerprints differ. Equal infinities and NaN count as unchanged, as constants may hold them."""
    unchanged = {
        name
        for name in before.keys() & after.keys()
        if torch.allclose(before[name], after[name], rtol=0, atol=0, equal_nan=True)
        or is_same_fingerprint(after[name], before[name])
    }
    return [name for name in before | after if name not in unchanged]
