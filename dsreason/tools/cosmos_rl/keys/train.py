"""Keys of `[train]`, except those that only GRPO reads, and the keys of DPO's losses."""

from __future__ import annotations

from typing import Any

from dsreason.tools.cosmos_rl.keys.key import Key, make_copied, make_fixed, make_joint, make_unused, restrict_all

SPEED = "it affects speed or memory, but not the result"
SYNC = "the engine always gets the latest weights before it samples"
FRESH = "each rollout is sampled from the weights that it trains"
SHARDS = "ZeRO-3 always shards the weights, and gathers each layer when it is computed"
MORE_EXACT = "sums and master weights are always float32, which is at least as precise"


def convert_precision(dtype: Any) -> str:
    precisions = {"bfloat16": "bf16", "float32": "fp32"}
    if dtype not in precisions:
        raise ValueError("weights must be bfloat16 or float32; set one of them")
    return precisions[dtype]


def convert_interval(steps: Any) -> int:
    if steps < 1:
        raise ValueError("the interval between checkpoints must be at least 1 step; set 1 or more")
    return int(steps)


OPTIMIZER: dict[str, Key] = {
    "train.optm_name": make_joint("AdamW", "optim.weight_decay", takes="names"),
    "train.optm_lr": make_joint(1e-6, "optim.lr", "optim.lr_multipliers", takes="any"),
    "train.optm_impl": make_unused("fused", "DeepSpeed has one implementation of AdamW for each device", takes="any"),
    "train.optm_weight_decay": make_joint(0.01, "optim.weight_decay"),
    "train.optm_betas": make_copied([0.9, 0.999], "optim.betas"),
    "train.epsilon": make_copied(1e-6, "optim.eps"),
    "train.optm_warmup_steps": make_joint(20, "optim.warmup", takes="number"),
    "train.optm_warmup_start_factor": make_copied(0.0, "optim.warmup_start", convert=lambda factor: factor or None),
    "train.optm_decay_type": make_joint(None, "optim.schedule", takes="string"),
    "train.optm_decay_ratio": make_joint(None, "optim.schedule", "optim.decay_share", takes="number"),
    "train.optm_min_lr_factor": make_copied(0.0, "optim.min_lr_share"),
    "train.optm_grad_norm_clip": make_copied(1.0, "optim.max_grad_norm", convert=lambda norm: max(float(norm), 0.0)),
}

RUN: dict[str, Key] = {
    "train.epoch": make_copied(1, "train.epochs"),
    "train.max_num_steps": make_joint(None, "train.max_steps", takes="int"),
    "train.output_dir": make_copied("./outputs", "output_dir"),
    "train.timestamp": make_unused("", "output folders contain no timestamp; set --output-dir for another folder"),
    "train.resume": make_joint(False, "--resume", takes="any"),
    "train.seed": make_joint(None, "train.seed", takes="int"),
    "train.deterministic": make_joint(False, "train.seed"),
    "train.train_batch_per_replica": make_joint(8, "train.global_batch_size", "grpo.prompts_per_step"),
    "train.local_dataset": make_unused(True, "every rank reads the data itself", takes="any"),
    "train.non_text": make_unused(False, "the kind of each row is detected from its content"),
    "train.force_use_hf": make_unused(False, "models always come from transformers"),
    "train.sequence_packing": make_unused(
        False,
        "samples are always packed without padding and attend only to themselves, so the gradients are the same",
    ),
    "train.save_ckpt_at_exit": make_unused(True, "a stop signal always saves a checkpoint"),
}

PRECISION: dict[str, Key] = {
    "train.param_dtype": make_copied("bfloat16", "train.precision", convert=convert_precision),
    "train.master_dtype": make_unused("float32", MORE_EXACT),
    "train.transfer_dtype": make_unused(None, "the engine gets the weights in its compute precision", takes="any"),
    "train.logprob_dtype": make_unused("float32", "log-probabilities are always float32"),
    "train.fsdp_reduce_dtype": make_unused("float32", MORE_EXACT),
    "train.fp8.enable_fp8": make_fixed(
        False, False, because="it is off", instead="8-bit training is not supported; set it to false"
    ),
    "train.fp8.fp8_recipe": make_unused("dynamic_scaling", "it applies to FP8 training, which is off"),
    "train.fp8.quant_recipe": make_unused("rowwise", "it applies to FP8 training, which is off"),
    "train.fp4.enable_fp4": make_fixed(
        False,
        False,
        because="it is off",
        instead="the only 4-bit training is QLoRA (model.quantize); set it to false",
    ),
    "train.fp4.fp4_recipe": make_unused("dynamic_scaling", "it applies to FP4 training, which is off"),
    "train.fp4.quant_recipe": make_unused("rowwise", "it applies to FP4 training, which is off"),
}

MACHINE: dict[str, Key] = {
    "train.fsdp_offload": make_joint(False, "deepspeed"),
    "train.fsdp_reshard_after_forward": make_unused("default", SHARDS),
    "train.activation_offload": make_joint(False, "train.activation_offload"),
    "train.async_tp_enabled": make_unused(False, SPEED),
    "train.compile": make_unused(True, SPEED),
    "train.fa_version": make_unused(None, "attention uses torch's flash kernel if torch has one"),
    "train.sync_weight_interval": make_unused(1, SYNC),
    "train.coalesce_weight_sync": make_unused(False, SYNC),
    "train.ema_enable": make_fixed(
        False,
        False,
        because="it is off",
        instead="only dsreason world keeps a moving average of weights; set it to false",
    ),
    "train.ema_decay": make_unused(0.9999, "it applies to the moving average, which is off", takes="number"),
    "train.ema_update_interval": make_unused(0, "it applies to the moving average, which is off"),
}

