"""Memory that pieces of a model need in forward and backward: text layer, vision block, merger, output layer with the loss."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dsreason.config.schema import RunConfig
from dsreason.families import get_family
from dsreason.models.logprobs import compute_token_logprobs
from dsreason.models.lora import add_adapters, find_adapted_layers
from dsreason.models.nf4.blocks import ROW_BYTES, count_blocks
from dsreason.models.nf4.layers import convert_to_nf4
from dsreason.tools.planning.architecture import Architecture
from dsreason.tools.planning.parameters import Parameters, build_meta_model
from dsreason.tools.planning.shape import ModelShape, read_shape
from dsreason.tools.planning.tracing import ATTENTION, EXPERTS, Traced, free_gradients_early, trace

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NUMBER = re.compile(r"\.\d+\.")
"""Pattern of the layer number in a parameter's name, including the dots around it."""


@dataclass(eq=False)
class Pieces:
    """Model on the meta device with only one piece of each kind; weights are frozen and adapters are added as in the run."""

    model: PreTrainedModel
    shape: ModelShape
    dtype: torch.dtype
    adapted_experts: int = 0
    """Bytes of a layer's experts that have adapters, which peft copies in every forward pass to add the adapters' products."""

    @cache  # noqa: B019 (one instance per plan)
    def trace_text_layer(self, tokens: int, *, training: bool = True) -> Traced:
        decoder: Any = self.model.get_decoder()
        axes = (1,) if self.shape.vision_depth == 0 else (3, 1)

        def run(hidden: Tensor) -> Tensor:
            positions = torch.empty(*axes, tokens, dtype=torch.long, device="meta")
            outputs = decoder.layers[0](
                hidden, position_embeddings=decoder.rotary_emb(hidden, positions), attention_mask=None
            )
            return get_tensor(outputs)

        traced = trace(run, (1, tokens, self.shape.hidden), self.dtype, training=training)
        return Traced(traced.kept + self.adapted_experts * training, traced.peak + self.adapted_experts)

    @cache  # noqa: B019
    def trace_vision_block(self, patches: int, *, training: bool = True) -> Traced:
        tower, head = self._tower, self.shape.vision_hidden // self._tower.config.num_heads

        def run(hidden: Tensor) -> Tensor:
            angles = torch.empty(patches, head, device="meta")
            starts = torch.tensor([0, patches], dtype=torch.int32)
            return get_tensor(tower.blocks[0](hidden, cu_seqlens=starts, position_embeddings=(angles, angles)))

        return trace(run, (patches, self.shape.vision_hidden), self.dtype, training=training)

    @cache  # noqa: B019
    def trace_merger(self, patches: int, *, training: bool = True) -> Traced:
        return trace(
            lambda hidden: get_tensor(self._tower.merger(hidden)),
            (patches, self.shape.vision_hidden),
            self.dtype,
            training=training,
        )

    @cache  # noqa: B019
    def trace_head(self, tokens: int, chunk: int, *, with_entropy: bool, trained: bool) -> Traced:
        """Trace the computation of the log-probabilities of `tokens` targets from their hidden states, `chunk` at a time.

        At most two chunks are traced; the bytes of the other hidden states' gradients are added to the peak.
        """
        traced = min(tokens, 2 * chunk)
        width = (self.shape.vocabulary, self.shape.hidden)
        weight = torch.empty(width, dtype=self.dtype, device="meta", requires_grad=trained)
        targets = torch.empty(traced, dtype=torch.long, device="meta")

        def run(hidden: Tensor) -> Tensor:
            logprobs, entropy = compute_token_logprobs(
                hidden, weight, targets, chunk_size=chunk, with_entropy=with_entropy
            )
            return torch.cat([logprobs, entropy]) if with_entropy else logprobs

        traced_run = trace(run, (traced, self.shape.hidden), self.dtype)
        gradient_bytes = (
            (tokens - traced) * self.shape.hidden * self.dtype.itemsize
        )  # gradients of the untraced hidden states
        return Traced(traced_run.kept, traced_run.peak + gradient_bytes)

    @cache  # noqa: B019
    def trace_final_norm(self, tokens: int) -> Traced:
        decoder: Any = self.model.get_decoder()
        return trace(decoder.norm, (1, tokens, self.shape.hidden), self.dtype)

    @property
    def _tower(self) -> Any:
        tower = get_family(self.model.config.model_type).modules.vision_tower
        assert tower is not None
        return self.model.get_submodule(tower)


def get_tensor(output: Any) -> Tensor:
    hidden_states: Tensor = output[0] if isinstance(output, tuple) else output
    return hidden_states


def build_pieces(architecture: Architecture, config: RunConfig, parameters: Parameters) -> Pieces:
    model = build_meta_model(architecture, config)
    shape = read_shape(architecture.config)
    dtype = next(model.parameters()).dtype
    targets = (
        {drop_layer_number(name) for name in find_adapted_layers(model, config.lora)} if config.lora.rank else set()
    )
    decoder: Any = model.get_decoder()
    decoder.layers = decoder.layers[:1]
    attention_configs = [decoder.config]
    family = get_family(model.config.model_type)
    if family.modules.vision_tower is not None:
        tower: Any = model.get_submodule(family.modules.vision_tower)
        tower.blocks = tower.blocks[:1]
        attention_configs.append(tower.config)
    for attention_config in attention_configs:
        attention_config._attn_implementation = ATTENTION
    if family.modules.experts:
        decoder.config._experts_implementation = EXPERTS
    trained = {drop_layer_number(parameter.name) for parameter in parameters.trained}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(drop_layer_number(name) in trained)
    if config.model.quantize:
        quantize_meta_layers(model, family.modules.text_layers, dtype)
    if targets:
        add_matching_adapters(model, config, targets, dtype)
    experts = [parameter for name, parameter in model.named_parameters() if drop_layer_number(name) in targets]
    for parameter in experts:
        parameter.requires_grad_(True)  # the gradient of the copy is as large as that of the experts
    free_gradients_early(model)
    return Pieces(model, shape, dtype, sum(parameter.nbytes for parameter in experts))


def drop_layer_number(name: str) -> str:
    """Remove the layer number from a name: `model.layers.7.mlp.up_proj` → `model.layers..mlp.up_proj`."""
    return NUMBER.sub("..", name)


def quantize_meta_layers(model: nn.Module, pattern: str, dtype: torch.dtype) -> None:
    for layer in convert_to_nf4(model, pattern, dtype):
        rows = torch.empty(count_blocks(layer.shape), ROW_BYTES, dtype=torch.uint8, device="meta")
        layer.weight = nn.Parameter(rows, requires_grad=False)


def add_matching_adapters(model: PreTrainedModel, config: RunConfig, targets: set[str], dtype: torch.dtype) -> None:
    """Add adapters to the remaining layers that have one in the full model."""
    names = [name for name, _ in model.named_modules() if drop_layer_number(name) in targets]
    exact = tuple(f"^{re.escape(name)}$" for name in names)
    model.requires_grad_(False)
    lora = config.lora.model_copy(update={"targets": exact, "vision": False, "rank_pattern": {}, "alpha_pattern": {}})
    if exact:
        add_adapters(model, lora, seed=0)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to("meta", dtype)
