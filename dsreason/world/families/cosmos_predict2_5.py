"""Cosmos-Predict2.5: a transformer that generates clips from text, an image or a video."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from dsreason.errors import CheckpointError
from dsreason.models.processors.checks import check_chat_template
from dsreason.models.processors.template import LONG_TEXT, TEXT, check_template
from dsreason.models.weights import find_weights
from dsreason.world.context_parallel import Group, attend_over_group, gather_tokens, take_local_part
from dsreason.world.families.components import WEIGHTS, free_memory, load_encoder, load_tokenizer, write_index
from dsreason.world.families.family import WorldFamily
from dsreason.world.families.tiny import build_tiny_vae
from dsreason.world.types import Conditioning

SYSTEM = "You are a helpful assistant who will provide prompts to an image generator."
GIVEN_FRAME_TIME = 1e-4
"""Noise level that the transformer receives for given frames."""


@torch.no_grad()
def iter_embeddings(
    folder: Path, prompts: Sequence[str], max_length: int, device: torch.device | str, dtype: torch.dtype
) -> Iterator[Tensor]:
    """Yield each prompt's hidden states, normalised and concatenated over all layers: `[1, max_length, layers x hidden size]`.

    As in the model's own training, nothing is masked: padding tokens take part in attention.
    """
    from transformers import Qwen2_5_VLForConditionalGeneration

    tokenizer = open_tokenizer(folder)
    encoder = load_encoder(Qwen2_5_VLForConditionalGeneration, folder / "text_encoder", device, dtype)
    for prompt in prompts:
        yield _embed(encoder, tokenize(tokenizer, prompt, max_length).to(device))
    del encoder
    free_memory()


def count_tokens(folder: Path, prompts: Sequence[str]) -> list[int]:
    tokenizer = open_tokenizer(folder)
    return [len(apply_template(tokenizer, prompt)) for prompt in prompts]


def open_tokenizer(folder: Path) -> Any:
    """Load the tokenizer from a model's folder, and check its chat template."""
    tokenizer = load_tokenizer(folder / "tokenizer")
    check_chat_template(folder / "tokenizer", tokenizer)
    check_template(folder / "tokenizer", tokenizer, [make_messages(TEXT), make_messages(LONG_TEXT)])
    return tokenizer


def make_messages(prompt: str) -> list[dict[str, Any]]:
    return [
        {"role": role, "content": [{"type": "text", "text": text}]}
        for role, text in (("system", SYSTEM), ("user", prompt))
    ]


def tokenize(tokenizer: Any, prompt: str, max_length: int) -> Tensor:
    """Return the token ids of the prompt in chat format, padded or truncated on the right: `[1, max_length]`."""
    ids = apply_template(
        tokenizer,
        prompt,
        add_generation_prompt=False,
        add_vision_id=False,
        max_length=max_length,
        truncation=True,
        padding="max_length",
    )
    return torch.tensor([ids])


def apply_template(tokenizer: Any, prompt: str, **options: Any) -> list[int]:
    """Return the token ids of the prompt in chat format. Raise CheckpointError if the template rejects it."""
    try:
        encoded = tokenizer.apply_chat_template(make_messages(prompt), return_dict=True, **options)
    except Exception as error:  # the template is a program that comes with the model
        raise CheckpointError(
            f"{tokenizer.name_or_path}: the chat template fails for the prompt {prompt!r:.80}: {type(error).__name__}: "
            f"{error!s:.200}; restore the original template"
        ) from error
    ids: list[int] = encoded["input_ids"]
    return ids


def _embed(encoder: nn.Module, ids: Tensor) -> Tensor:
    states = encoder(ids, output_hidden_states=True, logits_to_keep=1).hidden_states[1:]
    normalised = [
        (state - state.mean(dim=-1, keepdim=True)) / (state.std(dim=-1, keepdim=True) + 1e-8) for state in states
    ]
    return torch.cat(normalised, dim=-1)


PROJECTION = "crossattn_proj"
PROJECTED = f"{PROJECTION}.0"
"""Name of the linear layer in the projection."""


