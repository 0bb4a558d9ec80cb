"""Conversion of the settings that all trainers of language models share, from ranks to checkpoints, and of DPO's settings."""

from __future__ import annotations

import re
from typing import Any

from dsreason.tools.cosmos_rl.draft import Draft, Settings
from dsreason.tools.cosmos_rl.keys.key import is_of_kind, to_list

LOSSES = {"sigmoid": "sigmoid", "bco_pair": "bco", "sft": "sft"}
"""Preference loss in cosmos-rl → its name in dsreason."""


def count_gpus(cosmos: Settings, role: str) -> int:
    """Return the GPUs per replica of a role ("policy" or "rollout"). As in cosmos-rl's launcher, -1 shards count as 1."""
    sizes = ("tp_size", "cp_size", "pp_size", "dp_replicate_size")
    count = max(cosmos[f"{role}.parallelism.dp_shard_size"], 1)
    for name in sizes:
        count *= max(cosmos[f"{role}.parallelism.{name}"], 1)
    return int(count)


def count_data_parallel_ranks(cosmos: Settings) -> int:
    """Return the number of data-parallel ranks per replica of the policy."""
    shards = max(cosmos["policy.parallelism.dp_shard_size"], 1)
    return int(shards * max(cosmos["policy.parallelism.dp_replicate_size"], 1))


def convert_ranks(cosmos: Settings, draft: Draft) -> None:
    """Convert batches and ranks. cosmos-rl's batch size is per data-parallel rank in SFT and DPO, and per replica in GRPO."""
    kind = cosmos["train.train_policy.trainer_type"]
    if kind not in ("", "sft", "dpo", "grpo"):
        draft.refuse(
            "train.train_policy.trainer_type",
            f"{kind!r} is a custom trainer, which dsreason does not have; remove the key",
        )
    replicas = max(cosmos["policy.parallelism.n_init_replicas"], 1)
    draft.num_gpus = count_gpus(cosmos, "policy") * replicas
    if draft.trainer == "grpo" and cosmos["mode"] == "disaggregated":
        draft.num_gpus += count_gpus(cosmos, "rollout") * max(cosmos["rollout.parallelism.n_init_replicas"], 1)
    shards = "policy.parallelism.dp_shard_size"
    if cosmos[shards] < 1:
        draft.note_difference(
            shards, "taken as 1, as by cosmos-rl's launcher; set it to the number of GPUs that you used"
        )
    batch = cosmos["train.train_batch_per_replica"]
    if batch < 1:
        draft.reject_value("train.train_batch_per_replica", f"must be at least 1; got {batch}")
        return
    if draft.trainer != "grpo":
        draft.set("train.global_batch_size", batch * count_data_parallel_ranks(cosmos) * replicas)
    if cosmos["policy.parallelism.cp_size"] > 1:
        draft.set("train.sequence_parallel_size", cosmos["policy.parallelism.cp_size"])
    longest = "train.train_policy.max_token_len_per_mini_batch"
    rows = max(cosmos["train.train_policy.mini_batch"], 1) * cosmos["policy.model_max_length"]
    draft.set("train.max_tokens_per_micro_batch", cosmos[longest] or rows)
    draft.set("deepspeed", "zero3_offload.json" if cosmos["train.fsdp_offload"] else "zero3.json")
    draft.set("train.activation_offload", cosmos["train.activation_offload"] or None)
    convert_loading(cosmos, draft)
    draft.set("train.max_steps", cosmos["train.max_num_steps"])


def convert_loading(cosmos: Settings, draft: Draft) -> None:
    """Convert the number of data workers; 0 becomes dsreason's default, because the number affects only the speed."""
    draft.set("data.workers", cosmos["train.train_policy.dataloader_num_workers"] or None)
    draft.set("data.prefetch", cosmos["train.train_policy.dataloader_prefetch_factor"] or None)


