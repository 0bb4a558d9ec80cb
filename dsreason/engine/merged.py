"""Functions that list the policy's weights by their names in the original model, and merge adapters into them."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from deepspeed import DeepSpeedEngine
from torch import Tensor, nn

from dsreason.engine.engine import gather_items, get_values, to_hf_name
from dsreason.models.lora import (
    Delta,
    get_adapted_layer,
    get_adapter_names,
    get_adapter_scales,
    is_adapter,
    to_base_name,
)
from dsreason.models.nf4.layers import NF4Linear


@dataclass(frozen=True)
class Weight:
    """A parameter of the model and, if it has an adapter, the adapter's matrices A and B and its scale."""

    name: str
    """Name in the Hugging Face model."""
    parameter: nn.Parameter
    adapter: tuple[nn.Parameter, ...] = ()
    scale: float = 0.0
    quantized: NF4Linear | None = None
    """Layer that stores the weight in 4 bits; None if the weight is not quantised."""

    @property
    def is_constant(self) -> bool:
        """Whether training leaves the weight unchanged."""
        return not (self.adapter or self.parameter.requires_grad)

    def values(self, *, master: bool) -> Tensor:
        """Return the weight that the forward pass uses; if `master` is set and the weight is trained, return a float32 copy.

        All ranks must call this method together, while the parameter is gathered.
        """
        return get_values(self.parameter, master=master) if self.quantized is None else self.quantized.whole()


def list_weights(engine: DeepSpeedEngine) -> list[Weight]:
    """Return the weights in the model's order; tied weights appear once."""
    parameters = {to_hf_name(name): parameter for name, parameter in engine.module.named_parameters()}
    scales = {to_hf_name(name): scale for name, scale in get_adapter_scales(engine.module).items()}
    quantized = {
        f"{to_hf_name(name)}.weight": module
        for name, module in engine.module.named_modules()
        if isinstance(module, NF4Linear)
    }
    return [
        Weight(
            to_base_name(name),
            parameter,
            tuple(parameters[adapter_name] for adapter_name in get_adapter_names(name)),
            scales.get(get_adapted_layer(name) or "", 0.0),
            quantized.get(name),
        )
        for name, parameter in parameters.items()
        if not is_adapter(name)
    ]


def list_constant_names(engine: DeepSpeedEngine) -> list[str]:
    """Return the names of the weights that training leaves unchanged."""
    return [weight.name for weight in list_weights(engine) if weight.is_constant]


def iter_merged_parameters(
    engine: DeepSpeedEngine, bucket_mb: float = 512, *, without: Collection[str] = ()
) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and the tensor of every weight that is not in `without`, with its adapter merged into the tensor.

    A merged tensor is a copy; the model's own weight does not change. Otherwise, this works like `iter_unmerged_parameters`.
    """
    for name, tensor, delta in iter_unmerged_parameters(engine, bucket_mb, without=without):
        yield name, tensor if delta is None else delta.merge_with(tensor, tensor.dtype)


def iter_unmerged_parameters(
    engine: DeepSpeedEngine, bucket_mb: float = 512, *, master: bool = False, without: Collection[str] = ()
) -> Iterator[tuple[str, Tensor, Delta | None]]:
    """Yield the Hugging Face name, the full tensor and the adapter's delta (or None) of every weight that is not in `without`.

    All ranks must exhaust the iterator together. The tensors belong to the model; with `master`, trained weights are float32
    copies instead. A quantised weight is dequantised to the type that the forward pass uses. A tensor is valid only until the
    next one is yielded. Weights are gathered together with their adapters, at most about `bucket_mb` MiB at a time.
    """
    weights = [weight for weight in list_weights(engine) if weight.name not in without]
    for weight in gather_items([(weight, [weight.parameter, *weight.adapter]) for weight in weights], bucket_mb):
        delta = None
        if weight.adapter:
            a, b = (get_values(adapter_weight, master=master) for adapter_weight in weight.adapter)
            delta = Delta(a, b, weight.scale)
        yield weight.name, weight.values(master=master), delta
