"""Adapters in diffusers' format, which preserve alpha and rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dsreason.errors import ConfigError
from dsreason.world.families import FAMILIES, find_family
from dsreason.world.lora import add_lora, build_lora_metadata, load_lora, save_lora
from dsreason.world.models import load_transformer

NAME = "cosmos_predict2_5"
FAMILY = FAMILIES[NAME]


def output(transformer: Any, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x, text = torch.randn(1, 16, 3, 4, 4, generator=generator), torch.randn(1, 8, 128, generator=generator)
    with torch.no_grad():
        return FAMILY.velocity(transformer, x, torch.tensor([0.5]), text)


def adapted(folder: Path, alpha: float, seed: int = 3) -> Any:
    transformer = load_transformer(folder, torch.float32)
    add_lora(transformer, rank=4, alpha=alpha, targets=find_family(folder).lora_targets, seed=seed)
    return transformer


def test_adding_adapter_keeps_output_and_freezes_base(tiny_worlds: dict[str, Path]) -> None:
    base, transformer = load_transformer(tiny_worlds[NAME], torch.float32), adapted(tiny_worlds[NAME], 16)
    assert output(base).equal(output(transformer))
    trained = [name for name, parameter in transformer.named_parameters() if parameter.requires_grad]
    assert trained
    assert all(".lora_" in name for name in trained)


def test_initial_adapter_values_depend_only_on_seed(tiny_worlds: dict[str, Path]) -> None:
    result = []
    for seed in (3, 3, 4):
        torch.manual_seed(len(result))
        result.append(
            {name: p for name, p in adapted(tiny_worlds[NAME], 8, seed).named_parameters() if "lora_A" in name}
        )
    first, same, other = result
    assert all(first[name].equal(same[name]) for name in first)
    assert not any(first[name].equal(other[name]) for name in first)


@pytest.mark.parametrize("alpha", [1.0, 4.0, 16.0])
def test_diffusers_loads_adapter_exactly_for_any_alpha(
    tiny_worlds: dict[str, Path], tmp_path: Path, alpha: float
) -> None:
    transformer = adapted(tiny_worlds[NAME], alpha)
    for name, parameter in transformer.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    trained = {name: p.detach() for name, p in transformer.named_parameters() if p.requires_grad}
    save_lora(trained, tmp_path, build_lora_metadata(transformer))
    fresh = load_transformer(tiny_worlds[NAME], torch.float32)
    base = output(fresh)
    load_lora(fresh, tmp_path)
    assert output(fresh).equal(output(transformer))
    assert not output(fresh).equal(base)


def test_pipeline_loads_the_adapter(tiny_worlds: dict[str, Path], tmp_path: Path) -> None:
    from diffusers import Cosmos2_5_PredictBasePipeline

    transformer = adapted(tiny_worlds[NAME], 16)
    trained = {name: p.detach() for name, p in transformer.named_parameters() if p.requires_grad}
    save_lora(trained, tmp_path, build_lora_metadata(transformer))
    state, metadata = Cosmos2_5_PredictBasePipeline.lora_state_dict(
        str(tmp_path), weight_name="pytorch_lora_weights.safetensors", return_lora_metadata=True
    )
    assert metadata["transformer.lora_alpha"] == 16
    assert metadata["transformer.r"] == 4
    assert all(name.startswith("transformer.") for name in state)


def test_unmatched_target_name_is_rejected(tiny_worlds: dict[str, Path]) -> None:
    transformer = load_transformer(tiny_worlds[NAME], torch.float32)
    with pytest.raises(ConfigError, match="lora.targets .to_x."):
        add_lora(transformer, rank=4, alpha=8, targets=("to_x",), seed=0)
