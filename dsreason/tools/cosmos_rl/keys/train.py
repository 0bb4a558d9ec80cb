"""`[train]` without its `train_policy`: optimizer, precision, sharding, checkpoints."""

from __future__ import annotations

from typing import Any

from dsreason.tools.cosmos_rl.keys.key import Key, copied, joint, only, same_for, unused

SPEED = "it changes speed or memory, not what is computed"
SYNC = "the engine gets the weights of every step before it samples"
FRESH = "each rollout is drawn from the weights that it trains"
SHARDS = "ZeRO-3 always shards, and gathers a layer when it is computed"
MORE_EXACT = "sums and master weights are always float32 here, which is at least as exact"


def precision(dtype: Any) -> str:
    precisions = {"bfloat16": "bf16", "float32": "fp32"}
    if dtype not in precisions:
        raise ValueError("weights are bfloat16 or float32 here; set one of them")
    return precisions[dtype]


def one_rate(rate: Any) -> float:
    rates = rate if isinstance(rate, list) else [rate]
    if not rates or any(isinstance(each, dict) or each != rates[0] for each in rates):
        raise ValueError("all weights have one learning rate here; give one number")
    return float(rates[0])


def steps_between(steps: Any) -> int:
    if steps < 1:
        raise ValueError("steps between checkpoints are 1 or more")
    return int(steps)


OPTIMIZER: dict[str, Key] = {
    "train.optm_name": joint("AdamW", "optim.weight_decay", takes="names"),
    "train.optm_lr": copied(1e-6, "optim.lr", "any", convert=one_rate),
    "train.optm_impl": unused("fused", "DeepSpeed has one implementation of AdamW for each device", takes="any"),
    "train.optm_weight_decay": joint(0.01, "optim.weight_decay"),
    "train.optm_betas": copied([0.9, 0.999], "optim.betas"),
    "train.epsilon": copied(1e-6, "optim.eps"),
    "train.optm_warmup_steps": joint(20, "optim.warmup", takes="number"),
    "train.optm_warmup_start_factor": only(
        0.0, 0.0, because="the warmup begins at 0 here, too", instead="the warmup begins at 0 here; remove the key"
    ),
    "train.optm_decay_type": joint(None, "optim.schedule", takes="string"),
    "train.optm_decay_ratio": joint(None, "optim.schedule", "optim.decay_share", takes="number"),
    "train.optm_min_lr_factor": copied(0.0, "optim.min_lr_share"),
    "train.optm_grad_norm_clip": copied(1.0, "optim.max_grad_norm", convert=lambda norm: max(float(norm), 0.0)),
}

RUN: dict[str, Key] = {
    "train.epoch": copied(1, "train.epochs"),
    "train.max_num_steps": joint(None, "train.max_steps", takes="int"),
    "train.output_dir": copied("./outputs", "output_dir"),
    "train.timestamp": unused("", "the output folder has no folder of a time in it; --output-dir names another"),
    "train.resume": joint(False, "--resume", takes="any"),
    "train.seed": joint(None, "train.seed", takes="int"),
    "train.deterministic": joint(False, "train.seed"),
    "train.train_batch_per_replica": joint(8, "train.global_batch_size", "grpo.prompts_per_step"),
    "train.local_dataset": unused(True, "every rank reads the data itself", takes="any"),
    "train.non_text": unused(False, "what a row holds is seen in the row"),
    "train.force_use_hf": unused(False, "models are always transformers' own"),
    "train.sequence_packing": unused(
        False,
        "samples are always packed into rows without padding, and attend to themselves only: gradients are the same",
    ),
    "train.save_ckpt_at_exit": unused(True, "a stop signal always saves a checkpoint"),
}

PRECISION: dict[str, Key] = {
    "train.param_dtype": copied("bfloat16", "train.precision", convert=precision),
    "train.master_dtype": unused("float32", MORE_EXACT),
    "train.transfer_dtype": unused(None, "the engine gets weights in the precision in which it computes", takes="any"),
    "train.logprob_dtype": unused("float32", "log-probabilities are always float32"),
    "train.fsdp_reduce_dtype": unused("float32", MORE_EXACT),
    "train.fp8.enable_fp8": only(
        False, False, because="it is off", instead="training in 8 bits is not supported; set it to false"
    ),
    "train.fp8.fp8_recipe": unused("dynamic_scaling", "it is of FP8, which is off"),
    "train.fp8.quant_recipe": unused("rowwise", "it is of FP8, which is off"),
    "train.fp4.enable_fp4": only(
        False,
        False,
        because="it is off",
        instead="the only training in 4 bits is QLoRA (model.quantize); set it to false",
    ),
    "train.fp4.fp4_recipe": unused("dynamic_scaling", "it is of FP4, which is off"),
    "train.fp4.quant_recipe": unused("rowwise", "it is of FP4, which is off"),
}

