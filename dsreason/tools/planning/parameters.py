"""Parameters of a model, counted on the meta device: the size and kind of each, and whether it is trained."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import torch
from torch import nn

from dsreason.config.schema import RunConfig
from dsreason.families import Family, get_family
from dsreason.models.freeze import check_freeze
from dsreason.models.load import build_empty_model
from dsreason.models.lora import find_adapted_layers
from dsreason.models.nf4.blocks import ROW_BYTES, count_blocks
from dsreason.models.nf4.layers import check_experts, is_quantized
from dsreason.monitor.flops import get_active_share
from dsreason.tools.planning.architecture import Architecture

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BLOCK = re.compile(r".*\.(?:(?:layers|blocks|deepstack_merger_list)\.\d+|merger|projector)\.")
"""Pattern of the part of a parameter's name that identifies its block."""
Kind = Literal["trained", "frozen", "adapter", "nf4"]


@dataclass(frozen=True)
class PlannedParameter:
    name: str
    numel: int
    """Number of values; for a 4-bit parameter, the number before quantization."""
    kind: Kind
    bytes_each: int
    active_share: float = 1.0
    """Fraction of the values that is used for a token, which is below 1 only for experts."""

    @property
    def is_trained(self) -> bool:
        return self.kind in ("trained", "adapter")

    @property
    def elements(self) -> int:
        """Number of elements that ZeRO-3 shards: the values, or the bytes of a 4-bit parameter."""
        return count_blocks(torch.Size([self.numel])) * ROW_BYTES if self.kind == "nf4" else self.numel

    @property
    def nbytes(self) -> int:
        return self.elements * (1 if self.kind == "nf4" else self.bytes_each)

    def share(self, ranks: int) -> int:
        """Return the bytes of one rank's shard; the last shard is padded to the same size."""
        return -(-self.elements // ranks) * (1 if self.kind == "nf4" else self.bytes_each)


@dataclass(frozen=True)
class Parameters:
    """All parameters of a model; tied parameters are listed once."""

    all: tuple[PlannedParameter, ...]

    @cached_property
    def blocks(self) -> dict[str, int]:
        """Bytes of each decoder layer and vision block, the units that ZeRO-3 gathers."""
        return sum_blocks(self.all, lambda parameter: parameter.nbytes)

    @cached_property
    def trained_blocks(self) -> dict[str, int]:
        """Number of trained values in each decoder layer and vision block."""
        return sum_blocks(self.trained, lambda parameter: parameter.numel)

    @property
    def whole_bytes(self) -> int:
        """Maximum number of bytes that ZeRO-3 gathers at a time: the largest block, or a larger parameter outside the blocks."""
        return max(*self.blocks.values(), *(parameter.nbytes for parameter in self.all))

    @cached_property
    def numel(self) -> int:
        """Number of values in the model, not counting adapters."""
        return sum(parameter.numel for parameter in self.all if parameter.kind != "adapter")

    @cached_property
    def num_active(self) -> int:
        """Number of values in the model that are used for a token, not counting adapters."""
        return sum(
            round(parameter.numel * parameter.active_share) for parameter in self.all if parameter.kind != "adapter"
        )

    @cached_property
    def trained(self) -> tuple[PlannedParameter, ...]:
        return tuple(parameter for parameter in self.all if parameter.is_trained)

    @cached_property
    def num_trained(self) -> int:
        return sum(parameter.numel for parameter in self.trained)

    def count_kind(self, kind: Kind) -> int:
        return sum(parameter.numel for parameter in self.all if parameter.kind == kind)

    def count_trained_share(self, ranks: int) -> int:
        """Count the values in one rank's shards of the trained parameters."""
        return sum(-(-parameter.numel // ranks) for parameter in self.trained)

    def largest(self, among: Callable[[PlannedParameter], bool] = lambda one: True) -> int:
        """Return the number of values in the largest parameter that `among` accepts; 0 if it accepts none."""
        return max((parameter.numel for parameter in self.all if among(parameter)), default=0)


def sum_blocks(parameters: Iterable[PlannedParameter], size: Callable[[PlannedParameter], int]) -> dict[str, int]:
    """Return the total size of each block's parameters: prefix of the parameter names → size."""
    sizes: Counter[str] = Counter()
    for parameter in parameters:
        if match := BLOCK.match(parameter.name):
            sizes[match[0]] += size(parameter)
    return dict(sizes)


def build_meta_model(architecture: Architecture, config: RunConfig) -> PreTrainedModel:
    """Build the model on the meta device, where tensors occupy no memory."""
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[config.train.precision]
    return build_empty_model(architecture.config, dtype, "auto", config.model.trust_remote_code)


def count_parameters(model: PreTrainedModel, config: RunConfig) -> Parameters:
    """Count the parameters of a model, and determine which of them the run trains, freezes or quantizes.

    Raises:
        ConfigError: a pattern in `model.freeze` or `lora.targets` matches nothing.
    """
    family = get_family(model.config.model_type)
    if config.model.quantize:
        check_experts(family)
    named_parameters = dict(model.named_parameters())
    frozen = set(named_parameters) if config.lora.rank else check_freeze(named_parameters, config.model.freeze)
    width = next(iter(named_parameters.values())).element_size()

    def get_kind(name: str) -> Kind:
        if config.model.quantize and is_nf4(name, model, family):
            return "nf4"
        return "frozen" if name in frozen else "trained"

    parameters = [
        PlannedParameter(
            name,
            tensor.numel(),
            get_kind(name),
            width,
            get_active_share(name, family.modules, model.config.get_text_config()),
        )
        for name, tensor in named_parameters.items()
    ]
    if config.lora.rank:
        parameters += list_adapter_parameters(model, config, find_adapted_layers(model, config.lora), width)
    return Parameters(tuple(parameters))


def is_nf4(name: str, model: nn.Module, family: Family) -> bool:
    linear = type(model.get_submodule(name.rpartition(".")[0])) is nn.Linear
    return linear and is_quantized(name, family.modules.text_layers)


def list_adapter_parameters(
    model: nn.Module, config: RunConfig, layers: Iterable[str], width: int
) -> list[PlannedParameter]:
    """List the matrices A `[rank, in]` and B `[out, rank]` of each adapted layer; experts have a pair each."""
    adapters = []
    parameters = dict(model.named_parameters())
    for name in layers:
        shape = (parameters[name] if name in parameters else parameters[f"{name}.weight"]).shape
        *experts, outputs, inputs = shape
        ranks = (rank for pattern, rank in config.lora.rank_pattern.items() if re.search(pattern, name))
        rank = next(ranks, config.lora.rank) * math.prod(experts)
        adapters.append(PlannedParameter(f"{name}.lora_A", rank * inputs, "adapter", width))
        adapters.append(PlannedParameter(f"{name}.lora_B", rank * outputs, "adapter", width))
    return adapters
