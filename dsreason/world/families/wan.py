"""Wan 2.1: a transformer that generates clips from text."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dsreason.world.context_parallel import Group, attend_over_group, gather_tokens, take_local_part
from dsreason.world.families.components import free_memory, load_encoder, load_tokenizer, write_index
from dsreason.world.families.family import WorldFamily
from dsreason.world.families.tiny import build_tiny_vae
from dsreason.world.types import Conditioning

TIMES = 1000.0
"""Time that the transformer receives at noise level 1; times are proportional to noise levels."""
TINY_WORDS = (
    "a",
    "the",
    "red",
    "green",
    "blue",
    "square",
    "circle",
    "ball",
    "moves",
    "left",
    "right",
    "up",
    "down",
    "to",
)
"""Words that the tiny model's tokenizer encodes as one token each; it splits all other words into characters."""


@torch.no_grad()
def iter_embeddings(
    folder: Path, prompts: Sequence[str], max_length: int, device: torch.device | str, dtype: torch.dtype
) -> Iterator[Tensor]:
    """Yield the encoder's last hidden states for each prompt: `[1, max_length, hidden size]`, zero after the prompt's end."""
    from transformers import UMT5EncoderModel

    tokenizer = load_tokenizer(folder / "tokenizer")
    encoder = load_encoder(UMT5EncoderModel, folder / "text_encoder", device, dtype)
    for prompt in prompts:
        encoded = tokenizer(
            clean(prompt), padding="max_length", max_length=max_length, truncation=True, return_tensors="pt"
        ).to(device)
        states = encoder(encoded.input_ids, encoded.attention_mask).last_hidden_state
        yield states * encoded.attention_mask[..., None]
    del encoder
    free_memory()


def count_tokens(folder: Path, prompts: Sequence[str]) -> list[int]:
    tokenizer = load_tokenizer(folder / "tokenizer")
    return [len(tokenizer(clean(prompt)).input_ids) for prompt in prompts]


def clean(prompt: str) -> str:
    """Decode HTML entities and normalize white space, as in the model's training. Broken Unicode is not repaired."""
    return re.sub(r"\s+", " ", html.unescape(html.unescape(prompt))).strip()


def compute_velocity(
    transformer: nn.Module,
    x: Tensor,
    s: Tensor,
    text: Tensor,
    conditioning: Conditioning | None = None,
    initial_noise: Tensor | None = None,
) -> Tensor:
    if conditioning is not None:
        raise ValueError("velocity: Wan's text-to-video models do not accept given frames")
    dtype = next(transformer.parameters()).dtype
    return transformer(  # type: ignore[no-any-return]
        hidden_states=x.to(dtype), timestep=s * TIMES, encoder_hidden_states=text.to(dtype), return_dict=False
    )[0].float()


class WanSharedAttention:
    """A variant of diffusers' `WanAttnProcessor` that shards the heads of self-attention across the ranks."""

    def __init__(self, group: Group) -> None:
        self.group = group

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        assert rotary_emb is not None
        query = attn.norm_q(attn.to_q(hidden_states))
        key, value = attn.norm_k(attn.to_k(hidden_states)), attn.to_v(hidden_states)
        query, key, value = (part.unflatten(2, (attn.heads, -1)) for part in (query, key, value))
        query, key = (rotate(part, *rotary_emb) for part in (query, key))  # [B, local tokens, heads, head size]
        query, key, value = (part.transpose(1, 2) for part in (query, key, value))
        attended = attend_over_group(query, key, value, self.group).type_as(hidden_states)
        return attn.to_out[1](attn.to_out[0](attended))  # type: ignore[no-any-return]


