"""Low-rank adapters on a Hugging Face model, by peft's own modules: put in place, and what they add to the weights."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dsreason.config.schema_lora import LoRAConfig
from dsreason.errors import ConfigError, DsReasonError
from dsreason.families import family_of
from dsreason.job.ranks import gather_objects
from dsreason.models.freeze import near_names
from dsreason.monitor.flops import num_values

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ADAPTER = "default"
"""peft's name of the only adapter."""
BASE = ".base_layer"
"""In the names of a layer's own parameters, once it has an adapter."""
A, B = f".lora_A.{ADAPTER}.weight", f".lora_B.{ADAPTER}.weight"
"""What the names of an adapter's two matrices end with."""


def adapted_layers(model: PreTrainedModel, lora: LoRAConfig) -> list[str]:
    """Names of the linear layers that get an adapter, in the model's order.

    Raises:
        ConfigError: every pattern that is empty, finds no linear layer, with names to choose from, or finds the output layer.
    """
    family = family_of(model.config.model_type)
    modules = family.modules
    if lora.vision and family.vision is None:
        raise ConfigError(f"lora.vision is true, and {family.name} has no vision tower; set it to false")
    kinds = {name: type(module).__name__ for name, module in model.named_modules() if name}
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    targets: set[str] = set()
    problems = []
    for pattern in [*(lora.targets or [modules.text_layers]), *([modules.vision_layers] if lora.vision else [])]:
        matches = {name for name in linear if re.search(pattern, name)}
        if not pattern:
            problems.append("lora.targets holds an empty pattern, which would match every layer; remove it")
        elif modules.head in matches:
            tied = ", which is the embedding as well (tie_word_embeddings)" if model.config.tie_word_embeddings else ""
            problems.append(
                f"lora.targets pattern '{pattern}' matches {modules.head}, the output layer{tied}: it cannot have an adapter; "
                "let the pattern name the layers below it"
            )
        elif not matches:
            problems.append(f"lora.targets pattern '{pattern}' {nothing_found(pattern, kinds, linear)}")
        targets |= matches
    if problems:
        raise ConfigError("\n".join(problems))
    for key, patterns in (("rank_pattern", lora.rank_pattern), ("alpha_pattern", lora.alpha_pattern)):
        for pattern in patterns:
            if not pattern or not any(re.search(pattern, name) for name in targets):
                raise ConfigError(
                    f"lora.{key}: '{pattern}' matches none of the {len(targets)} layers that get an adapter"
                )
    return [name for name in linear if name in targets]


def nothing_found(pattern: str, kinds: Mapping[str, str], linear: list[str]) -> str:
    """Return why a pattern finds no linear layer. `kinds`: the type of every module by its name."""
    of_another_kind = [
        f"{name} ({kind})" for name, kind in kinds.items() if re.search(pattern, name) and name not in linear
    ]
    if of_another_kind:
        return f"matches no linear layer, which alone can have an adapter, but {', '.join(of_another_kind[:3])}"
    return f"matches none of {len(linear)} linear layers; near: {', '.join(near_names(pattern, linear))}"


def add_adapters(model: PreTrainedModel, lora: LoRAConfig, *, seed: int) -> None:
    """Give layers of `model` adapters, which alone are trained; its output does not change yet.

    Their first values depend on `seed` only, whatever the number of ranks. Under ZeRO-3 they are whole on every rank until
    the engine is built, and each rank then keeps its part of what it has drawn: `check_alike` comes before.

    ConfigError: of `adapted_layers`.
    """
    from peft import LoraConfig as PeftConfig  # only where it is used: it takes seconds
    from peft import inject_adapter_in_model

    settings = PeftConfig(
        task_type="CAUSAL_LM",
        r=lora.rank,
        lora_alpha=plain(lora.scale),
        lora_dropout=lora.dropout,
        target_modules=adapted_layers(model, lora),
        use_rslora=lora.rslora,
        rank_pattern={found_by_peft(pattern): rank for pattern, rank in lora.rank_pattern.items()},
        alpha_pattern={found_by_peft(pattern): plain(alpha) for pattern, alpha in lora.alpha_pattern.items()},
    )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        inject_adapter_in_model(settings, model, ADAPTER)