CHECKPOINTS: dict[str, Key] = {
    "train.ckpt.enable_checkpoint": make_joint(False, "checkpoint.every", "checkpoint.last", "checkpoint.keep_best"),
    "train.ckpt.save_freq": make_copied(20, "checkpoint.every", convert=convert_interval),
    "train.ckpt.save_freq_in_epoch": make_fixed(
        0,
        0,
        because="0 means that save_freq applies",
        instead="the interval is in steps; set save_freq to the number of steps in these epochs, and this key to 0",
    ),
    "train.ckpt.save_mode": make_copied("async", "checkpoint.background", convert=lambda mode: mode == "async"),
    "train.ckpt.max_keep": make_joint(5, "checkpoint.keep", "checkpoint.export_keep"),
    "train.ckpt.export_safetensors": make_joint(True, "checkpoint.export"),
    "train.ckpt.upload_hf": make_joint(False, "checkpoint.upload"),
    "train.ckpt.hf_repo_name": make_joint("Comos-Reason1", "checkpoint.upload"),
    "train.ckpt.upload_s3": make_joint(False, "checkpoint.upload", takes="any"),
    "train.ckpt.s3_bucket": make_joint(None, "checkpoint.upload", takes="string"),
    "train.ckpt.s3_prefix": make_joint("outputs", "checkpoint.upload"),
}

KEYS: dict[str, Key] = OPTIMIZER | RUN | PRECISION | MACHINE | CHECKPOINTS

DATA: dict[str, Key] = {
    "train.train_policy.type": make_joint("sft", "the command"),
    "train.train_policy.trainer_type": make_joint("", "the command"),
    "train.train_policy.mini_batch": make_joint(2, "train.max_tokens_per_micro_batch"),
    "train.train_policy.dataset.name": make_joint("", "data.path", "data.adapter"),
    "train.train_policy.dataset.local_dir": make_joint("", "data.path", "data.adapter"),
    "train.train_policy.dataset.subset": make_joint("", "data.subset", takes="string"),
    "train.train_policy.dataset.revision": make_joint("", "data.revision", takes="string"),
    "train.train_policy.dataset.split": make_joint("", "data.split", takes="names"),
    "train.train_policy.dataset.test_size": make_joint(None, "data.validation", takes="number"),
    "train.train_policy.system_prompt": make_joint("", "data.system_prompt"),
    "train.train_policy.conversation_column_name": make_joint("conversations", "data.columns"),
    "train.train_policy.dataloader_shuffle": make_copied(True, "data.shuffle"),
    "train.train_policy.dataloader_seed": make_joint(0, "train.seed"),
    "train.train_policy.dataloader_num_workers": make_joint(0, "data.workers"),
    "train.train_policy.dataloader_prefetch_factor": make_joint(None, "data.prefetch", takes="int"),
    "train.train_policy.dataloader_drop_last": make_unused(
        True, "the remaining rows of an epoch go into the first step of the next; those of the last epoch are dropped"
    ),
    "train.train_policy.dataloader_batch_size": make_unused(1, "no controller distributes rows", takes="any"),
    "train.train_policy.dataloader_broadcast": make_unused(False, "every rank reads its own rows"),
    "train.train_policy.data_dispatch_as_rank_in_mesh": make_unused(False, "every rank reads its own rows"),
    "train.train_policy.enable_dataset_cache": make_unused(False, "rows are decoded on demand, so none can be stale"),
    "train.train_policy.balance_dp_token": make_unused(
        True, "each token of the global batch always has the same weight"
    ),
    "train.train_policy.enable_dp_load_balancing": make_fixed(
        False,
        False,
        because="it is off",
        instead="a step has a fixed number of samples, and a packed row is filled up to its token limit; set it to false, "
        "and raise max_token_len_per_mini_batch for longer packed rows",
    ),
    "train.train_policy.load_balanced_pool_size": make_unused(32, "it applies to load balancing, which is off"),
    "train.train_policy.load_balanced_max_tokens_for_batch": make_unused(
        None, "it applies to load balancing, which is off"
    ),
    "train.train_policy.load_balanced_batching_strategy": make_unused(
        "prefer_closest", "it applies to load balancing, which is off"
    ),
    "train.train_policy.load_balanced_batches_per_optimizer_step": make_unused(
        1, "it applies to load balancing, which is off"
    ),
    "train.train_policy.max_token_len_per_mini_batch": make_joint(
        None, "train.max_tokens_per_micro_batch", takes="int"
    ),
}

PREFERENCES: dict[str, Key] = restrict_all(
    {
        "custom.dpo_beta": make_copied(0.1, "dpo.beta"),
        "custom.dpo_loss_type": make_joint("sigmoid", "dpo.loss_weights", "dpo.sft_weight", takes="names"),
        "custom.dpo_loss_weights": make_joint(None, "dpo.loss_weights", "dpo.sft_weight", takes="numbers"),
    },
    "dpo",
)
