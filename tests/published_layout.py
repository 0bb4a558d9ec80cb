"""A model folder in the layout in which Cosmos3 is published: a root index that lists weights in subfolders."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

TOWER = ("blocks", "merger", "patch_embed", "pos_embed", "deepstack_merger_list", "model.visual", "model.projector")


def write_published_layout(flat: Path, output: Path) -> Path:
    """Copy a tiny folder of Cosmos3 or Cosmos3-Edge, and distribute its weights over `transformer/` and `vision_encoder/`.

    The folders `vae` and `sound_tokenizer` contain the weights of other models, and the index lists those of `vae`, too.
    """
    shutil.copytree(flat, output, ignore=shutil.ignore_patterns("*.safetensors*"))
    parts: dict[str, dict[str, torch.Tensor]] = {
        "transformer/diffusion_pytorch_model-00001-of-00002.safetensors": {},
        "transformer/diffusion_pytorch_model-00002-of-00002.safetensors": {},
        "vision_encoder/model.safetensors": {},
        "vae/diffusion_pytorch_model.safetensors": {"encoder.weight": torch.zeros(2)},
    }
    first, second, tower, _ = parts
    for number, (name, tensor) in enumerate(sorted(load_file(flat / "model.safetensors").items())):
        parts[tower if name.startswith(TOWER) else (first, second)[number % 2]][name] = tensor
    weight_map = {name: file for file, tensors in parts.items() for name in tensors}
    (output / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    parts["sound_tokenizer/model.safetensors"] = {"decoder.weight": torch.zeros(2)}
    for file, tensors in parts.items():
        (output / file).parent.mkdir(exist_ok=True)
        save_file(tensors, output / file)
    return output
