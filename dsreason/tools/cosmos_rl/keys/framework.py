"""Keys of cosmos-framework's supervised fine-tuning: `[job]`, `[model]`, `[optimizer]`, `[scheduler]`, `[trainer]` and others.

A key that the file omits has the value of the experiment's Python file, which dsreason cannot read; the defaults here are those
of the framework's base configurations.
"""

from __future__ import annotations

from typing import Any

from dsreason.tools.cosmos_rl.keys.key import Key, make_copied, make_fixed, make_joint, make_unused, restrict_all
from dsreason.tools.cosmos_rl.keys.train import SHARDS, SPEED, convert_interval, convert_precision

NAMES = "the run is named after its output folder"
ONLY_REASONERS = "cosmos-framework reads it only for reasoners (job.task = vlm)"
ONLY_GENERATORS = "cosmos-framework reads it only for generators (job.task = vfm)"
TOKENIZER = "it affects only the speed of the video autoencoder"


def convert_recomputation(mode: Any) -> bool:
    if mode not in ("full", "selective", "none"):
        raise ValueError('must be one of "full", "selective", "none"')
    return mode in ("full", "selective")


JOB: dict[str, Key] = {
    "job.task": make_joint("vfm", "the command"),
    "job.experiment": make_joint("", "data.path", "model.freeze"),
    "job.project": make_joint("", "monitor.wandb_project"),
    "job.group": make_unused("", NAMES),
    "job.name": make_joint("", "monitor.wandb_name"),
    "job.wandb_mode": make_joint("disabled", "monitor.wandb"),
    "job.upload_reproducible_setup": make_fixed(
        False, False, because="it is off", instead="set checkpoint.upload in the imported file, and this key to false"
    ),
    "custom": make_unused(None, "your own code reads it", takes="table"),
}

MODEL: dict[str, Key] = {
    "model.precision": make_copied("bfloat16", "train.precision", convert=convert_precision),
    "model.parallelism.data_parallel_shard_degree": make_joint(-1, "GPUs", "train.global_batch_size"),
    "model.parallelism.data_parallel_replicate_degree": make_joint(1, "GPUs", "train.global_batch_size"),
    "model.parallelism.cfg_parallel_shard_degree": make_joint(1, "GPUs"),
    "model.compile.enabled": make_unused(False, SPEED),
    "model.compile.compile_dynamic": make_unused(True, SPEED),
    "model.compile.compiled_region": make_unused("language", SPEED),
    "model.activation_checkpointing.mode": make_copied(
        "full", "model.gradient_checkpointing", convert=convert_recomputation
    ),
    "model.activation_checkpointing.save_ops_regex": make_unused(["fmha"], SPEED),
    "model.activation_checkpointing.preserve_rng_state": make_unused(True, "recomputed layers draw no random numbers"),
    "model.activation_checkpointing.determinism_check": make_unused("default", "it only checks recomputed layers"),
    "model.lora_enabled": make_joint(False, "lora.rank"),
    "model.lora_rank": make_joint(16, "lora.rank"),
    "model.lora_alpha": make_joint(32, "lora.alpha", takes="number"),
    "model.lora_target_modules": make_joint("", "lora.targets"),
    "model.ema.enabled": make_joint(False, "train.ema_decay"),
    "model.ema.rate": make_joint(0.1, "train.ema_decay"),
    "model.ema.iteration_shift": make_joint(0, "train.ema_decay"),
}

