"""Conversion of cosmos-framework's files: settings that reasoners and generators share, and those of reasoners."""

from __future__ import annotations

import os
import re
from typing import Any

from dsreason.problems import find_nearest
from dsreason.tools.cosmos_rl.draft import Draft, Settings
from dsreason.tools.cosmos_rl.keys.key import is_of_kind, to_list

PARALLELISM = "model.parallelism"
GPUS_PER_HOST = 8
"""Number of GPUs to assume if the file leaves it to the launcher; the published runs use one host with 8."""
EPOCHS = 1000
"""Number of epochs that no run reaches: the framework repeats the rows until `trainer.max_iter`."""
LONGEST = 16000
"""The framework's default for the length of a reasoner's packed row, in tokens."""
VISION_LR = {"model.visual": 0.1}
"""The framework's default multipliers of a reasoner's learning rate, by the beginning of parameter names."""
PROJECTORS = ("merger", "deepstack_merger_list")
STARTS = {"qwen3-vl-8b": "nvidia/Cosmos3-Nano", "qwen3-vl-32b": "nvidia/Cosmos3-Super"}
"""Part of a backbone's name → Cosmos 3 model whose weights the published VideoPhy-2 launchers put into that architecture."""


def convert_reasoner(cosmos: Settings, draft: Draft) -> None:
    convert_shared(cosmos, draft)
    draft.set("optim.eps", 1e-8)
    longest = cosmos["dataloader_train.max_sequence_length"] or LONGEST
    draft.set("model.max_length", longest)
    draft.set("train.max_tokens_per_micro_batch", longest)
    if cosmos["model.ema.enabled"]:
        draft.refuse("model.ema.enabled", "only dsreason world keeps a moving average of weights; set it to false")
    for key in ("model.ema.rate", "model.ema.iteration_shift"):
        leave_out(key, "the moving average is off", cosmos, draft)
    if cosmos["dataloader_train.max_samples_per_batch"] is None:
        draft.refuse(
            "dataloader_train.max_sequence_length",
            "without max_samples_per_batch, a packed row has as many samples as fit, but here train.global_batch_size counts "
            "samples; set max_samples_per_batch, otherwise each packed row counts as one sample",
        )
    convert_start(cosmos, draft)
    convert_adapters(cosmos, draft)
    convert_experiment(cosmos, draft)
    draft.set("validation.before_training", False)


def convert_shared(cosmos: Settings, draft: Draft) -> None:
    """Convert the settings that reasoners and generators share."""
    refuse_unknown_keys(cosmos, draft)
    convert_batch(cosmos, draft)
    convert_schedule(cosmos, draft)
    draft.set("train.epochs", EPOCHS)
    draft.set("deepspeed", "zero3.json")
    finite = "trainer.callbacks.grad_clip.force_finite"
    draft.set("train.on_nonfinite", "skip" if cosmos[finite] else "stop")
    if cosmos[finite]:
        draft.note_difference(
            finite, 'train.on_nonfinite = "skip": a step with NaN or infinite gradients is skipped, not set to 0'
        )
    if cosmos["job.wandb_mode"] == "disabled":
        for key in ("job.wandb_mode", "job.project", "job.name"):
            leave_out(key, "it applies to Weights & Biases, which is disabled", cosmos, draft)
    elif cosmos["job.wandb_mode"] not in ("online", "offline"):
        draft.reject_value("job.wandb_mode", f"must be online, offline or disabled; got {cosmos['job.wandb_mode']!r}")
    else:
        draft.set("monitor.wandb", True)
        draft.set("monitor.wandb_project", cosmos["job.project"] or None)
        draft.set("monitor.wandb_name", cosmos["job.name"] or None)
    if cosmos["job.wandb_mode"] == "offline":
        draft.note_difference("job.wandb_mode", "monitor.wandb = True; set the environment variable WANDB_MODE=offline")
    for key in ("optimizer.lr", "optimizer.weight_decay", "scheduler.warm_up_steps", "trainer.max_iter"):
        if key not in cosmos.given:
            draft.note_difference(
                key,
                f"{cosmos[key]!r}: the file leaves it to the experiment's Python file; correct it if that sets another",
            )


def leave_out(key: str, because: str, cosmos: Settings, draft: Draft) -> None:
    if key in cosmos.given:
        draft.notes.setdefault(key, ("left out", because))


def refuse_unknown_keys(cosmos: Settings, draft: Draft) -> None:
    for key, value in cosmos.given.items():
        if key in cosmos.keys or value == {}:
            continue
        near = find_nearest(key, cosmos.keys, cutoff=0.75)
        advice = f"did you mean {near}?" if near else "remove it"
        draft.refuse(
            key,
            f"it is not in cosmos-framework's schema for supervised fine-tuning, so its effect is unknown; {advice}",
        )


