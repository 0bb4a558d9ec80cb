"""Weight sync to a vLLM engine, with checks of names and fingerprints that every tensor arrived.

vLLM's `reload_weights` returns nothing and only warns about tensors that it did not load, so this module makes two checks:

1. Every tensor of the Hugging Face model must be sent exactly once, with the right shape, and no other tensor may be sent
   (`WeightStream`). Frozen tensors may be omitted if an earlier sync sent them and the engine still holds them.
2. After loading, the fingerprint of each sent tensor is compared with the fingerprint of the engine's rows for this tensor
   (`check_arrival`). The two differ if the tensor was lost or the engine holds old values. A fingerprint consists of the
   number of values, their sum and the sum of their squares, in float64. Tensors that were omitted are compared with the
   values that were last sent.

Fingerprints do not reveal that values within a tensor were permuted, or that tensors with equal sums were swapped. The parts
of a fused layer (query, key and value; gate and up) are compared separately, so swapped parts are detected.
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
"""Type of vLLM's modules: an `nn.Module` whose attributes depend on its class."""
CHUNK = 2**24
"""Number of values that are converted to float64 at a time."""
TOLERANCE = 1e-12
"""Tolerance of a sum, relative to its upper bound. A different order of addition changes a sum by less, and a difference of one
bfloat16 step changes it by more."""

EXPERTS = {"gate_up_proj": "w13_weight", "down_proj": "w2_weight"}
"""Names of the parameters that hold all experts of a layer: in the Hugging Face model → in vLLM."""


@dataclass(frozen=True)
class TensorSlot:
    """Rows of an engine parameter that hold a tensor of the model, or this rank's shard of the tensor."""

    name: str
    """Name in the Hugging Face model."""
    engine_name: str
    layer: VLLMModule
    parameter: str
    rows: slice