def convert_learning_rates(cosmos: Settings, draft: Draft) -> None:
    """Convert the learning rate: a number, a list for language model and vision tower, or a table of modules and `global`."""
    key = "train.optm_lr"
    value = cosmos[key]
    table = dict(value) if isinstance(value, dict) else dict(zip(("global", "visual"), to_list(value), strict=False))
    if isinstance(value, list) and not 1 <= len(value) <= 2:
        draft.reject_value(key, f"must list the rates of language model and vision tower; got {len(value)} values")
    elif wrong := [rate for rate in table.values() if not is_of_kind(rate, "number") or rate <= 0]:
        draft.reject_value(
            key, f"must be greater than 0; got {wrong[0]!r:.60}; to freeze weights, use policy.freeze_pattern"
        )
    elif "global" not in table:
        draft.reject_value(key, "must contain global, the learning rate of all other modules, as in cosmos-rl; add it")
    else:
        base = table.pop("global")
        draft.set("optim.lr", float(base))
        if not set(table.values()) - {base}:
            return
        if draft.trainer == "world":
            draft.refuse(key, "only the transformer is trained, with one learning rate; set a single number")
        else:
            # The ratio 1e-6 / 1e-5 is 0.1 after rounding to 12 digits.
            multipliers = {to_name_pattern(module): float(f"{rate / base:.12g}") for module, rate in table.items()}
            draft.set("optim.lr_multipliers", multipliers)


def to_name_pattern(module: str) -> str:
    """Convert a module path of cosmos-rl, such as `visual.merger` or `model.layers.0`, to a pattern for parameter names."""
    path = re.sub(r"^(model\.)*(language_model\.)?", "", module)
    if path in ("model", "language_model"):
        return r"^(?!model\.visual\.)"
    prefix = {"visual": r"model\.", "lm_head": ""}.get(path.partition(".")[0], r"model\.(language_model\.)?")
    return rf"^{prefix}{re.escape(path)}\."


def convert_optimizer(cosmos: Settings, draft: Draft) -> None:
    convert_learning_rates(cosmos, draft)
    name = cosmos["train.optm_name"]
    names = set(to_list(name))
    decay = cosmos["train.optm_weight_decay"]
    draft.set("optim.weight_decay", decay)
    if names == {"Adam"} and decay:
        draft.refuse(
            "train.optm_name", f"Adam adds the weight decay ({decay:g}) to the gradient, but AdamW does not; set AdamW"
        )
    elif names - {"Adam", "AdamW"}:
        draft.refuse(
            "train.optm_name", "the moments are always float32 (AdamW), which takes four times the memory; set AdamW"
        )
    warmup = cosmos["train.optm_warmup_steps"]
    if isinstance(warmup, float) and warmup == 1.0:
        draft.refuse(
            "train.optm_warmup_steps", "1.0 makes the whole run a warmup; if you want that, set the number of steps"
        )
    elif isinstance(warmup, float) and warmup > 1:
        draft.set("optim.warmup", round(warmup))
    else:
        draft.set("optim.warmup", warmup)
    kind, share = cosmos["train.optm_decay_type"], cosmos["train.optm_decay_ratio"]
    decays = kind not in (None, "none")
    if decays and kind not in ("linear", "cosine", "sqrt"):
        draft.reject_value("train.optm_decay_type", f"must be one of none, linear, cosine, sqrt; got {kind!r}")
        return
    draft.set("optim.schedule", kind if decays else "constant")
    if decays and share is not None and share > 0:
        draft.set("optim.decay_share", share)
    seed = cosmos["train.seed"]
    forced = 42 if cosmos["train.deterministic"] else cosmos["train.train_policy.dataloader_seed"]
    draft.set("train.seed", forced if seed is None else seed)
    convert_resume(cosmos, draft)


def convert_resume(cosmos: Settings, draft: Draft) -> None:
    resume = cosmos["train.resume"]
    if resume is True:
        draft.arguments.append("--resume auto")
        draft.note_difference(
            "train.resume", "set with --resume auto on the command line; the first run starts from the model"
        )
    elif isinstance(resume, str) and resume:
        draft.refuse(
            "train.resume",
            "cosmos-rl's checkpoints cannot be resumed; set policy.model_name_or_path to its safetensors folder",
        )


