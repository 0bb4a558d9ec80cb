"""A tiny base model whose tokenizer ends a text with a different token than its chat template ends a turn."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

END, TURN_END = 498, 500
"""Ids of `<|endoftext|>` and `<|im_end|>` in tiny models."""


def write_base_model(tiny: Path, folder: Path) -> Path:
    """Copy a tiny model and make `<|endoftext|>` its only end token; the chat template keeps `<|im_end|>`."""
    shutil.copytree(tiny, folder)
    change_json(folder / "tokenizer_config.json", lambda values: values.update(eos_token="<|endoftext|>"))
    change_json(folder / "generation_config.json", lambda values: values.update(eos_token_id=END))
    change_json(folder / "config.json", lambda values: values.get("text_config", values).update(eos_token_id=END))
    return folder


def change_json(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    values = json.loads(file.read_text())
    change(values)
    file.write_text(json.dumps(values))