TRAINING: dict[str, Key] = {
    "optimizer.lr": make_joint(2e-6, "optim.lr"),
    "optimizer.betas": make_copied([0.9, 0.95], "optim.betas"),
    "optimizer.fused": make_unused(True, "DeepSpeed has one implementation of AdamW for each device"),
    "optimizer.weight_decay": make_copied(0.1, "optim.weight_decay"),
    "optimizer.keys_to_select": make_joint([], "model.freeze", "lora.rank", takes="names"),
    "optimizer.lr_multipliers": make_joint({}, "optim.lr_multipliers", takes="table"),
    "scheduler.warm_up_steps": make_joint([1000], "optim.warmup", takes="numbers"),
    "scheduler.cycle_lengths": make_joint([], "optim.schedule_steps", takes="numbers"),
    "scheduler.f_start": make_joint([0.05], "optim.warmup_start", takes="numbers"),
    "scheduler.f_max": make_joint([1.0], "optim.lr", takes="numbers"),
    "scheduler.f_min": make_joint([0.5], "optim.min_lr_share", takes="numbers"),
    "scheduler.verbosity_interval": make_unused(0, "every step is logged"),
    "trainer.distributed_parallelism": make_unused("fsdp", SHARDS),
    "trainer.grad_accum_iter": make_joint(1, "train.global_batch_size"),
    "trainer.logging_iter": make_copied(1, "monitor.log_every"),
    "trainer.max_iter": make_copied(500, "train.max_steps"),
    "trainer.callbacks.grad_clip.clip_norm": make_copied(1.0, "optim.max_grad_norm"),
    "trainer.callbacks.grad_clip.force_finite": make_joint(False, "train.on_nonfinite"),
    "checkpoint.save_iter": make_copied(100, "checkpoint.every", convert=convert_interval),
    "checkpoint.load_path": make_joint("", "model.path"),
    "checkpoint.keys_to_skip_loading": make_joint([], "model.path", takes="names"),
    "dataloader_train.max_samples_per_batch": make_joint(None, "train.global_batch_size", takes="int"),
}

VISIBLE_TO_GENERATORS: dict[str, Key] = {
    "model.max_num_tokens_after_packing": make_joint(45056, "train.micro_batch_size"),
    "model.joint_attn_implementation": make_unused("two_way", "the model family determines the attention"),
    "model.tokenizer.vae_path": make_unused("", "the video autoencoder is in the model folder"),
    "trainer.callbacks.compile_tokenizer.enabled": make_unused(False, TOKENIZER),
    "trainer.callbacks.compile_tokenizer.compile_after_iterations": make_unused(3, TOKENIZER),
    "trainer.callbacks.compile_tokenizer.warmup_resolutions": make_unused(None, TOKENIZER, takes="list"),
    "dataloader_train.max_caption_tokens": make_copied(None, "model.max_prompt_length", takes="int"),
    "dataloader_train.seed": make_copied(42, "train.seed"),
}
VISIBLE_TO_REASONERS: dict[str, Key] = {
    "model.backbone.model_name": make_joint("", "model.path"),
    "model.backbone.safetensors_path": make_joint("", "model.path"),
    "model.attn_implementation": make_unused("cosmos", "model.attention separates the samples of a packed row itself"),
}


def mark_as_ignored(keys: dict[str, Key], reason: str) -> dict[str, Key]:
    """Return entries that mark the keys as ignored by the framework in this kind of training."""
    return {name: make_unused(key.default, reason, takes=key.takes) for name, key in keys.items()}


REASONER: dict[str, Key] = restrict_all(
    JOB
    | MODEL
    | TRAINING
    | mark_as_ignored(VISIBLE_TO_GENERATORS, ONLY_GENERATORS)
    | VISIBLE_TO_REASONERS
    | {
        "model.parallelism.context_parallel_shard_degree": make_joint(1, "train.sequence_parallel_size", "GPUs"),
        "optimizer.eps": make_unused(
            1e-8, f"{ONLY_GENERATORS}; reasoners always have 1e-8, and so has the imported file"
        ),
        "dataloader_train.max_sequence_length": make_joint(
            None, "model.max_length", "train.max_tokens_per_micro_batch", takes="int"
        ),
    },
    "sft",
)
"""Keys in files with `job.task = "vlm"`, which train a vision-language model."""
GENERATOR: dict[str, Key] = restrict_all(
    JOB
    | MODEL
    | TRAINING
    | VISIBLE_TO_GENERATORS
    | mark_as_ignored(VISIBLE_TO_REASONERS, ONLY_REASONERS)
    | {
        "model.parallelism.context_parallel_shard_degree": make_joint(1, "train.context_parallel_size", "GPUs"),
        "optimizer.lr": make_joint(2e-4, "optim.lr"),
        "optimizer.eps": make_copied(1e-8, "optim.eps"),
        "optimizer.weight_decay": make_copied(0.0, "optim.weight_decay"),
        "scheduler.f_min": make_joint([0.0], "optim.min_lr_share", takes="numbers"),
        "trainer.callbacks.grad_clip.force_finite": make_joint(True, "train.on_nonfinite"),
        "dataloader_train.max_sequence_length": make_joint(None, "train.micro_batch_size", takes="int"),
    },
    "world",
)
"""Keys in files with `job.task = "vfm"`, which train a world model."""
