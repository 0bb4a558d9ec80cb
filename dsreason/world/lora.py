"""Adapters of a transformer in diffusers' file format (LoRA, 2106.09685)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from dsreason.errors import ConfigError

ADAPTER = "default"
FILE = "pytorch_lora_weights.safetensors"
PREFIX = "transformer"
"""Prefix of the names in the file: the pipeline's component that the adapter belongs to."""
METADATA = "lora_adapter_metadata"
"""Key under which diffusers looks for rank and alpha. Without it alpha counts as equal to the rank."""


def add_lora(transformer: Any, *, rank: int, alpha: float, targets: Sequence[str], seed: int) -> None:
    """Give the linear layers called `targets` an adapter, and train only these; the output does not change yet.

    Its first values depend on `seed` only.

    Raises:
        ConfigError: no layer has such a name.
    """
    from peft import LoraConfig

    transformer.requires_grad_(False)
    settings = LoraConfig(r=rank, lora_alpha=alpha, init_lora_weights="gaussian", target_modules=list(targets))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            transformer.add_adapter(settings, adapter_name=ADAPTER)
        except ValueError as error:
            raise ConfigError(
                f"lora.targets ({', '.join(targets)}): {error}; name linear layers of the model"
            ) from None


def build_lora_metadata(transformer: Any) -> dict[str, Any]:
    """Rank, alpha and layers of the adapter, as JSON values."""
    settings = transformer.peft_config[ADAPTER].to_dict()
    return {name: sorted(value) if isinstance(value, set) else value for name, value in settings.items()}


def save_lora(state: Mapping[str, Tensor], folder: Path, metadata: Mapping[str, Any]) -> Path:
    """Write the adapter's tensors, named as in the transformer, with its `build_lora_metadata`. Returns the file."""
    tensors = {f"{PREFIX}.{name.replace(f'.{ADAPTER}.', '.')}": value.contiguous() for name, value in state.items()}
    described = json.dumps({f"{PREFIX}.{name}": value for name, value in metadata.items()}, indent=2, sort_keys=True)
    save_file(tensors, folder / FILE, metadata={"format": "pt", METADATA: described})
    return folder / FILE


def load_lora(transformer: Any, folder: Path) -> None:
    """Put a saved adapter into a transformer, by diffusers' own loader."""
    transformer.load_lora_adapter(folder, prefix=PREFIX, weight_name=FILE, adapter_name=ADAPTER)
