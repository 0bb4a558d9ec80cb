"""The weights of a policy under the names of the model it was loaded from, and the deltas of its adapters."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from deepspeed import DeepSpeedEngine
from torch import Tensor, nn

from dsreason.engine.engine import gather_items, get_values, to_hf_name
from dsreason.models.lora import BASE, Delta, get_adapter_names, get_adapter_scales, is_adapter, to_base_name
from dsreason.models.nf4.layers import NF4Linear


@dataclass(frozen=True)
class Weight:
    """A parameter of the model, with the matrices A and B and the scale of its adapter if it has one."""

    name: str
    """Name in the Hugging Face model."""
    parameter: nn.Parameter
    adapter: tuple[nn.Parameter, ...] = ()
    scale: float = 0.0
    quantized: NF4Linear | None = None
    """The layer, if the parameter holds its weight in 4 bits."""

    @property
    def is_constant(self) -> bool:
        """Return whether training leaves the weight unchanged."""
        return not (self.adapter or self.parameter.requires_grad)

    def values(self, *, master: bool) -> Tensor:
        """Return the weight that the forward uses; with `master`, a float32 copy if it is trained. Collective.

        The parameter must be whole.
        """
        return get_values(self.parameter, master=master) if self.quantized is None else self.quantized.whole()


def list_weights(engine: DeepSpeedEngine) -> list[Weight]:
    """Return the weights in the model's order; tied ones once."""
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
            scales.get(name.removesuffix(f"{BASE}.weight"), 0.0),
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
    """Yield every weight except those in `without`, with its adapter merged into it, as a model without adapters has it.

    Each is computed from the loaded (or dequantised) weight, which stays unchanged. Otherwise the same as
    `iter_unmerged_parameters`.
    """
    for name, tensor, delta in iter_unmerged_parameters(engine, bucket_mb, without=without):
        yield name, tensor if delta is None else delta.add_to(tensor, tensor.dtype)


def iter_unmerged_parameters(
    engine: DeepSpeedEngine, bucket_mb: float = 512, *, master: bool = False, without: Collection[str] = ()
) -> Iterator[tuple[str, Tensor, Delta | None]]:
    """Yield every weight except those in `without`, whole, with its Hugging Face name and the delta of its adapter.

    All ranks must iterate to the end together. The tensors are the model's (with `master`, float32 copies of the trained
    ones) or the dequantised weight in the type of the forward, and are valid only until the next one is yielded. A weight and
    its adapter are whole together, at most about `bucket_mb` MiB at a time.
    """
    weights = [weight for weight in list_weights(engine) if weight.name not in without]
    for weight in gather_items([(weight, [weight.parameter, *weight.adapter]) for weight in weights], bucket_mb):
        delta = None
        if weight.adapter:
            a, b = (get_values(adapter_weight, master=master) for adapter_weight in weight.adapter)
            delta = Delta(a, b, weight.scale)
        yield weight.name, weight.values(master=master), delta
