"""Encoders of the tiny models, and published chat templates from the package trl."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoProcessor

from dsreason.data.chat import Encoder
from dsreason.data.formats.read import read_row
from dsreason.data.types import Sample
from dsreason.families import get_family
from dsreason.models.mrope import compute_position_ids
from tests.unit.data.test_chat import runs, with_template

LAMP = {"type": "function", "function": {"name": "lamp", "parameters": {}}}


def reported(*reports: str) -> pytest.MarkDecorator:
    """Mark a test's case with the reports in its id."""
    return pytest.mark.parametrize((), [()], ids=["+".join(reports)])


def build_encoder(model: Path) -> Encoder:
    config = AutoConfig.from_pretrained(model)
    family = get_family(config.model_type)
    positions = partial(compute_position_ids, family.grids, config=config)
    return Encoder(AutoProcessor.from_pretrained(model), family, positions, max_length=4096)


def use_published_template(encoder: Encoder, name: str) -> Encoder:
    """Return the encoder with a published chat template; skip the test if trl does not have it."""
    trl = find_spec("trl")
    path = Path(trl.origin or "").parent / "chat_templates" / f"{name}.jinja" if trl else Path()
    if not path.is_file():
        pytest.skip(f"the installed trl has no template {name}")
    return with_template(encoder, path.read_text("utf-8"))


def train_on(encoder: Encoder, messages: list[dict[str, Any]], **columns: Any) -> list[str]:
    """Return the trained texts of a row in the format that most tools share."""
    return runs(encoder, encoder.encode(read_row({"messages": messages, **columns})))


def render(encoder: Encoder, sample: Sample) -> str:
    """Return all text that the model is trained with."""
    text: str = encoder.processor.tokenizer.decode(encoder.encode(sample).input_ids)
    return text


def ask(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def reply(text: str | None, **keys: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **keys}


def call_lamp(arguments: Any, **keys: Any) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": "lamp", "arguments": arguments}}
    return reply(keys.pop("content", ""), tool_calls=[call], **keys)