def rotate(tensor: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Apply rotary position embeddings to pairs of adjacent features, as in `WanAttnProcessor`."""
    first, second = tensor.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cosines[..., 0::2], sines[..., 1::2]
    return torch.stack((first * cos - second * sin, first * sin + second * cos), dim=-1).flatten(-2).type_as(tensor)


def share_tokens(transformer: nn.Module, group: Group) -> None:
    """Shard the tokens across the ranks of `group`.

    Hidden states are split only once, before the first block. Positions are split before every block, because the transformer
    passes them to each block for all tokens.
    """
    model: Any = transformer

    def before_block(first: bool) -> Any:
        def cut(module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
            tokens, text, modulation, positions = arguments
            tokens = take_local_part(tokens, 1, group) if first else tokens
            return tokens, text, modulation, tuple(take_local_part(part, 1, group) for part in positions)

        return cut

    for number, block in enumerate(model.blocks):
        block.register_forward_pre_hook(before_block(number == 0))
        block.attn1.set_processor(WanSharedAttention(group))
    model.proj_out.register_forward_hook(lambda module, arguments, output: gather_tokens(output, 1, group))


def build_tiny(folder: Path, seed: int = 0, num_layers: int = 2) -> None:
    from diffusers import UniPCMultistepScheduler, WanTransformer3DModel
    from transformers import T5Tokenizer, UMT5Config, UMT5EncoderModel

    characters = [chr(code) for code in range(33, 127)]
    pieces = [
        ("▁", -2.0),
        *((f"▁{word}", -3.0) for word in TINY_WORDS),
        *((character, -5.0) for character in characters),
    ]
    vocabulary = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *pieces]
    tokenizer = T5Tokenizer(vocab=vocabulary, extra_ids=0)
    tokenizer.save_pretrained(folder / "tokenizer")
    text = UMT5Config(
        vocab_size=len(tokenizer),
        d_model=32,
        d_kv=16,
        d_ff=64,
        num_layers=2,
        num_heads=2,
        pad_token_id=0,
        eos_token_id=1,
    )
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        UMT5EncoderModel(text).save_pretrained(folder / "text_encoder")
        WanTransformer3DModel(
            patch_size=(1, 2, 2),
            num_attention_heads=4,
            attention_head_dim=24,
            in_channels=16,
            out_channels=16,
            text_dim=32,
            freq_dim=32,
            ffn_dim=192,
            num_layers=num_layers,
        ).save_pretrained(folder / "transformer")
        build_tiny_vae().save_pretrained(folder / "vae")
    UniPCMultistepScheduler(use_flow_sigmas=True, prediction_type="flow_prediction", flow_shift=3.0).save_pretrained(
        folder / "scheduler"
    )
    components: dict[str, tuple[str, str] | None] = {
        "scheduler": ("diffusers", "UniPCMultistepScheduler"),
        "text_encoder": ("transformers", "UMT5EncoderModel"),
        "tokenizer": ("transformers", "T5Tokenizer"),
        "transformer": ("diffusers", "WanTransformer3DModel"),
        "transformer_2": None,
        "vae": ("diffusers", "AutoencoderKLWan"),
    }
    write_index(folder, "WanPipeline", components)


def explain_unsupported(index: dict[str, Any]) -> str:
    second = index.get("transformer_2")
    if (second and second[0]) or index.get("boundary_ratio") is not None:
        return "has two transformers (Wan 2.2 A14B), but only models with one, such as Wan 2.1, can be trained"
    if index.get("expand_timesteps"):
        return "has a noise level per token (Wan 2.2 TI2V), but only models with one per clip, such as Wan 2.1, can be trained"
    return ""


WAN = WorldFamily(
    name="Wan 2.1",
    pipelines=("WanPipeline",),
    transformer="WanTransformer3DModel",
    blocks=("WanTransformerBlock",),
    lora_targets=("to_q", "to_k", "to_v", "to_out.0", "ffn.net.0.proj", "ffn.net.2"),
    max_conditional_frames=0,
    guidance_offset=0.0,  # the pipeline computes v_negative + scale · (v − v_negative)
    embeddings=iter_embeddings,
    clean=clean,
    count_tokens=count_tokens,
    velocity=compute_velocity,
    solver_times=lambda scheduler: scheduler.timesteps / TIMES,
    parallelise=share_tokens,
    build_tiny=build_tiny,
    text_width=lambda config, projected: int(config["text_dim"]),
    float32_vae=True,  # as in diffusers' examples for Wan
    unsupported=explain_unsupported,
)
