"""Conversion of the data: path, adapter, media sampling, and held-out rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dsreason.tools.cosmos_rl.draft import Draft, Settings
from dsreason.tools.cosmos_rl.keys.model import VISION

SCRIPT = (
    "the file names no data set, so your script opens it; rewrite the script as an adapter "
    "(docs/moving-from-cosmos-rl.md), and set data.adapter and data.path"
)
REQUEST = "Please answer the question in the following format: <think> your reasoning </think> <answer> your answer </answer>."
"""Format instruction that cosmos-rl's RL loader adds to prompts; the adapter does not, so `data.system_prompt` contains it."""


def convert_rows(cosmos: Settings, draft: Draft) -> None:
    source = convert_custom_source(cosmos, "dataset", "train_dataset") or convert_named_source(
        cosmos, draft, "train.train_policy.dataset", convert_columns(cosmos, draft)
    )
    prompt = cosmos["custom.system_prompt"] or cosmos["train.train_policy.system_prompt"]
    if not source:
        draft.refuse("train.train_policy.dataset.name", SCRIPT)
        source = {"adapter": "jsonl"}
    if prompt and "system_prompt" not in source:
        source["system_prompt"] = prompt
    source |= {"vision": vision} if (vision := convert_vision(cosmos, source["adapter"])) else {}
    for name, value in source.items():
        draft.set(f"data.{name}", value)


def convert_custom_source(cosmos: Settings, *sections: str) -> dict[str, Any]:
    """Convert `[custom.dataset]` of the cosmos-reason1 and cosmos-reason2 scripts, or the TAO toolkit's `train_dataset`.

    The result is empty if none of the sections specifies any data.
    """
    for section in sections:
        path = f"custom.{section}"
        custom_values = {name: cosmos.given.get(f"{path}.{name}") or "" for name in CUSTOM}
        media = custom_values["media_path"] or custom_values["media_root"]
        extra = {"system_prompt": custom_values["system_prompt"]} if custom_values["system_prompt"] else {}
        if custom_values["annotation_path"]:
            return {"adapter": "llava", "path": custom_values["annotation_path"], "media_path": media} | extra
        if custom_values["path"]:
            return {"adapter": "conversations", "path": custom_values["path"]} | extra
    return {}


CUSTOM = ("annotation_path", "media_path", "media_root", "path", "system_prompt")


def convert_named_source(cosmos: Settings, draft: Draft, section: str, columns: dict[str, str]) -> dict[str, Any]:
    """Convert a data set that is given by name or folder to the keys of a data source; {} if the section specifies none."""
    key = f"{section}.name" if cosmos[f"{section}.name"] else f"{section}.local_dir"
    name = cosmos[key]
    if not name:
        return {}
    source: dict[str, Any] = {"path": name}
    for part in ("subset", "revision", "split"):
        value = cosmos[f"{section}.{part}"]
        if isinstance(value, list):
            value = [item for item in value if item]
        if value:
            source[part] = value
    source["adapter"] = choose_adapter(name, key, draft)
    if source["adapter"] == "cosmos_reason1_rl":
        source["system_prompt"] = REQUEST
    elif source["adapter"] == "local_labels":
        source.pop("subset", None)
        source.pop("split", None)
    elif columns:
        source["columns"] = columns
    return source


def choose_adapter(name: str, key: str, draft: Draft) -> str:
    """Choose the adapter according to the data set's name or, for an existing folder, its content."""
    plain = "jsonl" if draft.trainer == "grpo" else "preferences" if draft.trainer == "dpo" else "conversations"
    word = name.rstrip("/").lower()
    if "cosmos-reason1-sft" in word:
        return "cosmos_reason1"
    if "cosmos-reason1-rl" in word or "cosmos-reason1-benchmark" in word:
        return "cosmos_reason1_rl"
    folder = Path(name).expanduser()
    if (folder / "videos").is_dir() and (folder / "metas").is_dir():
        return "local_labels"
    if name.startswith(("/", "./", "../", "~")) and not folder.exists():
        draft.note_difference(
            key,
            f'data.path = {name!r} does not exist, so data.adapter = "{plain}" is assumed; set "local_labels" for videos/ with '
            "metas/, or your own adapter for data that your script reads",
        )
    return plain


