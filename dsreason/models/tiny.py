"""Tiny random Qwen2.5-VL and Qwen3-VL checkpoints, complete folders that transformers and vLLM load like the real ones.

They make every command runnable with nothing downloaded: the same classes, tensor names, special tokens, chat format
and processors as the real models, with a vocabulary of 512. With larger sizes they stand in for a big model in memory
tests: weights are drawn and written shard by shard, so writing needs the memory of one shard.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Regex as TokenizerRegex
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import (
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2Tokenizer,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
VOCABULARY_SIZE = 512
HEAD_SIZE = 32
PATCH_SIZE = {"qwen2_5_vl": 14, "qwen3_vl": 16}

# What the byte pairs are learned from: words of the chat format and answers, one token each, and sentences.
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

# Splits as Qwen's tokenizers do: contractions, words with their leading space, single digits, punctuation, white space.
SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

PART_TEMPLATE = """\
{%- macro render(content) -%}
{%- if content is string -%}{{ content }}{%- else -%}{%- for part in content -%}
{%- if part.type == 'image' or 'image' in part or 'image_url' in part -%}<|vision_start|><|image_pad|><|vision_end|>
{%- elif part.type == 'video' or 'video' in part -%}<|vision_start|><|video_pad|><|vision_end|>
{%- elif 'text' in part -%}{{ part.text }}
{%- endif -%}{%- endfor -%}{%- endif -%}
{%- endmacro -%}
"""
DEFAULT_SYSTEM_TEMPLATE = """\
{%- if messages and messages[0].role != 'system' -%}
{{ '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
{%- endif -%}
"""
TURNS_TEMPLATE = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\\n' + render(message.content) + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""


def build_tiny(
    family: str,
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
    """Writes a random checkpoint with tokenizer, processor and chat template into `folder`, and returns it.

    `hidden_size` must be a multiple of `num_key_value_heads` x `head_size`, `head_size` and `vision_hidden_size` of 32. A larger
    `vocabulary_size` than 512 has rows that the tokenizer has no token for. The weights are drawn on `device`. The same
    arguments give the same files. config.json is written last, so a folder with it is complete.
    """
    if hidden_size % (num_key_value_heads * head_size) or vision_hidden_size % HEAD_SIZE or head_size % HEAD_SIZE:
        raise ValueError(
            f"hidden_size ({hidden_size}) must be a multiple of {num_key_value_heads} x head_size ({head_size}), and "
            f"head_size and vision_hidden_size ({vision_hidden_size}) of {HEAD_SIZE}"
        )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer(family)
    processor = build_processor(family, tokenizer)
    processor.save_pretrained(folder)
    processor.image_processor.save_pretrained(folder)
    processor.video_processor.save_pretrained(folder)
    text: dict[str, object] = {
        "vocab_size": vocabulary_size,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size or 2 * hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": hidden_size // head_size,
        "num_key_value_heads": num_key_value_heads,
        "max_position_embeddings": 32768,
    }
    vision = _vision_sizes(family, hidden_size, vision_hidden_size, vision_depth)
    config = _config(family, text, head_size, vision, tokenizer, tie_embeddings, dtype)
    _write_weights(family, config, folder, torch.Generator(device).manual_seed(seed), dtype, max_shard_bytes)
    end, padding = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    GenerationConfig(eos_token_id=[end, padding], pad_token_id=padding).save_pretrained(folder)
    config.save_pretrained(folder)
    return folder


def build_tokenizer(family: str) -> Qwen2Tokenizer:
    """Byte-level BPE of 512 tokens: bytes, merges learned from `CORPUS`, then Qwen's special tokens."""
    learner = Tokenizer(models.BPE())
    learner.normalizer = normalizers.NFC()
    learner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(TokenizerRegex(SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    learner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE - len(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    learner.train_from_iterator([*CORPUS, *WORDS.split() * 9], trainer)
    learned = json.loads(learner.to_str())["model"]
    first = len(learned["vocab"])
    tokenizer = Qwen2Tokenizer(
        vocab=learned["vocab"] | {token: first + i for i, token in enumerate(SPECIAL_TOKENS)},
        merges=[tuple(pair) for pair in learned["merges"]],
        unk_token=None,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=32768,
    )
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL_TOKENS)})
    tokenizer.chat_template = chat_template(family)
    return tokenizer


def chat_template(family: str) -> str:
    """Qwen's turn format; like the real ones, Qwen2.5-VL adds a default system message and Qwen3-VL does not."""
    return PART_TEMPLATE + (DEFAULT_SYSTEM_TEMPLATE if family == "qwen2_5_vl" else "") + TURNS_TEMPLATE


def build_processor(family: str, tokenizer: Qwen2Tokenizer) -> Qwen2_5_VLProcessor | Qwen3VLProcessor:
    """The family's processor classes, allowing pictures down to one merged patch."""
    unit = (2 * PATCH_SIZE[family]) ** 2  # pixels behind one token
    patches = {"patch_size": PATCH_SIZE[family], "temporal_patch_size": 2, "merge_size": 2}
    if family == "qwen2_5_vl":
        image = Qwen2VLImageProcessor(size={"shortest_edge": unit, "longest_edge": 256 * unit}, **patches)
        video = Qwen2VLVideoProcessor(size={"shortest_edge": unit, "longest_edge": 256 * unit}, **patches)
        return Qwen2_5_VLProcessor(image, tokenizer, video, chat_template=tokenizer.chat_template)
    # vLLM normalises Qwen3-VL's videos with the image processor's values, so both must be the same.
    half = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
    image = Qwen2VLImageProcessor(size={"shortest_edge": unit, "longest_edge": 256 * unit}, **patches, **half)
    # Here the limits count the pixels of all frames together.
    video = Qwen3VLVideoProcessor(size={"shortest_edge": 2 * unit, "longest_edge": 768 * unit}, **patches, **half)
    return Qwen3VLProcessor(image, tokenizer, video, chat_template=tokenizer.chat_template)


def _vision_sizes(family: str, hidden_size: int, vision_hidden_size: int, depth: int) -> dict[str, object]:
    sizes = {
        "depth": depth,
        "hidden_size": vision_hidden_size,
        "intermediate_size": 2 * vision_hidden_size,
        "num_heads": vision_hidden_size // HEAD_SIZE,
        "patch_size": PATCH_SIZE[family],
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": hidden_size,
    }
    if family == "qwen2_5_vl":
        return sizes | {"window_size": 112, "fullatt_block_indexes": [depth - 1], "tokens_per_second": 2}
    return sizes | {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]}


def _config(
    family: str,
    text: dict[str, object],
    head_size: int,
    vision: dict[str, object],
    tokenizer: Qwen2Tokenizer,
    tie_embeddings: bool,
    dtype: torch.dtype,
) -> PreTrainedConfig:
    def token_id(token: str) -> int:
        return int(tokenizer.convert_tokens_to_ids(token))

    common = {
        "vision_config": vision,
        "image_token_id": token_id("<|image_pad|>"),
        "video_token_id": token_id("<|video_pad|>"),
        "vision_start_token_id": token_id("<|vision_start|>"),
        "vision_end_token_id": token_id("<|vision_end|>"),
        "tie_word_embeddings": tie_embeddings,
        "dtype": dtype,
    }
    ends = {"bos_token_id": token_id("<|endoftext|>"), "eos_token_id": token_id("<|im_end|>"), "dtype": dtype}
    wider = head_size // HEAD_SIZE
    if family == "qwen2_5_vl":
        rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4 * wider, 6 * wider, 6 * wider]}
        config = Qwen2_5_VLConfig(text_config=text | ends | {"rope_parameters": rope}, **common)
    else:
        sections = {"mrope_section": [6 * wider, 5 * wider, 5 * wider], "mrope_interleaved": True}
        rope = {"rope_type": "default", "rope_theta": 5e6, **sections}
        config = Qwen3VLConfig(text_config=text | ends | {"rope_parameters": rope, "head_dim": head_size}, **common)
    config.architectures = [_model_class(family).__name__]
    return config