def convert_batch(cosmos: Settings, draft: Draft) -> None:
    """Convert the number of GPUs, and the samples per step: one packed row per rank and accumulation step."""
    shard, replicas, together, guided = (
        f"{PARALLELISM}.{name}_degree"
        for name in ("data_parallel_shard", "data_parallel_replicate", "context_parallel_shard", "cfg_parallel_shard")
    )
    together_size, guided_size = max(cosmos[together], 1), max(cosmos[guided], 1)
    per_replica = together_size * guided_size
    sizes = [cosmos[shard], cosmos[replicas]]
    ranks = max(sizes[0], 1) * max(sizes[1], 1)
    if sizes[0] < 1:  # as many as the launcher starts
        ranks *= max(GPUS_PER_HOST // (ranks * per_replica), 1)
    draft.num_gpus = ranks * per_replica
    key = "train.context_parallel_size" if draft.trainer == "world" else "train.sequence_parallel_size"
    draft.set(key, together_size if together_size > 1 else None)
    samples = cosmos["dataloader_train.max_samples_per_batch"] or 1
    batch = ranks * max(cosmos["trainer.grad_accum_iter"], 1) * samples
    draft.set("train.global_batch_size", batch)
    for name, size in zip((shard, replicas), sizes, strict=True):
        if size < 1:
            draft.note_difference(
                name,
                f"{size} stands for the launcher's number of GPUs, which is taken as {draft.num_gpus}: "
                f"train.global_batch_size = {batch}; if you used another number, change it in proportion",
            )


def convert_schedule(cosmos: Settings, draft: Draft) -> None:
    """Convert the first cycle of the warmup and cosine decay. The schedule's values are multipliers for `optimizer.lr`."""
    values: dict[str, Any] = {}
    for name in ("warm_up_steps", "cycle_lengths", "f_start", "f_max", "f_min"):
        entries = to_list(cosmos[f"scheduler.{name}"])
        if not entries and name != "cycle_lengths":
            draft.reject_value(f"scheduler.{name}", "must have a value; the list is empty")
            return
        values[name] = entries[0] if entries else cosmos["trainer.max_iter"]
        if len(entries) > 1 and cosmos["trainer.max_iter"] > to_list(cosmos["scheduler.cycle_lengths"])[0]:
            draft.refuse(
                f"scheduler.{name}", f"the learning rate has one cycle, but the file has {len(entries)}; keep the first"
            )
    peak, steps = values["f_max"], cosmos["trainer.max_iter"]
    if peak <= 0:
        draft.reject_value("scheduler.f_max", f"must be positive; got {peak:g}")
        return
    warmup, cycle = int(values["warm_up_steps"]), int(values["cycle_lengths"])
    draft.set("optim.lr", cosmos["optimizer.lr"] * peak)
    draft.set("optim.warmup", warmup)
    draft.set("optim.warmup_start", values["f_start"] / peak)
    draft.set("optim.schedule", "cosine")
    draft.set("optim.min_lr_share", values["f_min"] / peak)
    length = max(cycle, warmup)
    draft.set("optim.schedule_steps", length if length != steps else None)
    if warmup >= steps:
        draft.note_difference(
            "scheduler.warm_up_steps",
            f"optim.warmup = {warmup}: the run ends after {steps} steps, before the warmup does, as in cosmos-framework",
        )


def convert_start(cosmos: Settings, draft: Draft) -> None:
    """Convert the model to start from."""
    name, weights = cosmos["model.backbone.model_name"], cosmos["model.backbone.safetensors_path"]
    start = next((model for part, model in STARTS.items() if part in name.lower()), None)
    if "model.backbone.safetensors_path" in cosmos.given:
        draft.set("model.path", weights)
        draft.note_difference(
            "model.backbone.model_name",
            f"model.path = {weights!r} (safetensors_path) also provides the architecture and the tokenizer, so its folder must "
            "be complete",
        )
    elif "model.backbone.model_name" not in cosmos.given:
        draft.refuse("model.backbone.model_name", "the model is missing; set it to a name on the Hub or a folder")
    elif is_videophy2(cosmos) and start:
        draft.set("model.path", start)
        draft.note_difference(
            "model.backbone.model_name",
            f"model.path = {start!r}, whose weights the published launcher puts into this architecture "
            f"(VLM_SAFETENSORS_PATH); to start from {name}, set model.path to it",
        )
    else:
        draft.set("model.path", name)
    for key in ("checkpoint.load_path", "checkpoint.keys_to_skip_loading"):
        if key in cosmos.given and cosmos[key]:
            draft.refuse(
                key,
                "distributed checkpoints cannot be read; convert it with cosmos-framework's export_model, set "
                "model.backbone.safetensors_path to the result, and remove the key",
            )


def convert_adapters(cosmos: Settings, draft: Draft) -> None:
    """Convert which weights are trained: adapters, the parameters that `keys_to_select` names, or all."""
    names = to_list(cosmos["optimizer.keys_to_select"])
    convert_multipliers(cosmos, draft)
    if cosmos["model.lora_enabled"]:
        targets = [name.strip() for name in cosmos["model.lora_target_modules"].split(",") if name.strip()]
        draft.set("lora.rank", cosmos["model.lora_rank"])
        draft.set("lora.alpha", float(cosmos["model.lora_alpha"]))
        draft.set("lora.targets", [re.escape(name) for name in targets] or None)
        if names not in ([], ["lora_"]):
            draft.refuse("optimizer.keys_to_select", 'with adapters, no other weights are trained; set it to ["lora_"]')
        return
    for key in ("model.lora_rank", "model.lora_alpha", "model.lora_target_modules"):
        leave_out(key, "model.lora_enabled is false", cosmos, draft)
    if names:
        chosen = "|".join(map(re.escape, names))
        draft.set("model.freeze", [f"^(?!.*({chosen}))"])


def convert_multipliers(cosmos: Settings, draft: Draft) -> None:
    """Convert the multipliers of the learning rate by parts of parameter names, or the framework's default."""
    key, multipliers = "optimizer.lr_multipliers", cosmos["optimizer.lr_multipliers"]
    if wrong := [part for part, value in multipliers.items() if not is_of_kind(value, "number") or value <= 0]:
        draft.reject_value(
            key,
            f"must be greater than 0; got {multipliers[wrong[0]]!r:.60} for {wrong[0]!r}; to freeze weights, use "
            "optimizer.keys_to_select",
        )
        return
    names = to_list(cosmos["optimizer.keys_to_select"])
    trains_vision = not cosmos["model.lora_enabled"] and (not names or any("visual" in name for name in names))
    if key not in cosmos.given and trains_vision and not is_videophy2(cosmos):
        multipliers = VISION_LR
    if all(value == 1 for value in multipliers.values()):
        leave_out(key, "1 is the learning rate itself", cosmos, draft)
    else:
        draft.set("optim.lr_multipliers", {re.escape(part): float(value) for part, value in multipliers.items()})


def is_videophy2(cosmos: Settings) -> bool:
    return "videophy2" in cosmos["job.experiment"]


def convert_experiment(cosmos: Settings, draft: Draft) -> None:
    """Convert what the experiment's Python file sets: the data, the frozen weights and the multipliers of the learning rate."""
    key, name = "job.experiment", cosmos["job.experiment"]
    draft.set("data.adapter", "auto")
    if is_videophy2(cosmos):
        root = os.environ.get("VIDEOPHYSICS_ROOT", "")
        draft.set("data.path", os.path.join(root, "videophy2_train"))
        draft.set("data.vision", {"fps": 2})
        edge = "edge" in cosmos["model.backbone.model_name"].lower()
        draft.set("data.template_arguments", {"enable_thinking": False} if edge else None)
        sets = f"data.path = {draft.get('data.path')!r} (below VIDEOPHYSICS_ROOT), data.vision.fps = 2"
        if "optimizer.keys_to_select" not in cosmos.given and not cosmos["model.lora_enabled"]:
            draft.set("model.freeze", [r"visual\." if edge else rf"visual\.(?!({'|'.join(PROJECTORS)})\.)"])
            sets += f", model.freeze = {draft.get('model.freeze')!r} (the vision tower without its projector)"
        thoughts = "; the replies have no thoughts (data.template_arguments)" if edge else ""
        draft.note_difference(key, f"{sets}: the experiment's Python file sets them{thoughts}")
        return
    rates, given = draft.get("optim.lr_multipliers"), "optimizer.lr_multipliers" in cosmos.given
    slower = f", with the framework's default optim.lr_multipliers = {rates!r}" if rates and not given else ""
    if "llava_ov" in name:
        draft.set("data.path", "lmms-lab/LLaVA-OneVision-Data")
        draft.note_difference(
            key,
            f"data.path = {draft.get('data.path')!r}: the experiment's Python file sets it{slower}; set data.subset to a part "
            "of the data",
        )
    else:
        draft.note_difference(
            key,
            f"the experiment's Python file opens the data and may freeze weights{slower}; set data.path, data.adapter, "
            "model.freeze and optim.lr_multipliers in the imported file",
        )