@dataclass
class WeightStream:
    """Iterator from which vLLM loads weights. It yields copies of expected tensors, and records unexpected ones in `wrong`.

    The copies are on the engine's device. Copies are needed because vLLM keeps the parts of a fused layer until all parts have
    arrived, whereas gathered tensors are freed earlier. `fingerprints` initially contains the fingerprints of tensors that the
    engine still holds; those of sent tensors are added, and stay on the device until `finish` moves them to the CPU.
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
                self.wrong.append(f"{name} was sent twice")
            else:
                copy = tensor.detach().to(self.device, self.dtype, copy=True)
                self.fingerprints[name] = compute_fingerprint(copy)
                yield name, copy

    def read_remaining(self) -> None:
        """Consume the tensors that vLLM did not read, because every rank must take part in gathering every tensor."""
        for _ in self:
            pass

    def finish(self) -> None:
        """Raise SyncError if any tensor is wrong or missing."""
        self.fingerprints = move_to_cpu(self.fingerprints)
        self.wrong += [f"{name} did not arrive" for name in self.expected if name not in self.fingerprints]
        raise_sync_error(self.wrong)


def raise_sync_error(wrong: list[str]) -> None:
    if wrong:
        raise SyncError(f"weight sync failed for {len(wrong)} tensors: {join_first(wrong)}")


def find_slots(model: VLLMModule, names: list[str], family: Family) -> list[TensorSlot]:
    """Find the slot of each tensor in vLLM's `model`. A tied output layer is a second slot for the embedding.

    Raises:
        SyncError: a tensor has no slot, or a parameter of the engine would get no tensor.
    """
    layers = dict(model.named_modules(remove_duplicate=False))
    parameters = {
        f"{layer_name}.{name}": (layer, name)
        for layer_name, layer in layers.items()
        for name, parameter in layer._parameters.items()
        if parameter is not None
    }
    slots, wrong = [], []
    for name, engine_name in zip(names, find_engine_names(model, names, family), strict=True):
        engine_parameter, part = find_part(model, engine_name, parameters, family)
        if engine_parameter is None:
            wrong.append(f"{name} ({engine_name}) has no parameter in the engine")
            continue
        layer, parameter = parameters.pop(engine_parameter) if part is None else parameters[engine_parameter]
        slots.append(TensorSlot(name, engine_parameter, layer, parameter, find_rows(layer, part)))
    fused = {slot.engine_name for slot in slots}
    for engine_name, (layer, parameter) in parameters.items():
        twin = next((p for p in slots if getattr(p.layer, p.parameter) is getattr(layer, parameter)), None)
        if engine_name in fused:
            continue
        if twin is None:
            wrong.append(f"the engine's {engine_name} receives no tensor")
        else:
            slots.append(TensorSlot(twin.name, engine_name, layer, parameter, find_rows(layer, None)))
    raise_sync_error(wrong)
    return slots


def find_engine_names(model: VLLMModule, names: list[str], family: Family) -> list[str]:
    """Convert the names of the model's tensors to vLLM's names, with separate names for the parts of fused layers.

    vLLM's mapping yields only the name of the fused layer, not the part to which the tensor belongs. The fused name is needed as
    well, because some of the mapping's rules apply only to it.
    """
    mapper = model.hf_to_vllm_mapper
    exported_names = [*map(family.to_exported_name, names)]
    unfused_names = replace(mapper, orig_to_new_stacked={}).apply_list(exported_names)
    engine_names = []
    for unfused_name, engine_name in zip(unfused_names, mapper.apply_list(exported_names), strict=True):
        for part, (fused, _) in mapper.orig_to_new_stacked.items():
            if part in unfused_name:
                engine_name = engine_name.replace(get_last_part(fused), get_last_part(part))
        engine_names.append(engine_name)
    return engine_names


def get_last_part(path: str) -> str:
    """Return the last component of a dotted path: `.self_attn.q_proj` → `q_proj`."""
    return path.strip(".").rpartition(".")[2]


def find_part(
    model: VLLMModule, name: str, parameters: dict[str, tuple[VLLMModule, str]], family: Family
) -> tuple[str | None, slice | None]:
    """Return the engine parameter that holds `name` (None if not found), and its partitions (None if not fused)."""
    if name in parameters:
        return name, None
    layer, _, parameter = name.rpartition(".")
    if layer.endswith(".experts") and parameter in EXPERTS:
        for owner in (f"{layer}.routed_experts", layer):  # vLLM 0.26 has no module `routed_experts`
            if f"{owner}.{EXPERTS[parameter]}" in parameters:
                return f"{owner}.{EXPERTS[parameter]}", None
    for fused, parts in model.packed_modules_mapping.items():
        first = 0
        for part in parts:
            end = first + family.vllm_partitions.get(part, 1)
            fused_name = name.replace(f".{part}.", f".{fused}.")
            if part != fused and fused_name != name and fused_name in parameters:
                return fused_name, slice(first, end)
            first = end
    return None, None


def find_rows(layer: VLLMModule, part: slice | None) -> slice:
    """Return the rows of this rank's weight that hold `part` (partitions) of a fused layer; if it is None, all except padding."""
    if part is not None:
        sizes = layer.output_partition_sizes
        return slice(sum(sizes[: part.start]), sum(sizes[: part.stop]))
    if hasattr(layer, "shard_indices"):
        return slice(0, layer.shard_indices.num_org_elements)
    return slice(None)


def repair_tied_output(model: VLLMModule) -> None:
    """On a CPU, repack the output weight, because vLLM computes logits with a copy that a reload of a tied weight misses."""
    for layer in model.modules():
        if is_output_layer(layer) and hasattr(layer, "cpu_linear"):
            layer.quant_method.process_weights_after_loading(layer)


def is_output_layer(layer: VLLMModule) -> bool:
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    return isinstance(layer, ParallelLMHead)


def find_complete_layers(slots: list[TensorSlot], names: Collection[str]) -> set[str]:
    """Return the names whose layers have all their tensors in `names`, because vLLM cannot reload a layer partially."""
    names_by_layer: dict[VLLMModule, set[str]] = {}
    for slot in slots:
        names_by_layer.setdefault(slot.layer, set()).add(slot.name)
    names = set(names)
    while incomplete := {slot.name for slot in slots if slot.name in names and names_by_layer[slot.layer] - names}:
        names -= incomplete
    return names


