"""LoRA adapters for a Hugging Face model, which are built from peft's modules, and the deltas that adapters add to weights."""

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
from dsreason.families import get_family
from dsreason.job.ranks import gather_objects
from dsreason.models.freeze import find_similar_names
from dsreason.monitor.flops import count_values

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ADAPTER = "default"
"""Name of the adapter in peft; a model has only one adapter."""
BASE = ".base_layer"
"""String that peft inserts into the names of a layer's original parameters when the layer gets an adapter."""
INNER_EXPERTS = "gate_up_proj"
"""Parameter of the experts that gets its adapter first."""
OUTER_EXPERTS = "down_proj"
"""Parameter of the experts that gets its adapter second."""
A, B = f".lora_A.{ADAPTER}.weight", f".lora_B.{ADAPTER}.weight"
"""Suffixes of the names of an adapter's two matrices."""


def find_adapted_layers(model: PreTrainedModel, lora: LoRAConfig) -> list[str]:
    """Return the names of the linear layers and of the experts' parameters that the configuration selects for adapters.

    Raises:
        ConfigError: a pattern is empty, matches no such layer or matches the output layer (the message lists all such patterns,
            with similar names); the patterns match only one of the two parameters of a layer's experts; there is dropout for
            experts.
    """
    family = get_family(model.config.model_type)
    modules = family.modules
    if lora.vision and family.vision is None:
        raise ConfigError(f"lora.vision is true, but {family.name} has no vision tower; set lora.vision = false")
    kinds = {name: type(module).__name__ for name, module in model.named_modules() if name}
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    experts = [name for name, _ in model.named_parameters() if modules.is_expert(name)]
    targets: set[str] = set()
    problems = []
    for pattern in [*(lora.targets or [modules.text_layers]), *([modules.vision_layers] if lora.vision else [])]:
        matches = {name for name in (*linear, *experts) if re.search(pattern, name)}
        if not pattern:
            problems.append("lora.targets contains an empty pattern, which would match every layer; remove it")
        elif modules.head in matches:
            tied = ", which is also the embedding (tie_word_embeddings)" if model.config.tie_word_embeddings else ""
            problems.append(
                f"lora.targets pattern '{pattern}' matches {modules.head}, the output layer{tied}, but it cannot have an "
                "adapter; restrict the pattern to the layers below it"
            )
        elif not matches:
            problems.append(f"lora.targets pattern '{pattern}' {describe_no_match(pattern, kinds, linear)}")
        targets |= matches
    if problems:
        raise ConfigError("\n".join(problems))
    for key, patterns in (("rank_pattern", lora.rank_pattern), ("alpha_pattern", lora.alpha_pattern)):
        for pattern in patterns:
            if not pattern or not any(re.search(pattern, name) for name in targets):
                raise ConfigError(
                    f"lora.{key}: '{pattern}' matches none of the {len(targets)} layers that get an adapter; correct the "
                    "pattern"
                )
    check_expert_targets(targets, experts, lora)
    return [name for name in (*linear, *experts) if name in targets]


def check_expert_targets(targets: set[str], experts: list[str], lora: LoRAConfig) -> None:
    """Raise ConfigError if adapters cannot be added to the experts among the `targets`."""
    adapted = [name for name in experts if name in targets]
    modules = {name.rpartition(".")[0] for name in adapted}
    if missing := [name for name in experts if name not in targets and name.rpartition(".")[0] in modules]:
        raise ConfigError(
            f"lora.targets matches {adapted[0]}, but not {missing[0]}; use a pattern that matches both parameters of a layer's "
            r"experts, such as mlp\.experts, or neither"
        )
    if adapted and lora.dropout:
        raise ConfigError(f"lora.dropout ({lora.dropout}) does not apply to experts, such as {adapted[0]}; set it to 0")


def describe_no_match(pattern: str, kinds: Mapping[str, str], linear: list[str]) -> str:
    """Describe why a pattern matches no linear layer. `kinds` maps the name of every module to its type."""
    other_modules = [
        f"{name} ({kind})" for name, kind in kinds.items() if re.search(pattern, name) and name not in linear
    ]
    if other_modules:
        return f"matches {', '.join(other_modules[:3])}, but only linear layers can have an adapter"
    return (
        f"matches none of {len(linear)} linear layers; similar names: {', '.join(find_similar_names(pattern, linear))}"
    )


