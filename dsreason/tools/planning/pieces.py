"""Memory that pieces of a model need in forward and backward: text layer, vision block, merger, output layer with the loss."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dsreason.config.schema import RunConfig
from dsreason.families import get_family
from dsreason.families.layer_types import get_layer_types
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

MOST_LINEAR_TOKENS = 4096
"""Maximum number of tokens for which a layer of a model with delta nets is traced; its memory grows linearly with the tokens."""
NUMBER = re.compile(r"\.\d+\.")
"""Pattern of the layer number in a parameter's name, including the dots around it."""


@dataclass(eq=False)
class Pieces:
    """Model on the meta device with only one piece of each kind; weights are frozen and adapters are added as in the run."""

    model: PreTrainedModel
    shape: ModelShape
    dtype: torch.dtype
    layer_counts: tuple[int, ...]
    """For each text layer of the model, the number of layers of its type in the full model."""
    adapted_experts: int = 0
    """Bytes of a layer's experts that have adapters, which peft copies in every forward pass to add the adapters' products."""

    @cache  # noqa: B019 (one instance per plan)
    def trace_text_layer(self, tokens: int, *, training: bool = True) -> Traced:
        """Trace a text layer. If there are several types, return the highest peak, and the average of what the layers keep."""
        traced = [self._trace_text_layer(tokens, number, training=training) for number in range(len(self.layer_counts))]
        kept = sum(count * layer.kept for count, layer in zip(self.layer_counts, traced, strict=True))
        return Traced(-(-kept // sum(self.layer_counts)), max(layer.peak for layer in traced))

    @cache  # noqa: B019
    def _trace_text_layer(self, tokens: int, number: int, *, training: bool) -> Traced:
        decoder: Any = self.model.get_decoder()
        if self.shape.state_values and tokens > MOST_LINEAR_TOKENS:  # the delta rule loops over the tokens
            part = self._trace_text_layer(MOST_LINEAR_TOKENS, number, training=training)
            return Traced(*(-(-size * tokens // MOST_LINEAR_TOKENS) for size in part))
        axes = (1,) if self.shape.vision_depth == 0 else (3, 1)

        def run(hidden: Tensor) -> Tensor:
            positions = torch.empty(*axes, tokens, dtype=torch.long, device="meta")
            outputs = decoder.layers[number](
                hidden, position_embeddings=decoder.rotary_emb(hidden, positions), attention_mask=None
            )
            return get_tensor(outputs)

        traced = trace(run, (1, tokens, self.shape.hidden), self.dtype, training=training)
        return Traced(traced.kept + self.adapted_experts * training, traced.peak + self.adapted_experts)

    @cache  # noqa: B019
    def trace_vision_block(self, patches: int, *, training: bool = True) -> Traced:
        family = get_family(self.model.config.model_type)
        (block,) = get_blocks(self.model)
        head = self.shape.vision_hidden // self.shape.vision_heads

        def run(hidden: Tensor) -> Tensor:
            starts = torch.tensor([0, patches], dtype=torch.int32)
            arguments: dict[str, Any] = {"cu_seqlens": starts}
            if family.tower_shape(self.model.config.vision_config).is_rotary:
                angles = torch.empty(patches, head, device="meta")
                arguments["position_embeddings"] = (angles, angles)
            return get_tensor(block(hidden, **arguments))

        return trace(run, (patches, self.shape.vision_hidden), self.dtype, training=training)

    @cache  # noqa: B019
    def trace_merger(self, patches: int, *, training: bool = True) -> Traced:
        projector = self.model.get_submodule(get_family(self.model.config.model_type).modules.projector)
        return trace(
            lambda hidden: get_tensor(projector(hidden)),
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


def get_blocks(model: PreTrainedModel) -> nn.ModuleList:
    """Return the list of the vision tower's blocks."""
    blocks = model.get_submodule(get_family(model.config.model_type).modules.vision_blocks)
    assert isinstance(blocks, nn.ModuleList)
    return blocks


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
    kinds = get_layer_types(decoder.config) or ["full_attention"] * len(decoder.layers)
    counts = Counter(kinds)
    decoder.layers = nn.ModuleList([decoder.layers[kinds.index(kind)] for kind in counts])
    attention_configs = [decoder.config]
    family = get_family(model.config.model_type)
    if family.vision is not None:
        del get_blocks(model)[1:]
        attention_configs.append(model.config.vision_config)
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
    adapted_bytes = sum(parameter.nbytes for parameter in experts) // len(counts)
    return Pieces(model, shape, dtype, tuple(counts.values()), adapted_bytes)


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
