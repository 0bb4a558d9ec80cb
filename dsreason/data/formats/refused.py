"""Refused columns and message keys, which change a row's meaning in other tools but are not supported by any format."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from dsreason.errors import DataError

AUDIO = "audio is not supported"
MASKS = 'masks are not supported; mark replies with "loss": false'
ROW_WEIGHTS = "weights of the loss per row are not supported; remove the column"
TEMPLATE = (
    "settings of the chat template per row are not supported; remove them, and set data.template_arguments for all rows"
)
TOKENS = "rows of tokens are not supported; use rows with texts"
MEDIA = "media belong in 'images' or 'videos', or in the content as parts"

COLUMNS = {
    "audio": AUDIO,
    "audios": AUDIO,
    "objects": "boxes of objects are not inserted into the text; write them into the messages",
    "kto_tag": "unpaired preferences are not supported; make pairs with chosen and rejected",
    "t2w_windows": "captions of clips train a world model's generator; use `dsreason world`",
    "chat_template_kwargs": TEMPLATE,
    "enable_thinking": TEMPLATE,
    **dict.fromkeys(("loss_scale", "loss_weight", "loss_weights", "sample_weight", "sample_weights"), ROW_WEIGHTS),
    **dict.fromkeys(("turn_weights", "token_weights"), MASKS),
    **dict.fromkeys(("loss_mask", "label_mask", "completion_mask", "response_mask", "assistant_masks"), MASKS),
    **dict.fromkeys(("train_on_turn", "train_on_input", "train_on_inputs", "mask_history"), MASKS),
}
"""Refused column → reason."""
WEIGHT_COLUMNS = ("loss", "train", "weight")
"""Columns whose values must be 1 or true."""
MESSAGE_KEYS = {
    "audio": AUDIO,
    "audios": AUDIO,
    "mask": MASKS,
    "ignore": 'messages cannot be ignored; use "loss": false',
    "skip": 'messages cannot be skipped; use "loss": false',
    "prefix": "prefixes of replies are not supported",
    "rejected": "rejected replies belong in the row's column 'rejected'",
    "objects": COLUMNS["objects"],
    "bbox": COLUMNS["objects"],
    "system": "system prompts belong in a message with the role \"system\", or in the row's column 'system'",
    "tools": "tools belong in the row's column 'tools'",
    "refusal": "refusals belong in the content",
    "thought": "reasoning belongs in the key 'reasoning_content'",
    "thoughts": "reasoning belongs in the key 'reasoning_content'",
    **dict.fromkeys(("media", "file", "files"), MEDIA),
}
"""Refused message key → reason."""
VIDEO_SETTINGS = ("video_start", "video_end", "fps", "nframes", "min_frames", "max_frames", "timestamps")
"""Keys that are refused in messages with a separate `video` or `videos` key."""
LOSS_WORDS = ("loss", "train", "mask", "weight", "learn")
"""Words in names of keys that control whether or how much to train on a reply or a part of it."""
SWITCHES = (
    *("mask", "masked", "is_masked", "mask_history", "ignore", "skip", "prefix", "rejected"),
    *("train_on_input", "train_on_inputs"),
)
"""Refused columns and keys that are accepted if their value is false."""
WEIGHTS = ("weight", "weights", "scale", "loss", "loss_mask", "train", "trained", "training", "trainable")
"""Suffixes of refused columns and keys that are accepted if their value is 1 or true."""


def check_columns(row: Mapping[str, Any]) -> None:
    """Raise DataError if the row has a refused column, or a weight other than 1."""
    for column, reason in COLUMNS.items():
        if has_effect(row, column):
            raise DataError(f"field {column!r}: {reason}")
    if has_effect(row, "labels") and has_effect(row, "input_ids"):
        raise DataError(f"field 'input_ids': {TOKENS}")
    for column in WEIGHT_COLUMNS:
        if not is_blank(row.get(column)) and row[column] not in (1, "1", "1.0", "true", "True"):
            raise DataError(
                f"field {column!r} is {row[column]!r:.100}, but weights per row are not supported; remove the row or the column, "
                f'or rename a column that is no weight, with data.columns = {{my_{column} = "{column}"}}'
            )


def check_message_keys(turn: Mapping[str, Any], location: str) -> None:
    """Raise DataError if a message has an unsupported key."""
    for key, reason in MESSAGE_KEYS.items():
        if has_effect(turn, key):
            raise DataError(f"{location}: key {key!r}: {reason}")
    setting = next((key for key in VIDEO_SETTINGS if turn.get(key) is not None), None)
    if setting and (turn.get("video") or turn.get("videos")):
        raise DataError(f"{location}: key {setting!r}: settings of a video belong in its part of the content")
    if has_effect(turn, "reasoning_details") and not turn.get("reasoning"):
        raise DataError(f"{location}: key 'reasoning_details': {MESSAGE_KEYS['thoughts']}")


def check_loss_keys(items: Mapping[str, Any], location: str, known: Collection[str] = ()) -> None:
    """Raise DataError if a message or a part has a key related to the loss that is not in `known`."""
    for key in items:
        name = str(key).lower()
        if key not in known and any(word in name for word in LOSS_WORDS) and has_effect(items, key):
            raise DataError(
                f'{location}: key {key!r}: weights and masks of the loss are not supported, only "loss": false in a message '
                "whose reply is not trained"
            )


def check_case(row: Mapping[str, Any], known: Collection[str]) -> None:
    """Raise DataError if a column's name differs from a known name only in case."""
    names = {
        str(column).lower(): column
        for column, value in row.items()
        if column not in known
        and str(column).lower() in known
        and str(column).lower() not in row
        and not is_blank(value)
    }
    if names:
        mapping = ", ".join(f'{name} = "{column}"' for name, column in names.items())
        raise DataError(
            f"the columns {', '.join(names.values())} are unknown; did you mean {', '.join(names)}? Rename them, or set "
            f"data.columns = {{{mapping}}}"
        )


def is_blank(value: Any) -> bool:
    """Return whether a value is empty: None, an empty string, or a list or object whose items are all empty."""
    if isinstance(value, dict):
        return all(map(is_blank, value.values()))
    if isinstance(value, list):
        return all(map(is_blank, value))
    return value is None or value == ""


def has_effect(items: Mapping[str, Any], key: str) -> bool:
    """Return whether a refused column or key has a value that changes the row's meaning."""
    value = items.get(key)
    if is_blank(value) or (key in SWITCHES and (value is False or value in ("false", "False"))):
        return False
    return not (key.endswith(WEIGHTS) and value == 1)