def add_adapters(model: PreTrainedModel, lora: LoRAConfig, *, seed: int) -> None:
    """Add adapters to `model` and freeze all other parameters. New adapters do not change the model's output.

    The initial values depend only on `seed`, not on the number of ranks. Under ZeRO-3, every rank has the complete adapters
    until the engine is built, and then keeps only its part of them; call `check_alike` while they are complete.

    Raises ConfigError as `find_adapted_layers` does.
    """
    from peft import LoraConfig as PeftConfig  # imported on demand, because the import takes seconds
    from peft import inject_adapter_in_model

    targets = find_adapted_layers(model, lora)
    parameters = dict(model.named_parameters())
    settings = PeftConfig(
        task_type="CAUSAL_LM",
        r=lora.rank,
        lora_alpha=to_plain_number(lora.scale),
        lora_dropout=lora.dropout,
        target_modules=[name for name in targets if name not in parameters],
        target_parameters=[name for name in targets if name in parameters],
        use_rslora=lora.rslora,
        rank_pattern={to_peft_pattern(pattern): rank for pattern, rank in lora.rank_pattern.items()},
        alpha_pattern={
            to_peft_pattern(pattern): to_plain_number(alpha) for pattern, alpha in lora.alpha_pattern.items()
        },
    )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        inject_adapter_in_model(settings, model, ADAPTER)


def get_adapter_settings(model: Any) -> dict[str, Any]:
    """Return peft's settings for a model's adapters as JSON values for adapter_config.json."""
    settings = model.peft_config[ADAPTER].to_dict() | {"inference_mode": True}
    return {name: sorted(value) if isinstance(value, set) else value for name, value in settings.items()}


def to_plain_number(number: float) -> float:
    """Convert whole numbers to int (16.0 → 16), because some readers of peft's files expect that form."""
    return int(number) if float(number).is_integer() else number


def to_peft_pattern(pattern: str) -> str:
    """Convert a pattern for `re.search` to one for peft, which anchors patterns at the end of a name."""
    return f".*(?:{pattern}).*"


def check_alike(model: nn.Module) -> None:
    """Raise DsReasonError on every rank unless all ranks have the same trained parameters.

    All ranks must call this function together, before the parameters are partitioned.
    """
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            values = parameter.detach().cpu().contiguous().view(-1).view(torch.uint8)
            digest.update(f"{name} ".encode() + values.numpy().tobytes())
    digests = gather_objects(digest.hexdigest())
    if other_ranks := [rank for rank, rank_digest in enumerate(digests) if rank_digest != digests[0]]:
        raise DsReasonError(
            f"the initial adapters of rank {', '.join(map(str, other_ranks))} differ from those of rank 0: the ranks have "
            "different versions of torch or peft or different configurations; start all ranks in the same environment"
        )


def describe_trained_share(model: nn.Module) -> str:
    """Describe the adapters for the log: the number of adapted layers and the percentage of parameters that are trained."""
    layers = len(find_adapters(model))
    sizes = [
        (count_values(model, name, parameter), parameter.requires_grad) for name, parameter in model.named_parameters()
    ]
    trained, base = (
        sum(size for size, is_trained in sizes if is_trained is wants_trained) for wants_trained in (True, False)
    )
    return (
        f"adapters on {layers} layers: {trained:,} parameters are trained ({trained / base:.2%} of the model's "
        f"{base:,}, which are frozen)"
    )


