"""Policies with adapters, shared by the tests of LoRA."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

LORA: dict[str, Any] = {"rank": 8, "vision": True, "rank_pattern": {"visual": 4}, "alpha_pattern": {"visual": 32.0}}


def lora_config(rows: str, path: str, *, lora: dict[str, Any] = LORA, **sections: Any) -> Any:
    """Build the configuration of an SFT run in float32 on a jsonl file of rows, changed by `sections`."""
    from dsreason.config.schema import SFTConfig

    document = {
        "model": {"path": path, "gradient_checkpointing": False},
        "lora": lora,
        "data": {"adapter": "jsonl", "path": rows, "workers": 0, "vision": {"fps": 4.0}},
        "train": {"precision": "fp32", "global_batch_size": 8},
    }
    changed = {name: (document.get(name, {}) | new if isinstance(new, dict) else new) for name, new in sections.items()}
    return SFTConfig.model_validate(document | changed)


def disturb(model: nn.Module, seed: int, scale: float = 0.05) -> None:
    """Add noise to every adapter, as training would; call this before the adapters are partitioned."""
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.add_(scale * torch.randn(parameter.shape, generator=noise).to(parameter.device))


@contextmanager
def trained_adapters(seed: int = 1) -> Iterator[None]:
    """Context manager in which new adapters look as if they had been trained, because their matrices B are not 0."""
    from dsreason.train.common import opening

    original = opening.add_adapters

    def add(model: Any, lora: Any, *, seed: int) -> None:
        original(model, lora, seed=seed)
        disturb(model, seed + 1)

    with mock.patch.object(opening, "add_adapters", add):
        yield


def describe(engine: Any, config: Any, model: Path | str) -> Any:
    from dsreason.train.common.opening import describe_adapter

    return describe_adapter(engine, config, Path(model))