def convert_model(cosmos: Settings, draft: Draft) -> None:
    draft.set("model.revision", cosmos["policy.model_revision"])
    frozen = [pattern for pattern in to_list(cosmos["policy.freeze_pattern"]) if pattern]
    trained = [pattern for pattern in to_list(cosmos["policy.trainable_pattern"]) if pattern]
    for key, patterns in (("policy.freeze_pattern", frozen), ("policy.trainable_pattern", trained)):
        if wrong := next((pattern for pattern in patterns if not is_regex(pattern)), None):
            draft.reject_value(key, f"{wrong!r} is not a valid regular expression; correct it")
            return
    if frozen and trained:
        draft.reject_value(
            "policy.trainable_pattern", "cannot be combined with freeze_pattern, as in cosmos-rl; remove one of them"
        )
    if trained:
        draft.set("model.freeze", [f"^(?!.*(?:{'|'.join(trained)}))"])
    elif frozen:
        draft.set("model.freeze", frozen)
    if "policy.lora" in cosmos:
        convert_adapters(cosmos, draft)
    logger = to_list(cosmos["logging.logger"])
    if "wandb" in logger:
        draft.set("monitor.wandb", True)
        draft.set("monitor.wandb_project", cosmos["logging.project_name"])
        name = cosmos["logging.experiment_name"]
        draft.set("monitor.wandb_name", None if name in (None, "", "None") else name)
    else:
        for key in ("logging.project_name", "logging.experiment_name"):
            if key in cosmos.given:
                draft.notes[key] = ("left out", "it applies to Weights & Biases, which is not in logging.logger")
    if unknown := sorted(set(logger) - {"wandb", "console"}):
        draft.note_difference(
            "logging.logger", f"{', '.join(unknown)} is not supported; TensorBoard and metrics.jsonl are always written"
        )


def is_regex(pattern: str) -> bool:
    try:
        re.compile(pattern)
    except re.error:
        return False
    return True


def convert_adapters(cosmos: Settings, draft: Draft) -> None:
    section = "policy.lora"
    draft.set("lora.rank", cosmos[f"{section}.r"])
    draft.set("lora.alpha", cosmos[f"{section}.lora_alpha"])
    draft.set("lora.rslora", cosmos[f"{section}.use_rslora"] or None)
    draft.set("lora.rank_pattern", cosmos[f"{section}.r_pattern"])
    draft.set("lora.alpha_pattern", cosmos[f"{section}.alpha_pattern"])
    dropout = cosmos[f"{section}.lora_dropout"]
    if dropout and draft.trainer != "sft":
        draft.refuse(f"{section}.lora_dropout", "adapter dropout is supported only in sft; set it to 0")
    elif dropout:
        draft.set("lora.dropout", dropout)
    targets = cosmos[f"{section}.target_modules"]
    if targets == "all-linear":
        draft.set("lora.vision", True)
    elif targets is None:
        draft.note_difference(
            f"{section}.target_modules", "the attention and feed-forward layers of the language model get adapters"
        )
    else:
        draft.set("lora.targets", [rf"(^|\.){re.escape(name)}$" for name in to_list(targets)])
    if cosmos[f"{section}.modules_to_save"]:
        draft.refuse(
            f"{section}.modules_to_save", "only adapters are trained, and all other weights stay frozen; remove the key"
        )
    if cosmos[f"{section}.init_lora_weights"] not in (True, "gaussian"):
        draft.refuse(
            f"{section}.init_lora_weights",
            "adapters start with PEFT's default (B is 0, A is random), which leaves the model unchanged; set it to true",
        )
    elif cosmos[f"{section}.init_lora_weights"] == "gaussian":
        draft.note_difference(
            f"{section}.init_lora_weights", "A is sampled uniformly, as with true; B is 0 in both cases"
        )


