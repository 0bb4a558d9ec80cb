"""Fused GPU kernels for elementwise operations: RMSNorm from torch, rotary positions and SwiGLU from Liger-Kernel.

transformers computes each of these operations with a chain of small kernels that write intermediate results to memory, some of
them in float32. This module changes the classes of modules in one model object; the modules' parameters and the classes in
transformers do not change.
"""

from __future__ import annotations

import importlib.util
import logging
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn.functional import rms_norm

from dsreason.families import get_family
from dsreason.models.attention import attend_text, has_segment_attention

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)


class FusedRMSNorm(nn.Module):
    """RMSNorm that rounds once, after the multiplication by the weight; transformers rounds both before and after."""

    weight: Tensor
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        return rms_norm(hidden_states, self.weight.shape, self.weight, self.variance_epsilon)


class FusedSwiGLU(nn.Module):
    """Feed-forward block of a decoder layer that computes SwiGLU with a fused kernel."""

    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module

    def forward(self, hidden_states: Tensor) -> Tensor:
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction

        gated = LigerSiLUMulFunction.apply(self.gate_proj(hidden_states), self.up_proj(hidden_states))
        output: Tensor = self.down_proj(gated)
        return output


class FusedAttention(nn.Module):
    """Self-attention of a decoder layer that applies rotary positions with a fused kernel; `q_norm` and `k_norm` are optional."""

    q_proj: nn.Module
    k_proj: nn.Module
    v_proj: nn.Module
    o_proj: nn.Module
    q_norm: nn.Module
    k_norm: nn.Module
    head_dim: int
    layer_idx: int
    scaling: float
    attention_dropout: float

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Compute self-attention, `[B, T, D]` → `[B, T, D]`; `position_embeddings` are cosines and sines `[B, T, head size]`."""
        from liger_kernel.ops.rope import LigerRopeFunction

        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        projections = (self.q_proj, self.k_proj, self.v_proj)
        query, key, value = (project(hidden_states).view(shape) for project in projections)
        if hasattr(self, "q_norm"):
            query, key = self.q_norm(query), self.k_norm(key)
        query, key, value = (heads.transpose(1, 2) for heads in (query, key, value))
        query, key = LigerRopeFunction.apply(query, key, *position_embeddings)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        dropout = self.attention_dropout if self.training else 0.0
        attended, _ = attend_text(
            self, query, key, value, attention_mask, scaling=self.scaling, dropout=dropout, **kwargs
        )
        output: Tensor = self.o_proj(attended.flatten(-2))
        return output, None


def use_fused_kernels(model: PreTrainedModel) -> None:
    """Make the norms and decoder layers of a built model use fused kernels, which run only on GPUs."""
    names, plain = [], get_family(model.config.model_type).has_plain_layers
    if plain:
        names.append("RMSNorm")
        use_fused_norms(model)
    if importlib.util.find_spec("liger_kernel") is None:
        log.warning(
            "liger-kernel is not installed, so SwiGLU and rotary positions use the unfused kernels of transformers; install "
            "dsreason[cuda], or set model.fused_kernels = false"
        )
    elif model.config.get_text_config().hidden_act == "silu":
        for layer in model.get_decoder().layers:
            if hasattr(layer.mlp, "gate_proj"):  # not a mixture of experts
                layer.mlp.__class__ = FusedSwiGLU
            if plain and has_segment_attention(model):
                layer.self_attn.__class__ = FusedAttention
        names += ["SwiGLU"] + ["rotary positions"] * (plain and has_segment_attention(model))
    log.info("fused kernels: %s", ", ".join(names) or "none")


def use_fused_norms(model: nn.Module) -> None:
    """Make every RMSNorm in the text layers and the vision tower fused; its class in transformers depends on the family."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm") and not isinstance(module, nn.RMSNorm):
            module.__class__ = FusedRMSNorm
