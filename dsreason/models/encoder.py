"""The encoder of a model folder: its processor, and its family's rule for positions."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from dsreason.data.chat import Encoder
from dsreason.families import family_of
from dsreason.models.load import load_processor, model_config
from dsreason.models.mrope import position_ids


def open_encoder(
    model_path: Path, *, dtype: torch.dtype, max_length: int, max_length_key: str, trust_remote_code: bool = False
) -> Encoder:
    """The encoder of a Hugging Face folder.

    Args:
        dtype: of the engine that serves the model: it rounds video times to it.
        max_length_key: the setting that `max_length` comes from, for messages.
    """
    config = model_config(model_path, dtype=dtype, trust_remote_code=trust_remote_code)
    processor = load_processor(model_path, trust_remote_code=trust_remote_code)
    family = family_of(config.model_type)
    positions = partial(position_ids, family.grids, config=config)
    return Encoder(processor, family, positions, max_length, max_length_key)