def convert_checkpoints(cosmos: Settings, draft: Draft) -> None:
    keep = cosmos["train.ckpt.max_keep"]
    if keep == 0:
        draft.reject_value(
            "train.ckpt.max_keep", "0 would delete each checkpoint when it is written; set 1 or more, or -1 for all"
        )
        return
    draft.set("checkpoint.keep", keep)
    if not cosmos["train.ckpt.enable_checkpoint"]:
        for name, value in {"every": 0, "last": False, "keep_best": False, "export": "final"}.items():
            draft.set(f"checkpoint.{name}", value)
        for key in ("train.ckpt.save_freq", "train.ckpt.export_safetensors"):
            if key in cosmos.given:
                draft.notes[key] = ("left out", "enable_checkpoint is false; only the last step is exported as a model")
    elif cosmos["train.ckpt.export_safetensors"]:
        draft.set("checkpoint.export", "all")
        draft.set("checkpoint.export_keep", keep)
    else:
        draft.set("checkpoint.export", "final")
    targets = [*convert_hub_upload(cosmos, draft), *convert_s3_upload(cosmos, draft)]
    draft.set("checkpoint.upload", targets or None)


def convert_hub_upload(cosmos: Settings, draft: Draft) -> list[dict[str, str]]:
    if not cosmos["train.ckpt.upload_hf"]:
        return []
    name = cosmos["train.ckpt.hf_repo_name"]
    if name.count("/") != 1:
        draft.refuse(
            "train.ckpt.hf_repo_name",
            f'{name!r} has no owner (cosmos-rl looks it up on the Hub, and appends the time); set "you/{name}", '
            "otherwise nothing is uploaded to the Hub",
        )
        return []
    return [{"to": f"hub:{name}", "what": "final"}]


def convert_s3_upload(cosmos: Settings, draft: Draft) -> list[dict[str, str]]:
    upload_mode, bucket = cosmos["train.ckpt.upload_s3"], cosmos["train.ckpt.s3_bucket"]
    if upload_mode in (False, "", "false"):
        return []
    if upload_mode is True or upload_mode == "true":
        draft.note_difference(
            "train.ckpt.upload_s3", 'cosmos-rl rejects true; "final" or "all" was probably meant, and "final" is used'
        )
        upload_mode = "final"
    if upload_mode not in ("final", "all"):
        draft.reject_value("train.ckpt.upload_s3", f'must be one of false, "final", "all"; got {upload_mode!r}')
        return []
    if not bucket:
        draft.reject_value("train.ckpt.upload_s3", "s3_bucket is missing; set it to the bucket to upload to")
        return []
    prefix = cosmos["train.ckpt.s3_prefix"].strip("/")
    return [{"to": f"s3://{bucket}" + (f"/{prefix}" if prefix else ""), "what": upload_mode}]


def convert_preferences(cosmos: Settings, draft: Draft) -> None:
    """Convert the DPO losses. cosmos-rl has no reference model: its loss uses only the policy's log-probabilities."""
    losses, weights = cosmos["custom.dpo_loss_type"], cosmos["custom.dpo_loss_weights"]
    names, weights = to_list(losses), None if weights is None else to_list(weights)
    if unknown := [name for name in names if name not in LOSSES]:
        draft.reject_value("custom.dpo_loss_type", f"must be one of {', '.join(LOSSES)}; got {unknown[0]!r}")
        return
    if weights is not None and len(weights) != len(names):
        draft.note_difference(
            "custom.dpo_loss_weights",
            f"{len(weights)} weights are set for {len(names)} losses, so each weight is 1, as in cosmos-rl",
        )
        weights = None
    parts = dict(zip((LOSSES[name] for name in names), weights or [1.0] * len(names), strict=True))
    sft = parts.pop("sft", None)
    draft.set("dpo.sft_weight", sft)
    draft.set("dpo.loss_weights", {name: float(weight) for name, weight in parts.items() if weight} or None)
    if not parts:
        draft.reject_value(
            "custom.dpo_loss_type", "sft by itself is not a preference loss; remove trainer_type, and set type to sft"
        )
    if "bco" in parts:
        draft.note_difference(
            "custom.dpo_loss_type",
            "bco compares with a reference, which is the initial model; cosmos-rl has no reference",
        )
    else:
        draft.set("dpo.reference", "none")


def is_divisible(value: Any, parts: int) -> bool:
    """Return whether `parts` divides the value."""
    return parts > 0 and value % parts == 0
