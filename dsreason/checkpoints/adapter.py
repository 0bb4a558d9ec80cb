"""LoRA adapters in exports: merged into the weights and, separately, in peft's format."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from dsreason.checkpoints.checkpoint_folder import CARD, SavedAdapter, SavedRun
from dsreason.checkpoints.shards import DTYPES, iter_checkpoint_tensors
from dsreason.engine.engine import to_hf_name
from dsreason.errors import CheckpointError
from dsreason.families import get_family
from dsreason.models.folder import compute_fingerprint
from dsreason.models.load import read_model_config
from dsreason.models.lora import (
    Delta,
    get_adapted_layer,
    get_adapter_names,
    is_adapter,
    to_adapter_layer,
    to_base_name,
)
from dsreason.models.nf4.blocks import dequantize, quantize
from dsreason.models.nf4.layers import is_quantized
from dsreason.models.weights import find_weights

log = logging.getLogger(__name__)

FOLDER = "adapter"
"""Subfolder of an export that holds the adapter in peft's format, in addition to the merged model."""
WEIGHTS_FILE, SETTINGS_FILE = "adapter_model.safetensors", "adapter_config.json"
PREFIX = "base_model.model."
"""Prefix of the tensor names in peft's files."""
BASE_IN_4_BITS = "the base model's weights, quantised to NF4 and dequantised as in training"
ADAPTER_CARD = """This adapter was trained on {base}, with the matrices of the language model quantised to 4 bits (NF4, blocks of
64 values, scales in float32). It must be added to the dequantised matrices, not to the original ones. To get the model that was
trained, use the merged model in the parent folder, or load the base model with
`BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=False)`, excluding the vision tower
and the output layer (`llm_int8_skip_modules`).
"""
SMALLEST = 5e-3
"""Smallest relative weight change that survives rounding to bfloat16 (8 bits). If a change is a fifth of this, about half of it
is lost."""