def find_expert_layers(slots: list[TensorSlot], names: Collection[str]) -> set[VLLMModule]:
    """Return the layers that hold the experts among the tensors in `names`."""
    return {slot.layer for slot in slots if slot.name in names and slot.parameter in EXPERTS.values()}


def check_arrival(slots: list[TensorSlot], sent: dict[str, Tensor], group: dist.ProcessGroup) -> None:
    """Raise SyncError, naming the tensors, if fingerprints of the engine's weights differ from those of the sent tensors."""
    raise_sync_error(
        [
            f"{slot.name} was sent, but the engine's {slot.engine_name} holds different values"
            for slot in find_different(slots, sent, group)
        ]
    )


@torch.no_grad()
def find_different(slots: list[TensorSlot], sent: dict[str, Tensor], group: dist.ProcessGroup) -> list[TensorSlot]:
    """Return the slots whose values differ from the sent values. All ranks of the tensor-parallel `group` must call this.

    The fingerprints of the group's shards are added up. A tensor that several ranks hold counts several times, which the number
    of values reveals.
    """
    if not slots:
        return []
    fingerprints = torch.stack([compute_fingerprint(*iter_engine_values(slot)) for slot in slots]).cpu()
    dist.all_reduce(fingerprints, group=group)
    return [
        slot
        for slot, numbers in zip(slots, fingerprints, strict=True)
        if not is_same_fingerprint(numbers, sent[slot.name])
    ]


def is_same_fingerprint(actual: Tensor, sent: Tensor) -> bool:
    """Return whether `actual` is the fingerprint of one or more copies of the sent values."""
    (count, total, squares), (sent_count, sent_total, sent_squares) = actual.tolist(), sent.tolist()
    copies = count / sent_count if sent_count else 0
    return (
        copies >= 1
        and copies == int(copies)
        and abs(total - copies * sent_total) <= TOLERANCE * copies * math.sqrt(sent_count * sent_squares)
        and abs(squares - copies * sent_squares) <= TOLERANCE * copies * sent_squares
    )


def iter_engine_values(slot: TensorSlot) -> Iterator[Tensor]:
    """Yield the values that an engine layer uses for a slot, in blocks."""
    weight = getattr(slot.layer, slot.parameter)
    packed = getattr(slot.layer, "cpu_linear", None)
    repacked = weight.numel() == 0 or is_output_layer(
        slot.layer
    )  # an embedding reads rows of `weight` even if vLLM repacked it
    if packed is None or not repacked or slot.parameter != "weight":
        yield weight[slot.rows]
        return
    # Only the layer's kernel can read the repacked weight, so the weight is multiplied by unit vectors, which is exact.
    replicated = not hasattr(slot.layer, "input_size_per_partition")
    inputs = slot.layer.input_size if replicated else slot.layer.input_size_per_partition
    width = weight.shape[1] if weight.numel() else inputs
    for start in range(0, width, 1024):
        units = torch.zeros(min(1024, width - start), width, dtype=weight.dtype)
        units[:, start:].fill_diagonal_(1)
        yield packed(units, weight, None)[:, slot.rows]


def compute_fingerprint(*blocks: Tensor) -> Tensor:
    """Compute a fingerprint, float64 `[3]` on the values' device: number of values, sum, and sum of squares.

    The function does not wait for the device.
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
    """Compute the fingerprints of named tensors and move them to the CPU."""
    return move_to_cpu({name: compute_fingerprint(tensor) for name, tensor in tensors})


def find_changed(before: dict[str, Tensor], after: dict[str, Tensor]) -> list[str]:
    """Return the names whose fingerprints differ. Equal infinities and NaNs count as unchanged, as constants may contain them."""
    unchanged = {
        name
        for name in before.keys() & after.keys()
        if torch.allclose(before[name], after[name], rtol=0, atol=0, equal_nan=True)
        or is_same_fingerprint(after[name], before[name])
    }
    return [name for name in before | after if name not in unchanged]