def adapter_settings(model: Any) -> dict[str, Any]:
    """peft's settings of a model's adapters as JSON values, as they stand in an adapter_config.json."""
    settings = model.peft_config[ADAPTER].to_dict() | {"inference_mode": True}
    return {name: sorted(value) if isinstance(value, set) else value for name, value in settings.items()}


def plain(number: float) -> float:
    """16.0 as 16, as people write it in peft's files, and some readers expect it."""
    return int(number) if float(number).is_integer() else number


def found_by_peft(pattern: str) -> str:
    """For peft, which looks whether a name ends with a pattern, one that is searched in the name."""
    return f".*(?:{pattern}).*"


def check_alike(model: nn.Module) -> None:
    """DsReasonError on every rank unless all have the same trained parameters, which must be whole yet. Collective."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            values = parameter.detach().cpu().contiguous().view(-1).view(torch.uint8)
            digest.update(f"{name} ".encode() + values.numpy().tobytes())
    digests = gather_objects(digest.hexdigest())
    if other := [rank for rank, rank_digest in enumerate(digests) if rank_digest != digests[0]]:
        raise DsReasonError(
            f"the adapters of rank {', '.join(map(str, other))} began with other values than those of rank 0: the ranks have "
            "other versions of torch or peft, or another configuration; start all from the same environment"
        )


def trained_share(model: nn.Module) -> str:
    """For the log: how many layers have an adapter, and how much is trained. Parameters may be cut."""
    layers = len(adapters(model))
    sizes = [
        (num_values(model, name, parameter), parameter.requires_grad) for name, parameter in model.named_parameters()
    ]
    trained, base = (
        sum(size for size, is_trained in sizes if is_trained is counts_trained) for counts_trained in (True, False)
    )
    return (
        f"adapters on {layers} linear layers: {trained:,} parameters are trained, {trained / base:.2%} of the model's "
        f"{base:,}, which stay as they are"
    )


@dataclass(frozen=True)
class Delta:
    """What an adapter adds to a weight `[out, in]`: `scale · b @ a`."""

    a: Tensor
    """`[rank, in]`."""
    b: Tensor
    """`[out, rank]`."""
    scale: float

    def added_to(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """The merged weight in `dtype`, rounded once; `weight` stays as it is. With a zero `b` it has the very same bits."""
        if not self.b.any():
            return weight.to(dtype)
        return torch.addmm(weight.float(), self.b.float(), self.a.float(), alpha=self.scale).to(dtype)

    def relative_to(self, weight: Tensor) -> float:
        """‖delta‖ / ‖weight‖, from products of rank x rank values alone."""
        a, b = self.a.double(), self.b.double()
        squared = float(((b.T @ b) * (a @ a.T)).sum())
        return abs(self.scale) * math.sqrt(max(squared, 0.0)) / max(float(weight.double().norm()), 1e-30)


def base_name(name: str) -> str:
    """A parameter's name in a model without adapters: `….q_proj.base_layer.weight` → `….q_proj.weight`."""
    return name.replace(f"{BASE}.", ".")


def is_adapter(name: str) -> bool:
    return name.endswith((A, B))


def adapter_names(name: str) -> tuple[str, ...]:
    """Names of the matrices A and B that belong to a layer's own weight; none of a parameter without an adapter."""
    layer = name.removesuffix(f"{BASE}.weight")
    return () if layer == name else (layer + A, layer + B)


def adapter_scales(model: nn.Module) -> dict[str, float]:
    """The factor of each adapter, by the name of its layer."""
    return {name: module.scaling[ADAPTER] for name, module in adapters(model).items()}


def adapters(model: nn.Module) -> dict[str, Any]:
    """peft's layers by name; they hold the layer itself (`base_layer`), and beside it the adapter."""
    endings = tuple(name.removesuffix(A) for name, _ in model.named_parameters() if name.endswith(A))
    return {name: model.get_submodule(name) for name in endings}


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Inside, the forward is the base model's. Nothing may be trained there."""
    layers = adapters(model).values()
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)