@dataclass
class Merge:
    """A merge of adapters into a model's weights during an export, with a record of how much each weight changes.

    Args:
        dtype: precision of the written weights, "bf16" or "fp32".
        adapter: description of the checkpoint's adapter; None if the checkpoint has no adapter.
    """

    dtype: str
    adapter: SavedAdapter | None
    tensors: dict[str, Tensor] = field(default_factory=dict)
    """The adapter's tensors, by their names in peft's format."""
    changes: dict[str, float] = field(default_factory=dict)
    """For each weight with an adapter, by name: norm of its change relative to its own norm."""

    def merge_weights(self, weights: Iterable[tuple[str, Tensor, Delta | None]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights under their names without adapters, each merged with its adapter; the sum is rounded only once."""
        dtype = DTYPES[self.dtype]
        for name, tensor, delta in weights:
            if delta is None:
                yield name, tensor
                continue
            self.changes[name] = delta.relative_to(tensor)
            layer = PREFIX + to_adapter_layer(name)
            for part, values in (("lora_A", delta.a), ("lora_B", delta.b)):
                self.tensors[f"{layer}.{part}.weight"] = values.to("cpu", dtype, copy=True).contiguous()
            yield name, delta.merge_with(tensor, dtype)

    @property
    def largest(self) -> tuple[str, float]:
        """(name, relative change) of the weight that the adapter changes most."""
        return max(self.changes.items(), key=lambda item: item[1])

    @property
    def summary(self) -> str:
        """Description of the adapter for the model card; "" if there is none."""
        if self.adapter is None:
            return ""
        (name, change), settings = self.largest, self.adapter.settings
        return (
            f"LoRA of rank {settings['r']}, alpha {settings['lora_alpha']}, on {len(self.changes)} layers, merged into "
            f"{'these weights' if self.adapter.quantize is None else BASE_IN_4_BITS}; also saved separately in `{FOLDER}/`. "
            f"Largest relative change of a weight: {change:.2g} ({name})"
        )

    def report(self, output: Path) -> None:
        """Log the largest change, and warn if it is too small for the precision of the written weights."""
        name, change = self.largest
        log.info("%s: the adapter changes %s the most, by %.2g of its norm", output, name, change)
        if self.dtype == "bf16" and change < SMALLEST:
            log.warning(
                "%s: the adapter changes no weight by more than %.2g of its norm, and rounding to bfloat16 loses part of that; "
                "load %s/ on top of the base model, or export with --dtype fp32 (checkpoint.export_dtype)",
                *(output, change, FOLDER),
            )


def write_adapter(merge: Merge, folder: Path) -> None:
    """Write the adapter to an export in peft's and vLLM's format. Call this once all weights have passed through `merge`."""
    assert merge.adapter is not None
    adapter_folder = folder / FOLDER
    adapter_folder.mkdir()
    (adapter_folder / SETTINGS_FILE).write_text(json.dumps(merge.adapter.settings, indent=2, sort_keys=True) + "\n")
    if merge.adapter.quantize is not None:
        (adapter_folder / CARD).write_text(ADAPTER_CARD.format(base=merge.adapter.base), encoding="utf-8")
    save_file(merge.tensors, adapter_folder / WEIGHTS_FILE, metadata={"format": "pt"})
    # safetensors creates files that only their owner can read.
    (adapter_folder / WEIGHTS_FILE).chmod((adapter_folder / SETTINGS_FILE).stat().st_mode)


def iter_weights_with_adapters(
    checkpoint: Path, saved: SavedRun, adapter: SavedAdapter, dtype: str
) -> Iterator[tuple[str, Tensor, Delta | None]]:
    """Yield every weight of the base model, in the run's precision, with the delta that the checkpoint's adapter adds to it.

    The deltas also have the run's precision, or float32 if `dtype` is "fp32".

    Raises:
        CheckpointError: the base model has changed, or a weight is missing.
    """
    source = Path(saved.state.model_path)
    if (source_fingerprint := compute_fingerprint(source)) != adapter.fingerprint:
        raise CheckpointError(
            f"{checkpoint}: its adapter was trained on {adapter.base}, but the files in {source} have changed since (the "
            f"fingerprint was {adapter.fingerprint}, but is now {source_fingerprint}); restore the base model"
        )
    trained_in = DTYPES["fp32" if dtype == "fp32" else saved.precision]
    trained = {
        name: tensor.detach().to(trained_in)
        for name, tensor in iter_checkpoint_tensors(checkpoint, saved, with_frozen=False)
    }
    names = [name for name in map(to_hf_name, saved.parameters) if not is_adapter(name)]
    family = get_family(read_model_config(source).model_type)
    weights = find_weights(source, family.rename, inside=family.weight_folders, is_transposed=family.is_transposed)
    lacking = [name for name in map(to_base_name, names) if name not in weights.places]
    lacking += [
        adapter_name for name in names for adapter_name in get_adapter_names(name) if adapter_name not in trained
    ]
    lacking += [layer for layer in map(get_adapted_layer, names) if layer is not None and layer not in adapter.scales]
    if lacking:
        raise CheckpointError(
            f"{checkpoint}: {lacking[0]} is missing both here and in {source}; choose another checkpoint"
        )
    base: dict[str, Tensor] = {}  # memory-mapped from the files
    weights.read([to_base_name(name) for name in names], base.__setitem__)
    for name in names:
        delta = None
        if pair := get_adapter_names(name):
            a, b = (trained[adapter_name] for adapter_name in pair)
            delta = Delta(a, b, adapter.scales[get_adapted_layer(name) or ""])
        weight = base[to_base_name(name)]
        if adapter.quantize is not None and is_quantized(to_base_name(name), family.modules.text_layers):
            weight = dequantize(quantize(weight), weight.shape, DTYPES[saved.precision])
        yield to_base_name(name), weight.to(DTYPES[saved.precision]), delta
