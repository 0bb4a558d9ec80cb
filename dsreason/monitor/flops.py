"""FLOPs of a training step and peak FLOP/s of a GPU, from which the MFU (model FLOPs utilization) is computed."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dsreason.families import get_family
from dsreason.families.family import Modules
from dsreason.families.layer_types import CHUNK, count_delta_nets

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Dense bf16 TFLOP/s with fp32 accumulation, from NVIDIA's data sheets, which often list twice this number ("with sparsity").
# More specific names come before more general ones.
PEAK_TFLOPS: dict[str, float] = {
    "GB200": 2500.0,
    "B200": 2250.0,
    "GH200": 989.4,
    "H200 NVL": 835.5,
    "H200": 989.4,
    "H100 PCIe": 756.5,
    "H100 NVL": 835.5,
    "H100": 989.4,
    "H800": 989.4,
    "H20": 148.0,
    "A100": 312.0,
    "A800": 312.0,
    "A40": 149.7,
    "A30": 165.0,
    "A10": 125.0,
    "A10G": 70.0,
    "L40S": 362.05,
    "L40": 181.05,
    "L4": 121.0,
    "RTX 6000 Ada": 364.25,
    "RTX A6000": 154.8,
    "RTX 4090": 165.2,
    "RTX 3090": 71.0,
}


def find_peak_flops(device_name: str) -> float | None:
    """Return the peak dense bf16 FLOP/s of a GPU, given its `torch.cuda.get_device_name()`; None if the peak is unknown.

    The peak of a MIG slice is unknown, because the name does not show the slice's share of the GPU.
    """
    if re.search(r"\b(MIG|Laptop|Max-Q)\b", device_name):
        return None
    for name, tflops in PEAK_TFLOPS.items():
        if re.search(rf"(?<![A-Za-z0-9]){name}(?![A-Za-z0-9])", device_name):
            return tflops * 1e12
    return None


@dataclass
class Work:
    """The model's work for a set of samples, excluding padding and dummy media that only keep the ranks synchronized."""

    spans: list[tuple[int, int]] = field(default_factory=list)
    """Pairs: length of a span of tokens with causal attention, and number of earlier tokens to which the entire span attends."""
    trained_tokens: int = 0
    grids: list[tuple[int, int, int]] = field(default_factory=list)
    """Frames, height and width of each media item for the vision tower; height and width are in patches."""

    @property
    def tokens(self) -> int:
        return sum(length for length, _ in self.spans)


@dataclass(frozen=True)
class ModelFlops:
    """FLOPs of a forward and backward pass per unit of work.

    Per parameter and token, a matrix product costs 2 FLOPs in the forward pass, 2 for the gradient of its input, and 2 for the
    gradient of its weight (0 if frozen). Per layer, head channel and pair of tokens, attention costs 4 FLOPs in the forward
    pass (scores and weighted sum) and 8 in the backward pass (Chowdhery et al. 2022, PaLM, appendix B, which counts all pairs
    instead of only the causal ones). Recomputation by gradient checkpointing is not counted, because the definition of MFU
    excludes it.
    """

    text_token: float
    text_pair: float
    head_token: float  # per trained token, because the loss uses only the logits of these tokens
    vision_patch: float = 0.0
    vision_merged_token: float = 0.0
    vision_pair_full: float = 0.0
    vision_pair_windowed: float = 0.0
    merge_size: int = 1
    window: int | None = None  # side length of an attention window, in merged tokens

    def step(self, work: Work, *, causal: bool = True) -> float:
        """Return the FLOPs of a forward and backward pass for `work`.

        With `causal=False`, count the masked half of text attention as well, which an unfused kernel computes.
        """
        text_pairs = sum(n * before + (n * (n + 1) / 2 if causal else n * n) for n, before in work.spans)
        patches = sum(t * h * w for t, h, w in work.grids)
        full_pairs = sum(t * (h * w) ** 2 for t, h, w in work.grids)  # frames do not attend to each other
        windowed_pairs = sum(t * self.count_window_pairs(h) * self.count_window_pairs(w) for t, h, w in work.grids)
        return (
            self.text_token * work.tokens
            + self.text_pair * text_pairs
            + self.head_token * work.trained_tokens
            + self.vision_patch * patches
            + self.vision_merged_token * patches / self.merge_size**2
            + self.vision_pair_full * full_pairs
            + self.vision_pair_windowed * windowed_pairs
        )

    def count_window_pairs(self, side: int) -> int:
        """Return the sum of squared window lengths along a side, all in patches; the last window may be smaller."""
        if self.window is None:
            return 0
        num_whole, remainder = divmod(side, self.window * self.merge_size)
        return num_whole * (self.window * self.merge_size) ** 2 + remainder**2