@dataclass(frozen=True)
class Delta:
    """Low-rank product that an adapter adds to a weight: `scale · b @ a`.

    The weight of a linear layer is `[out, in]`. That of experts is `[experts, out, in]`; each expert has its own product.
    """

    a: Tensor
    """Matrix `[rank, in]`; for experts, `[experts · rank, in]`."""
    b: Tensor
    """Matrix `[out, rank]`; for experts, `[out, rank · experts]`, with the experts of each rank next to each other."""
    scale: float

    def merge_with(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the merged weight in `dtype`, rounded once; `weight` is not modified. If `b` is 0, no bit differs."""
        if not self.b.any():
            return weight.to(dtype)
        a, b = (factor.float() for factor in self.split_experts(weight))
        add_product = torch.addmm if weight.dim() == 2 else torch.baddbmm
        return add_product(weight.float(), b, a, alpha=self.scale).to(dtype)

    def split_experts(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return `a` and `b` or, for experts, one pair per expert: `[experts, rank, in]` and `[experts, out, rank]`."""
        if weight.dim() == 2:
            return self.a, self.b
        experts = len(weight)
        return self.a.unflatten(0, (experts, -1)), self.b.unflatten(1, (-1, experts)).permute(2, 0, 1)

    def relative_to(self, weight: Tensor) -> float:
        """Return ‖delta‖ / ‖weight‖, computed from `[rank, rank]` products without building the delta."""
        a, b = (factor.double() for factor in self.split_experts(weight))
        squared = float(((b.mT @ b) * (a @ a.mT)).sum())
        return abs(self.scale) * math.sqrt(max(squared, 0.0)) / max(float(weight.double().norm()), 1e-30)


def to_base_name(name: str) -> str:
    """Return the name that a parameter has in a model without adapters: `….q_proj.base_layer.weight` → `….q_proj.weight`."""
    return re.sub(rf"({re.escape(BASE)})+\.", ".", name)


def is_adapter(name: str) -> bool:
    return name.endswith((A, B))


def get_adapter_names(name: str) -> tuple[str, ...]:
    """Return the names of the matrices A and B for a layer's weight; empty for a parameter without an adapter."""
    layer = get_adapted_layer(name)
    return () if layer is None else (layer + A, layer + B)


def get_adapted_layer(name: str) -> str | None:
    """Return the name of the layer with the adapter of a weight; None for a parameter without an adapter.

    peft wraps the module of the experts once for each of its parameters, first for `gate_up_proj` and then for `down_proj`.
    """
    if name.endswith(f"{BASE}.weight"):
        return name.removesuffix(f"{BASE}.weight")
    module, _, parameter = name.rpartition(".")
    if not module.endswith(BASE + BASE):
        return None
    return module.removesuffix(BASE if parameter == INNER_EXPERTS else BASE + BASE)


def get_adapted_weight(layer: str) -> str:
    """Return the name that the weight of an adapted layer has in a model without adapters; see `get_adapted_layer`.

    `….mlp.experts.base_layer` holds the adapter of `gate_up_proj`, and `….mlp.experts` that of `down_proj`.
    """
    module = layer.removesuffix(BASE)
    if layer != module:
        return f"{module}.{INNER_EXPERTS}"
    return f"{layer}.{OUTER_EXPERTS}" if layer.endswith(".experts") else f"{layer}.weight"


def to_adapter_layer(name: str) -> str:
    """Return the name of a weight's layer in peft's files: `….q_proj.weight` → `….q_proj`; see `get_adapted_layer`."""
    if name.endswith(".weight"):
        return name.removesuffix(".weight")
    module, _, parameter = name.rpartition(".")
    return module + BASE if parameter == INNER_EXPERTS else module


def get_adapter_scales(model: nn.Module) -> dict[str, float]:
    """Return each adapter's scale: layer name → factor."""
    return {name: module.scaling[ADAPTER] for name, module in find_adapters(model).items()}


def find_adapters(model: nn.Module) -> dict[str, Any]:
    """Return the model's adapted layers by name; each is a peft layer with the original layer (`base_layer`) and the adapter."""
    names = tuple(name.removesuffix(A) for name, _ in model.named_parameters() if name.endswith(A))
    return {name: model.get_submodule(name) for name in names}


@contextmanager
def disable_adapters(model: nn.Module) -> Iterator[None]:
    """Context manager that disables the adapters, so that the model computes the base model's output; do not train inside it."""
    layers = find_adapters(model).values()
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)