def _model_class(family: str) -> type[PreTrainedModel]:
    qwen2_5, qwen3 = Qwen2_5_VLForConditionalGeneration, Qwen3VLForConditionalGeneration
    model_class: type[PreTrainedModel] = qwen2_5 if family == "qwen2_5_vl" else qwen3
    return model_class


def _checkpoint_name(family: str, name: str) -> str:
    """The name a parameter has in the published checkpoints, where Qwen2.5-VL's differ from the modules'."""
    if family == "qwen2_5_vl":
        return name.replace("model.visual.", "visual.").replace("model.language_model.", "model.")
    return name


def _draw(name: str, shape: torch.Size, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Matrices from N(0, 1 / inputs), embeddings and positions from N(0, 0.02^2), norm weights 1, biases 0."""
    if name.endswith(".bias"):
        return torch.zeros(shape, dtype=dtype)
    if len(shape) == 1:
        return torch.ones(shape, dtype=dtype)
    is_table = "embed_tokens" in name or "pos_embed" in name or name == "lm_head.weight"
    std = 0.02 if is_table else 1 / math.sqrt(math.prod(shape[1:]))
    return torch.empty(shape, device=generator.device).normal_(0.0, std, generator=generator).to(dtype).cpu()


def _shards(sizes: dict[str, int], max_bytes: int) -> Iterator[list[str]]:
    """Names in order, cut where the next tensor would exceed `max_bytes`."""
    shard: list[str] = []
    filled = 0
    for name, size in sizes.items():
        if shard and filled + size > max_bytes:
            yield shard
            shard, filled = [], 0
        shard.append(name)
        filled += size
    yield shard


def _write_weights(
    family: str,
    config: PreTrainedConfig,
    folder: Path,
    generator: torch.Generator,
    dtype: torch.dtype,
    max_shard_bytes: int,
) -> None:
    with torch.device("meta"):
        model = _model_class(family)(config)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}  # tied ones once
    sizes = {name: math.prod(shape) * dtype.itemsize for name, shape in shapes.items()}
    shards = list(_shards(sizes, max_shard_bytes))
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        tensors = {_checkpoint_name(family, name): _draw(name, shapes[name], dtype, generator) for name in names}
        save_file(tensors, os.fspath(folder / file), metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
