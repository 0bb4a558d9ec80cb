"""Tiny checkpoints with random weights for each family: complete model folders that transformers and vLLM load like real ones.

Tiny checkpoints make it possible to run every command without downloads: they have the classes, tensor names, special tokens,
chat format and processors of the real models, but a vocabulary of only 512 tokens. Larger sizes can replace real models in memory
tests; weights are drawn and written shard by shard, so only one shard is in memory at a time.
"""

from __future__ import annotations

import json
import math
import os
from copy import deepcopy
from pathlib import Path
from string import Template
from typing import Any

import torch
from accelerate import init_empty_weights
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, GenerationConfig, Qwen2Tokenizer

from dsreason.families import Family, get_family
from dsreason.families.family import Tokens

VOCABULARY_SIZE = 512
HEAD_SIZE = 32

# The tokenizer's merges are learned from sentences, and from the words that the chat format and the answers use, so that these
# words become single tokens.
WORDS = (
    "system user assistant yes no left right up down red green blue yellow white purple one two three four five six "
    "circle square triangle The There Is Does Will Which What How Answer"
)
CORPUS = (
    "You are a helpful assistant.",
    "What colour is the shape? red green blue yellow white purple",
    "What colour is the ball? What is the colour of the square?",
    "Which colour does the shape have? The shape is red. The ball is blue. The square is green.",
    "How many shapes are there? one two three four five six",
    "How many balls do you see? There are two shapes. There is one shape.",
    "Which way does the ball move? left right up down",
    "Does the ball move to the left or to the right? Does it move up or down? It moves to the left.",
    "Which one falls? the left one the right one",
    "Which ball falls, the left one or the right one? The left ball falls. The right one falls.",
    "Will they collide? yes no",
    "Will the two balls collide behind the curtain? Will the ball hit the wall? Is the ball moving to the right?",
    "Is there a red shape in the image? Is there a circle or a square in the picture or in the video?",
    "Choose one of these options: (A) left (B) right (C) up (D) down",
    "Answer with the letter of the option. Answer with one word. Answer yes or no.",
    "Describe what you see in this video. Describe the image. Is it a triangle?",
    "Think step by step, and answer the question: <think> </think> <answer> </answer> 0.5 seconds",
)

# In the templates, `$name` stands for a token of the family.
PART_TEMPLATE = """\
{%- macro render(content) -%}
{%- if content is string -%}{{ content }}{%- else -%}{%- for part in content -%}
{%- if part.type == 'image' or 'image' in part or 'image_url' in part -%}$media_start$image$media_end
{%- elif part.type == 'video' or 'video' in part -%}$media_start$video$media_end
{%- elif 'text' in part -%}{{ part.text }}
{%- endif -%}{%- endfor -%}{%- endif -%}
{%- endmacro -%}
"""
DEFAULT_SYSTEM_TEMPLATE = """\
{%- if messages and messages[0].role != 'system' -%}
{{ '${turn_start}system\\n$default_system$turn_end\\n' }}
{%- endif -%}
"""
TURNS_TEMPLATE = """\
{%- for message in messages -%}
{{ '$turn_start' + message.role + '\\n' + render(message.content) + '$turn_end\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '${turn_start}assistant\\n' }}{%- endif -%}
"""


def build_tiny(
    model_type: str,
    folder: Path,
    *,
    seed: int = 0,
    tie_embeddings: bool = True,
    hidden_size: int = 128,
    num_layers: int = 2,
    intermediate_size: int | None = None,
    head_size: int = HEAD_SIZE,
    num_key_value_heads: int = 2,
    vocabulary_size: int = VOCABULARY_SIZE,
    vision_hidden_size: int = 128,
    vision_depth: int = 2,
    dtype: torch.dtype = torch.float32,
    max_shard_bytes: int = 1 << 28,
    device: str = "cpu",
) -> Path:
    """Write a checkpoint with random weights, a tokenizer, a processor and a chat template to `folder`; return the folder.

    `hidden_size` must be a multiple of `num_key_value_heads` x `head_size`; `head_size` and `vision_hidden_size` must be
    multiples of 32. A `vocabulary_size` above 512 adds embedding rows for which the tokenizer has no token. The weights are drawn
    on `device`. The same arguments always produce the same files. config.json is written last, so a folder with config.json is
    complete.
    """
    if hidden_size % (num_key_value_heads * head_size) or vision_hidden_size % HEAD_SIZE or head_size % HEAD_SIZE:
        raise ValueError(
            f"hidden_size ({hidden_size}) must be a multiple of {num_key_value_heads} x head_size ({head_size}), and "
            f"head_size and vision_hidden_size ({vision_hidden_size}) must be multiples of {HEAD_SIZE}"
        )
    folder.mkdir(parents=True, exist_ok=True)
    family = get_family(model_type)
    tokenizer = build_tokenizer(family)
    patches = {"patch_size": family.tiny.patch_size, "temporal_patch_size": 2, "merge_size": 2}
    if family.tiny.processor is None:
        tokenizer.save_pretrained(folder)
    else:
        processor = family.tiny.processor(tokenizer, (2 * family.tiny.patch_size) ** 2, patches)
        processor.save_pretrained(folder)
        processor.image_processor.save_pretrained(folder)
        processor.video_processor.save_pretrained(folder)
    text: dict[str, Any] = {
        "vocab_size": vocabulary_size,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size or 2 * hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": hidden_size // head_size,
        "num_key_value_heads": num_key_value_heads,
        "max_position_embeddings": 32768,
    }
    vision = {
        "depth": vision_depth,
        "hidden_size": vision_hidden_size,
        "intermediate_size": 2 * vision_hidden_size,
        "num_heads": vision_hidden_size // HEAD_SIZE,
        "patch_size": family.tiny.patch_size,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": hidden_size,
    }
    tokens = family.tokens
    end, padding = tokenizer.convert_tokens_to_ids([tokens.turn_end, tokens.padding])
    text |= {"bos_token_id": padding, "eos_token_id": end, "dtype": dtype}
    media = {
        "image": tokens.image,
        "video": tokens.video,
        "vision_start": tokens.media_start,
        "vision_end": tokens.media_end,
    }
    common: dict[str, Any] = {"tie_word_embeddings": tie_embeddings}
    if family.vision is None:
        auto_class = AutoModelForCausalLM
    else:
        auto_class = AutoModelForImageTextToText
        common |= {"dtype": dtype}
        common |= {f"{name}_token_id": tokenizer.convert_tokens_to_ids(token) for name, token in media.items()}
    config = family.tiny.config(text, vision, head_size, common)
    with init_empty_weights(include_buffers=True):
        model = auto_class.from_config(deepcopy(config), trust_remote_code=False)  # from_config modifies its argument
    config.architectures = [type(model).__name__]
    _write_weights(family, model, folder, torch.Generator(device).manual_seed(seed), dtype, max_shard_bytes)
    GenerationConfig(eos_token_id=[end, padding], pad_token_id=padding).save_pretrained(folder)
    config.save_pretrained(folder)
    return folder