def compute_model_flops(model: PreTrainedModel) -> ModelFlops:
    """Compute the FLOPs per unit of work of a Hugging Face model, which may be partitioned by ZeRO-3.

    Parameters are classified by name as vision (including the patch embedding and the merger), text layers, or head.
    """
    text = model.config.get_text_config()
    family = get_family(model.config.model_type)
    modules = family.modules
    trained_names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    tower_trained, vision_trained = (
        any(map(modules.is_in_tower, trained_names)),
        any(map(modules.is_vision, trained_names)),
    )
    costs = dict.fromkeys(("text", "head", "patch", "merged"), 0.0)
    for name, parameter in model.named_parameters():
        kind = get_matmul_kind(name, modules)
        if kind is not None:
            reached = tower_trained if modules.is_in_tower(name) else vision_trained
            no_input_gradient = modules.is_vision(name) and (modules.patch_embedding in name or not reached)
            input_flops = 0 if no_input_gradient else 2
            values = count_values(model, name, parameter) * get_active_share(name, modules, text)
            costs[kind] += values * (2 + input_flops + 2 * parameter.requires_grad)
    if not costs["head"]:  # a head that is tied to the embedding has no separate parameter
        costs["head"] = 6.0 * text.vocab_size * text.hidden_size

    text_flops = ModelFlops(
        text_token=costs["text"] + compute_delta_rule_flops(text),
        text_pair=12.0
        * (text.num_hidden_layers - count_delta_nets(text))
        * text.num_attention_heads
        * get_head_size(text),
        head_token=costs["head"],
    )
    if family.vision is None:
        return text_flops
    vision = model.config.vision_config
    windowed, window = family.vision_windows(vision) if family.vision_windows else (0, None)
    vision_pair = 4.0 * vision.hidden_size * (3 if tower_trained else 1)
    return replace(
        text_flops,
        vision_patch=costs["patch"],
        vision_merged_token=costs["merged"],
        vision_pair_full=vision_pair * (family.tower_shape(vision).depth - windowed),
        vision_pair_windowed=vision_pair * windowed,
        merge_size=vision.spatial_merge_size,
        window=window if windowed else None,
    )


def get_matmul_kind(name: str, modules: Modules) -> str | None:
    """Return the kind of work that uses a parameter; None for norms, embeddings and others that no matrix product uses."""
    if modules.is_expert(name):
        return "text"
    if not name.endswith(".weight") or any(part in name for part in modules.norms + modules.embeddings):
        return None
    if name.startswith(f"{modules.head}."):
        return "head"
    if not modules.is_vision(name):
        return "text"
    return "merged" if modules.merger in name else "patch"


def get_active_share(name: str, modules: Modules, text: Any) -> float:
    """Return the fraction of a parameter's values that is used for a token, which is below 1 only for experts."""
    return text.num_experts_per_tok / text.num_experts if modules.is_expert(name) else 1.0


def count_values(model: nn.Module, name: str, parameter: nn.Parameter) -> int:
    """Return the number of values in the unsharded, unquantized parameter.

    A parameter that ZeRO-3 has partitioned is empty and stores its size in `ds_numel`. A 4-bit parameter holds packed bytes,
    so the number of weights comes from the shape of its layer.
    """
    if parameter.dtype == torch.uint8:
        layer: Any = model.get_submodule(name.removesuffix(".weight"))
        return int(layer.in_features * layer.out_features)
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def compute_delta_rule_flops(text: Any) -> float:
    """Return the FLOPs per token of the delta rule in all delta nets, forward and backward.

    Per head and chunk of C tokens, the rule multiplies keys by keys, queries by keys and scores by values (C x C), and keys and
    queries by the state and keys by values (key size x value size). Of its two triangular solves, only the products in their
    backward pass are counted, as torch's FLOP counter does.
    """
    layers = count_delta_nets(text)
    if not layers:
        return 0.0
    keys, values = text.linear_key_head_dim, text.linear_value_head_dim
    products = 2 * (2 * CHUNK * keys + CHUNK * values + 3 * keys * values)
    solves = 2 * CHUNK * (keys + values)
    return float(layers * text.linear_num_value_heads * (3 * products + solves))


def get_head_size(text: Any) -> int:
    """Return the size of an attention head: `head_dim` if the configuration sets it, otherwise hidden size / heads."""
    return int(text.to_dict().get("head_dim") or text.hidden_size // text.num_attention_heads)
