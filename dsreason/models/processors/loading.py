"""Functions that load a model folder's processor and open an encoder that uses the processor."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoProcessor, AutoTokenizer, ProcessorMixin

from dsreason.data.chat import Encoder
from dsreason.data.render import NO_ARGUMENTS
from dsreason.errors import CheckpointError
from dsreason.families import get_family
from dsreason.models.folder import explain_custom_code
from dsreason.models.load import read_model_config
from dsreason.models.mrope import compute_position_ids
from dsreason.models.processors.checks import check_chat_template, check_length, check_patches
from dsreason.models.processors.template import check_arguments, check_template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_processor(
    path: Path,
    *,
    template_arguments: Mapping[str, Any] = NO_ARGUMENTS,
    template_key: str = "data.template_arguments",
    trust_remote_code: bool = False,
) -> Any:
    """Load a model folder's processor: tokenizer, chat template, and image and video processors.

    The processor of a text-only model wraps only the tokenizer. If a component is missing, a CheckpointError is raised.

    Args:
        template_arguments: arguments with which the chat template is tested; a ConfigError names those that it does not use.
        template_key: configuration key of `template_arguments`, for error messages.
    """
    processor = load_unchecked(path, trust_remote_code=trust_remote_code)
    check_arguments(path, processor, template_arguments, template_key)
    check_template(path, processor, arguments=template_arguments)
    return processor


def load_unchecked(path: Path, *, trust_remote_code: bool) -> Any:
    """Load a processor and check everything but its chat template, which is a program."""
    config = read_model_config(path, trust_remote_code=trust_remote_code)
    family = get_family(config.model_type)
    if family.vision is None:
        return load_text_processor(path, trust_remote_code=trust_remote_code)
    try:
        processor = AutoProcessor.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:  # the errors have no common base class, and tokenizers raises bare Exceptions
        problem = explain_custom_code(path, error, "Auto(Processor|Tokenizer|ImageProcessor|VideoProcessor)")
        raise CheckpointError(f"{path}: the tokenizer or processor cannot be loaded: {problem or error}") from error
    if not isinstance(processor, ProcessorMixin):
        raise CheckpointError(
            f"{path} has a tokenizer but no processor for images and videos; copy the model's processor files to this folder"
        )
    check_chat_template(path, processor)
    check_length(path, processor.tokenizer)
    # The ids are compared because transformers creates an empty tokenizer if the tokenizer files are missing.
    for kind, token_id, expected in (
        ("image", processor.image_token_id, config.image_token_id),
        ("video", processor.video_token_id, config.video_token_id),
    ):
        if token_id != expected:
            raise CheckpointError(
                f"{path}: the tokenizer has id {token_id} for {kind} placeholders, but config.json has {expected}; "
                "copy the tokenizer files of the same model to this folder"
            )
    check_patches(path, processor, config.vision_config, family.tower_shape(config.vision_config).temporal_patch_size)
    return processor


class TextProcessor(ProcessorMixin):  # type: ignore[misc]  # transformers is not typed
    """Processor that wraps only a tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(tokenizer, chat_template=tokenizer.chat_template)


def load_text_processor(path: Path, *, trust_remote_code: bool) -> TextProcessor:
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:  # tokenizers raises bare Exceptions
        problem = explain_custom_code(path, error, "AutoTokenizer")
        raise CheckpointError(f"{path}: the tokenizer cannot be loaded: {problem or error}") from error
    check_chat_template(path, tokenizer)
    check_length(path, tokenizer)
    return TextProcessor(tokenizer)


def open_encoder(
    model_path: Path,
    *,
    dtype: torch.dtype,
    max_length: int,
    max_length_key: str,
    template_arguments: Mapping[str, Any] = NO_ARGUMENTS,
    template_key: str = "data.template_arguments",
    trust_remote_code: bool = False,
) -> Encoder:
    """Open an encoder for a Hugging Face model folder.

    Args:
        dtype: dtype of the engine that serves the model, to which the engine rounds video times.
        max_length_key: configuration key of `max_length`, for error messages.
        template_arguments, template_key: see `load_processor`.
    """
    config = read_model_config(model_path, dtype=dtype, trust_remote_code=trust_remote_code)
    processor = load_processor(
        model_path,
        template_arguments=template_arguments,
        template_key=template_key,
        trust_remote_code=trust_remote_code,
    )
    family = get_family(config.model_type)
    positions = partial(compute_position_ids, family.grids, config=config)
    return Encoder(
        processor, family, positions, max_length, max_length_key, template_arguments=dict(template_arguments)
    )