def list_special_tokens(tokens: Tokens) -> tuple[str, ...]:
    """Return all special tokens of a family, in the order of their ids."""
    media = (tokens.media_start, tokens.media_end, *tokens.unused_media, tokens.image, tokens.video)
    return (tokens.padding, tokens.turn_start, tokens.turn_end, *tokens.others, *filter(None, media))


def build_tokenizer(family: Family) -> Qwen2Tokenizer:
    """Build a byte-level BPE tokenizer with 512 tokens: bytes, merges learned from `CORPUS`, and the family's special tokens."""
    special = list_special_tokens(family.tokens)
    learner = Tokenizer(models.BPE())
    splits = Qwen2Tokenizer().backend_tokenizer
    learner.normalizer, learner.pre_tokenizer = splits.normalizer, splits.pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE - len(special),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    learner.train_from_iterator([*CORPUS, *WORDS.split() * 9], trainer)
    bpe = json.loads(learner.to_str())["model"]
    first = len(bpe["vocab"])
    tokenizer = Qwen2Tokenizer(
        vocab=bpe["vocab"] | {token: first + i for i, token in enumerate(special)},
        merges=[tuple(pair) for pair in bpe["merges"]],
        unk_token=None,
        eos_token=family.tokens.turn_end,
        pad_token=family.tokens.padding,
        model_max_length=32768,
    )
    tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
    tokenizer.chat_template = build_chat_template(family)
    return tokenizer


def build_chat_template(family: Family) -> str:
    """Build a chat template in Qwen's format, with the family's tokens and its default system message, if it has one."""
    system = family.tiny.default_system
    template = PART_TEMPLATE + (DEFAULT_SYSTEM_TEMPLATE if system is not None else "") + TURNS_TEMPLATE
    return Template(template).substitute(vars(family.tokens), default_system=system)


def _draw(name: str, shape: torch.Size, family: Family, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Draw a matrix from N(0, 1 / inputs), or an embedding or positions from N(0, 0.02^2); norm weights are 1, and biases 0.

    The family can draw some tensors differently.
    """
    modules = family.modules
    special = family.tiny.draw(name, shape, generator) if family.tiny.draw is not None else None
    if special is not None:
        return special.to(dtype).cpu()
    if name.endswith(".bias"):
        return torch.zeros(shape, dtype=dtype)
    if len(shape) == 1:
        return torch.ones(shape, dtype=dtype)
    is_embedding = any(part in name for part in modules.embeddings) or name == f"{modules.head}.weight"
    inputs = math.prod(shape[1:])
    if modules.is_expert(name):
        inputs = shape[-2] if family.transposes_experts else shape[-1]
    std = 0.02 if is_embedding else 1 / math.sqrt(inputs)
    return torch.empty(shape, device=generator.device).normal_(0.0, std, generator=generator).to(dtype).cpu()


def _write_weights(
    family: Family,
    model: nn.Module,
    folder: Path,
    generator: torch.Generator,
    dtype: torch.dtype,
    max_shard_bytes: int,
) -> None:
    # named_parameters yields each tied parameter only once, as the files need it.
    parameters = {
        family.to_published_name(name): family.swap_axes(name, p.to(dtype)) for name, p in model.named_parameters()
    }
    parameters |= {name: torch.empty(2, dtype=dtype, device="meta") for name in family.tiny.others}
    plan = split_torch_state_dict_into_shards(parameters, max_shard_size=max_shard_bytes)
    for file, names in plan.filename_to_tensors.items():
        tensors = {name: _draw(name, parameters[name].shape, family, dtype, generator) for name in names}
        save_file(tensors, os.fspath(folder / file), metadata={"format": "pt"})
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