class OptionalProjection(nn.Sequential):
    """A projection that returns embeddings unchanged if they are already projected."""

    def forward(self, input: Tensor) -> Tensor:
        linear, activation = self
        return input if input.shape[-1] == linear.out_features else cast(Tensor, activation(linear(input)))


def accept_projected(transformer: nn.Module) -> None:
    layer = cast(nn.Sequential, transformer.get_submodule(PROJECTION))
    linear = cast(nn.Linear, layer[0])
    if linear.in_features != linear.out_features:
        setattr(transformer, PROJECTION, OptionalProjection(*layer))


def compute_text_width(config: Mapping[str, Any], projected: bool) -> int:
    return int(config["encoder_hidden_states_channels" if projected else "crossattn_proj_in_channels"])


def explain_unsupported(config: Mapping[str, Any]) -> str:
    if config["use_crossattn_projection"]:
        return ""
    return (
        "use_crossattn_projection is false, so the transformer has no projection for text embeddings of all encoder layers; "
        "use the transformer of a Cosmos-Predict2.5 model"
    )


def load_text_projection(folder: Path, device: torch.device | str, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """Load the layer that maps 28 layers x 3584 features (98 MB per prompt in bfloat16) to 1024 features (1 MB)."""
    tensors: dict[str, Tensor] = {}
    names = [f"{PROJECTED}.weight", f"{PROJECTED}.bias"]
    find_weights(folder / "transformer", str, WEIGHTS).read(names, tensors.__setitem__)
    weight, bias = (tensors[name].to(device, dtype, copy=True) for name in names)
    return lambda text: nn.functional.gelu(nn.functional.linear(text, weight, bias))


def compute_velocity(
    transformer: nn.Module,
    x: Tensor,
    s: Tensor,
    text: Tensor,
    conditioning: Conditioning | None = None,
    initial_noise: Tensor | None = None,
) -> Tensor:
    dtype = next(transformer.parameters()).dtype
    batch, _, frames, height, width = x.shape
    given_mask = x.new_zeros(batch, 1, frames, 1, 1) if conditioning is None else conditioning.mask
    # Without given frames, pass one time per clip: diffusers would expand per-frame times to all tokens, which takes gigabytes.
    model_input, times = x, s
    if conditioning is not None:
        model_input = given_mask * conditioning.latents + (1 - given_mask) * x
        times = given_mask * GIVEN_FRAME_TIME + (1 - given_mask) * s.view(-1, 1, 1, 1, 1)
    predicted: Tensor = transformer(
        hidden_states=model_input.to(dtype),
        condition_mask=given_mask.expand(-1, -1, -1, height, width).to(dtype),
        timestep=times,
        encoder_hidden_states=text.to(dtype),
        padding_mask=x.new_zeros(1, 1, height, width, dtype=dtype),
        return_dict=False,
    )[0].float()
    if conditioning is None:
        return predicted
    if initial_noise is None:
        raise ValueError("velocity: conditioning requires initial_noise, which determines the velocity of given frames")
    known_velocity: Tensor = given_mask * (initial_noise - conditioning.latents)
    return known_velocity + (1 - given_mask) * predicted


class CosmosSharedAttention:
    """A variant of diffusers' `CosmosAttnProcessor2_0` that shards the heads of self-attention across the ranks."""

    def __init__(self, group: Group) -> None:
        self.group = group

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        from diffusers.models.embeddings import apply_rotary_emb

        query, key, value = (
            layer(hidden_states).unflatten(2, (attn.heads, -1)).transpose(1, 2)
            for layer in (attn.to_q, attn.to_k, attn.to_v)
        )  # [B, heads, local tokens, head size]
        query, key = (
            apply_rotary_emb(norm(part), image_rotary_emb, use_real=True, use_real_unbind_dim=-2)
            for norm, part in ((attn.norm_q, query), (attn.norm_k, key))
        )
        attended = attend_over_group(query, key, value, self.group).type_as(hidden_states)
        return attn.to_out[1](attn.to_out[0](attended))  # type: ignore[no-any-return]


def share_tokens(transformer: nn.Module, group: Group) -> None:
    """Shard the tokens across the ranks of `group`.

    Hidden states are split only once, before the first block. Noise levels and positions are split before every block, because
    the transformer passes them to each block for all tokens.
    """
    model: Any = transformer

    def take_local_times(times: Tensor) -> Tensor:
        """Return this rank's part of per-token times, `[B, tokens, D]`; return per-clip times, `[B, D]`, unchanged."""
        return take_local_part(times, 1, group) if times.ndim == 3 else times

    def before_block(first: bool) -> Any:
        def cut(module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
            tokens, text, times, modulation, positions, *other_arguments = arguments
            return (
                take_local_part(tokens, 1, group) if first else tokens,
                text,
                take_local_times(times),
                take_local_times(modulation),
                tuple(take_local_part(part, 0, group) for part in positions),
                *other_arguments,
            )

        return cut

    for number, block in enumerate(model.transformer_blocks):
        block.register_forward_pre_hook(before_block(number == 0))
        block.attn1.set_processor(CosmosSharedAttention(group))
    model.norm_out.register_forward_pre_hook(
        lambda module, arguments: (arguments[0], *(take_local_times(part) for part in arguments[1:]))
    )
    model.proj_out.register_forward_hook(lambda module, arguments, output: gather_tokens(output, 1, group))


def build_tiny(folder: Path, seed: int = 0, num_layers: int = 2) -> None:
    from diffusers import CosmosTransformer3DModel, UniPCMultistepScheduler

    from dsreason.families import FAMILIES
    from dsreason.models.tiny import build_tiny as build_language_model
    from dsreason.models.tiny import build_tokenizer

    layers, hidden_size = 2, 64
    build_tokenizer(FAMILIES["qwen2_5_vl"]).save_pretrained(folder / "tokenizer")
    build_language_model(
        "qwen2_5_vl",
        folder / "text_encoder",
        seed=seed,
        num_layers=layers,
        hidden_size=hidden_size,
        vision_hidden_size=32,
        vision_depth=1,
    )
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        CosmosTransformer3DModel(
            in_channels=17,
            out_channels=16,
            num_attention_heads=4,
            attention_head_dim=24,
            num_layers=num_layers,
            mlp_ratio=2.0,
            text_embed_dim=32,
            adaln_lora_dim=8,
            max_size=(16, 32, 32),
            patch_size=(1, 2, 2),
            rope_scale=(1.0, 3.0, 3.0),
            concat_padding_mask=True,
            extra_pos_embed_type=None,
            use_crossattn_projection=True,
            crossattn_proj_in_channels=layers * hidden_size,
            encoder_hidden_states_channels=32,
        ).save_pretrained(folder / "transformer")
        build_tiny_vae().save_pretrained(folder / "vae")
    UniPCMultistepScheduler(
        use_karras_sigmas=True,
        use_flow_sigmas=True,
        prediction_type="flow_prediction",
        sigma_max=200.0,
        sigma_min=0.01,
    ).save_pretrained(folder / "scheduler")
    components: dict[str, tuple[str, str] | None] = {
        "scheduler": ("diffusers", "UniPCMultistepScheduler"),
        "text_encoder": ("transformers", "Qwen2_5_VLForConditionalGeneration"),
        "tokenizer": ("transformers", "Qwen2Tokenizer"),
        "transformer": ("diffusers", "CosmosTransformer3DModel"),
        "vae": ("diffusers", "AutoencoderKLWan"),
        "safety_checker": None,
    }
    write_index(folder, "Cosmos2_5_PredictBasePipeline", components)


COSMOS_PREDICT2_5 = WorldFamily(
    name="Cosmos-Predict2.5",
    pipelines=("Cosmos2_5_PredictBasePipeline",),
    transformer="CosmosTransformer3DModel",
    blocks=("CosmosTransformerBlock",),
    lora_targets=("to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2"),
    max_conditional_frames=2,
    guidance_offset=1.0,  # the pipeline computes v + scale · (v − v_negative)
    embeddings=iter_embeddings,
    count_tokens=count_tokens,
    velocity=compute_velocity,
    solver_times=lambda scheduler: scheduler.sigmas[:-1],
    parallelise=share_tokens,
    project_text=load_text_projection,
    accept_projected=accept_projected,
    text_width=compute_text_width,
    unsupported_transformer=explain_unsupported,
    build_tiny=build_tiny,
)
