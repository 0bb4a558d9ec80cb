"""The generation config of a model folder, and the tokens that end a completion.

The chat template of many base models ends a turn with another token (`<|im_end|>`) than the tokenizer's end token
(`<|endoftext|>`), which is the only one in their generation config. Both end a completion here and in exports.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, PreTrainedConfig

from dsreason.errors import CheckpointError
from dsreason.families import get_family


def read_generation_config(path: Path, config: PreTrainedConfig) -> GenerationConfig:
    """Read the generation config of a model folder or, if it has none, derive it from `config`.

    The token that ends a turn in the folder's chat template is added to `eos_token_id`. An invalid `eos_token_id` is kept.

    Raises:
        CheckpointError: generation_config.json or the tokenizer files are unreadable.
    """
    generation = GenerationConfig.from_model_config(config)
    if (path / "generation_config.json").is_file():
        try:
            generation = GenerationConfig.from_dict(_read_json(path / "generation_config.json"))
        except Exception as error:  # the errors have no common class, see `read_model_config`
            raise CheckpointError(f"{path}: generation_config.json cannot be read: {error}") from error
    stop_ids = list_stop_ids(generation.eos_token_id)
    turn_end = find_turn_end_id(path, get_family(config.model_type).tokens.turn_end)
    if stop_ids and turn_end is not None and turn_end not in stop_ids:
        generation.eos_token_id = [*stop_ids, turn_end]
    return generation


def list_stop_ids(eos_token_id: Any) -> list[int]:
    """Return the token ids of an `eos_token_id`, which is one id or a list of ids; [] if it is neither."""
    ids = eos_token_id if isinstance(eos_token_id, list) else [eos_token_id]
    return ids if all(type(token_id) is int and token_id >= 0 for token_id in ids) else []


def find_turn_end_id(path: Path, turn_end: str) -> int | None:
    """Return the id of the token `turn_end`, or None if the folder's chat template does not contain it.

    The files are read as JSON, because loading the tokenizer takes longer and might run code from the folder.
    """
    try:
        settings, jinja = _read_json(path / "tokenizer_config.json"), path / "chat_template.jinja"
        templates = [settings.get("chat_template"), _read_json(path / "chat_template.json").get("chat_template")]
        templates += [jinja.read_text(encoding="utf-8")] if jinja.is_file() else []
        if not any(turn_end in str(template) for template in templates):
            return None
        ids = {token["content"]: int(key) for key, token in settings.get("added_tokens_decoder", {}).items()}
        if turn_end not in ids:
            ids = {token["content"]: token["id"] for token in _read_json(path / "tokenizer.json")["added_tokens"]}
        return ids.get(turn_end)
    except Exception as error:  # JSON of another structure raises various errors
        raise CheckpointError(
            f"{path}: the tokenizer files cannot be read: {type(error).__name__}: {error}; download the model again"
        ) from error


def add_turn_end(folder: Path, config: PreTrainedConfig) -> None:
    """Write the token that ends a turn to `eos_token_id` of the folder's generation config, unless it is already there."""
    file, complete = folder / "generation_config.json", read_generation_config(folder, config)
    values = _read_json(file) or GenerationConfig.from_model_config(config).to_diff_dict()
    values.pop("_from_model_config", None)  # transformers would replace the values with those of config.json
    if complete.eos_token_id != values.get("eos_token_id"):
        values["eos_token_id"] = complete.eos_token_id
        file.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _read_json(file: Path) -> dict[str, Any]:
    """Return the contents of a JSON file; {} if it is missing."""
    values: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return values