def convert_columns(cosmos: Settings, draft: Draft) -> dict[str, str]:
    """Return the columns to rename: the adapter's name → a different name in the data."""
    if draft.trainer == "grpo":
        prefix = "train.train_policy"
        columns = {
            "question": cosmos[f"{prefix}.prompt_column_name"],
            "answer": cosmos[f"{prefix}.response_column_name"],
        }
    else:
        columns = {"conversations": cosmos["train.train_policy.conversation_column_name"]}
    return {
        own_column: cosmos_column
        for own_column, cosmos_column in columns.items()
        if cosmos_column and cosmos_column != own_column
    }


def convert_vision(cosmos: Settings, adapter: str) -> dict[str, Any]:
    """Convert `[custom.vision]`; if it is missing, use the scripts' defaults, which differ between Reason1 and Reason2."""
    if "custom.vision" in cosmos:
        vision_keys = {own_key: cosmos[f"custom.vision.{cosmos_key}"] for cosmos_key, own_key in VISION}
        return {name: value for name, value in vision_keys.items() if value is not None}
    model = cosmos["policy.model_name_or_path"].lower()
    if adapter == "jsonl" or not any(word in model for word in ("vl", "reason", "cosmos", "/")):
        return {}
    if "reason2" in model or "qwen3-vl" in model:
        return {"fps": 1, "total_pixels": int(cosmos["policy.model_max_length"] * 32 * 32 * 0.9)}
    return {"fps": 1, "max_pixels": 81920}


def convert_validation(cosmos: Settings, draft: Draft) -> None:
    """Convert validation.

    cosmos-rl validates only if `[validation] enable` is true; if no data set is set there, it uses some of the training rows.
    """
    if not cosmos["validation.enable"]:
        for key in cosmos.given:
            if key.startswith(("validation.", "custom.val_dataset.")) and key != "validation.enable":
                draft.notes.setdefault(key, ("left out", "validation.enable is false"))
        if "train.train_policy.dataset.test_size" in cosmos.given:
            draft.notes["train.train_policy.dataset.test_size"] = (
                "left out",
                "validation.enable is false, so all rows are used for training",
            )
        draft.set("validation.before_training", False)
        return
    draft.set("validation.every", cosmos["validation.freq"])
    draft.set("validation.before_training", cosmos["validation.val_before_train"])
    draft.set("validation.micro_batch_size", cosmos["validation.batch_size"])
    convert_held_out(cosmos, draft)
    if draft.trainer == "grpo":
        convert_answers(cosmos, draft)
    else:
        draft.set("validation.generate", False)
        if draft.trainer == "dpo":
            draft.set("checkpoint.best_metric", "val/loss")


def convert_held_out(cosmos: Settings, draft: Draft) -> None:
    own_source = convert_custom_source(cosmos, "val_dataset") or convert_named_source(
        cosmos, draft, "validation.dataset", convert_columns(cosmos, draft)
    )
    if own_source:
        if vision := draft.get("data.vision"):
            own_source["vision"] = vision
        if "system_prompt" not in own_source and draft.get("data.system_prompt"):
            own_source["system_prompt"] = draft.get("data.system_prompt")
        draft.set("data.validation", own_source)
        return
    key = "train.train_policy.dataset.test_size"
    size = cosmos[key] if cosmos[key] is not None else cosmos["validation.dataset.test_size"]
    draft.set("data.validation", 0.1 if size is None else size)
    if key in cosmos.given:
        draft.note_difference(
            key,
            f"data.validation = {size!r}: the rows are drawn from the whole data set, but cosmos-rl takes the first ones",
        )


def convert_answers(cosmos: Settings, draft: Draft) -> None:
    """Convert the sampling settings of GRPO's validation."""
    greedy = cosmos["validation.top_k"] == 1
    draft.set("validation.temperature", 0.0 if greedy else cosmos["validation.temperature"])
    draft.set("validation.top_p", cosmos["validation.top_p"])
    longest = cosmos["validation.max_response_length"] or cosmos["rollout.max_response_length"]
    draft.set("validation.max_completion_length", longest)
    draft.set("checkpoint.best_metric", "val/reward/mean" if draft.get("reward.functions") else None)
    if not greedy and cosmos["validation.top_k"] not in (None, -1, 0):
        draft.note_difference("validation.top_k", "answers are sampled from all tokens")
    if cosmos["validation.repetition_penalty"] != 1.0:
        draft.note_difference("validation.repetition_penalty", "answers are sampled without it")
    if cosmos["validation.n_generation"] > 1:
        draft.note_difference("validation.n_generation", "each held-out prompt gets one answer")
    if cosmos["validation.reward_function"]:
        draft.note_difference("validation.reward_function", "held-out answers are scored with the training rewards")
