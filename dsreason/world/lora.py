"""LoRA adapters for a transformer (arXiv 2106.09685), in diffusers' file format."""

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
"""Prefix of the tensor names in the file: the pipeline component that the adapter belongs to."""
METADATA = "lora_adapter_metadata"
"""Metadata key from which diffusers reads rank and alpha. If it is missing, diffusers sets alpha to the rank."""


def add_lora(transformer: Any, *, rank: int, alpha: float, targets: Sequence[str], seed: int) -> None:
    """Add adapters to the linear layers named `targets` and freeze all other weights; the output stays unchanged.

    The initial values depend only on `seed`.

    Raises:
        ConfigError: no layer has one of these names.
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
                f"lora.targets ({', '.join(targets)}): {error}; set it to names of linear layers of the model"
            ) from None


def build_lora_metadata(transformer: Any) -> dict[str, Any]:
    """Return the adapter's settings (such as rank, alpha and layers) as JSON values."""
    settings = transformer.peft_config[ADAPTER].to_dict()
    return {name: sorted(value) if isinstance(value, set) else value for name, value in settings.items()}


def save_lora(state: Mapping[str, Tensor], folder: Path, metadata: Mapping[str, Any]) -> Path:
    """Write the adapter's tensors (named as in the transformer) with the metadata from `build_lora_metadata`; return the file."""
    tensors = {f"{PREFIX}.{name.replace(f'.{ADAPTER}.', '.')}": value.contiguous() for name, value in state.items()}
    described = json.dumps({f"{PREFIX}.{name}": value for name, value in metadata.items()}, indent=2, sort_keys=True)
    save_file(tensors, folder / FILE, metadata={"format": "pt", METADATA: described})
    return folder / FILE


def load_lora(transformer: Any, folder: Path) -> None:
    """Load a saved adapter into a transformer with diffusers' loader."""
    transformer.load_lora_adapter(folder, prefix=PREFIX, weight_name=FILE, adapter_name=ADAPTER)