MACHINE: dict[str, Key] = {
    "train.fsdp_offload": joint(False, "deepspeed"),
    "train.fsdp_reshard_after_forward": unused("default", SHARDS),
    "train.activation_offload": joint(False, "train.activation_offload"),
    "train.async_tp_enabled": unused(False, SPEED),
    "train.compile": unused(True, SPEED),
    "train.fa_version": unused(None, "attention takes torch's own flash kernel if torch has one"),
    "train.sync_weight_interval": unused(1, SYNC),
    "train.coalesce_weight_sync": unused(False, SYNC),
    "train.ema_enable": only(
        False,
        False,
        because="it is off",
        instead="only dsreason world keeps a moving average of weights; set it to false",
    ),
    "train.ema_decay": unused(0.9999, "it is of the moving average, which is off", takes="number"),
    "train.ema_update_interval": unused(0, "it is of the moving average, which is off"),
}

CHECKPOINTS: dict[str, Key] = {
    "train.ckpt.enable_checkpoint": joint(False, "checkpoint.every", "checkpoint.last", "checkpoint.keep_best"),
    "train.ckpt.save_freq": copied(20, "checkpoint.every", convert=steps_between),
    "train.ckpt.save_freq_in_epoch": only(
        0,
        0,
        because="0 means that save_freq counts",
        instead="checkpoints are counted in steps here: set save_freq to the number of steps in these epochs, and this to 0",
    ),
    "train.ckpt.save_mode": copied("async", "checkpoint.background", convert=lambda mode: mode == "async"),
    "train.ckpt.max_keep": joint(5, "checkpoint.keep", "checkpoint.export_keep"),
    "train.ckpt.export_safetensors": joint(True, "checkpoint.export"),
    "train.ckpt.upload_hf": joint(False, "checkpoint.upload"),
    "train.ckpt.hf_repo_name": joint("Comos-Reason1", "checkpoint.upload"),
    "train.ckpt.upload_s3": joint(False, "checkpoint.upload", takes="any"),
    "train.ckpt.s3_bucket": joint(None, "checkpoint.upload", takes="string"),
    "train.ckpt.s3_prefix": joint("outputs", "checkpoint.upload"),
}

KEYS: dict[str, Key] = OPTIMIZER | RUN | PRECISION | MACHINE | CHECKPOINTS

DATA: dict[str, Key] = {
    "train.train_policy.type": joint("sft", "the command"),
    "train.train_policy.trainer_type": joint("", "the command"),
    "train.train_policy.mini_batch": joint(2, "train.max_tokens_per_micro_batch"),
    "train.train_policy.dataset.name": joint("", "data.path", "data.adapter"),
    "train.train_policy.dataset.local_dir": joint("", "data.path", "data.adapter"),
    "train.train_policy.dataset.subset": joint("", "data.subset", takes="string"),
    "train.train_policy.dataset.revision": joint("", "data.revision", takes="string"),
    "train.train_policy.dataset.split": joint("", "data.split", takes="names"),
    "train.train_policy.dataset.test_size": joint(None, "data.validation", takes="number"),
    "train.train_policy.system_prompt": joint("", "data.system_prompt"),
    "train.train_policy.conversation_column_name": joint("conversations", "data.columns"),
    "train.train_policy.dataloader_shuffle": copied(True, "data.shuffle"),
    "train.train_policy.dataloader_seed": joint(0, "train.seed"),
    "train.train_policy.dataloader_num_workers": joint(0, "data.workers"),
    "train.train_policy.dataloader_prefetch_factor": joint(None, "data.prefetch", takes="int"),
    "train.train_policy.dataloader_drop_last": unused(
        True, "what is left of an epoch goes into the next one's first step; of the last epoch it is left out"
    ),
    "train.train_policy.dataloader_batch_size": unused(1, "no controller hands out rows", takes="any"),
    "train.train_policy.dataloader_broadcast": unused(False, "every rank reads its own rows"),
    "train.train_policy.data_dispatch_as_rank_in_mesh": unused(False, "every rank reads its own rows"),
    "train.train_policy.enable_dataset_cache": unused(
        False, "rows are decoded when they are needed, and none is stale"
    ),
    "train.train_policy.balance_dp_token": unused(True, "each token of the global batch always counts the same"),
    "train.train_policy.enable_dp_load_balancing": only(
        False,
        False,
        because="it is off",
        instead="a step has a fixed number of samples here, and a row as many as fit; set it to false, and "
        "max_token_len_per_mini_batch where rows should be longer",
    ),
    "train.train_policy.load_balanced_pool_size": unused(32, "it is of the load balancing, which is off"),
    "train.train_policy.load_balanced_max_tokens_for_batch": unused(None, "it is of the load balancing, which is off"),
    "train.train_policy.load_balanced_batching_strategy": unused(
        "prefer_closest", "it is of the load balancing, which is off"
    ),
    "train.train_policy.load_balanced_batches_per_optimizer_step": unused(
        1, "it is of the load balancing, which is off"
    ),
    "train.train_policy.max_token_len_per_mini_batch": joint(None, "train.max_tokens_per_micro_batch", takes="int"),
}

PREFERENCES: dict[str, Key] = same_for(
    {
        "custom.dpo_beta": copied(0.1, "dpo.beta"),
        "custom.dpo_loss_type": joint("sigmoid", "dpo.loss_weights", "dpo.sft_weight", takes="names"),
        "custom.dpo_loss_weights": joint(None, "dpo.loss_weights", "dpo.sft_weight", takes="numbers"),
    },
    "dpo",
)
