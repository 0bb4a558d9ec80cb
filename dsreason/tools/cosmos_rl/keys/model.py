"""`[policy]`, `[validation]`, `[logging]`, `[profiler]`, `[custom]` and what stands outside of sections."""

from __future__ import annotations

from dsreason.tools.cosmos_rl.keys.grpo import NO_PIPELINE
from dsreason.tools.cosmos_rl.keys.key import Key, copied, joint, only, same_for, unused
from dsreason.tools.cosmos_rl.keys.train import SPEED

NO_CONTROLLER = "neither a controller nor redis is needed: the ranks are one ordinary job"
PROFILER = "a profiler records, and changes nothing that is computed"

POLICY: dict[str, Key] = {
    "policy.model_name_or_path": copied("Qwen/Qwen2.5-VL-7B-Instruct", "model.path"),
    "policy.model_revision": joint(None, "model.revision", takes="string"),
    "policy.model_max_length": copied(4096, "model.max_length"),
    "policy.model_gradient_checkpointing": copied(True, "model.gradient_checkpointing"),
    "policy.is_diffusers": unused(False, "it is off"),
    "policy.freeze_pattern": joint(None, "model.freeze", takes="names"),
    "policy.trainable_pattern": joint(None, "model.freeze", takes="names"),
    "policy.trainable_map": only(
        None, None, {}, because="it is empty", instead="say what is frozen with freeze_pattern, by regular expressions"
    ),
    "policy.enable_liger_kernel": unused(False, SPEED),
    "policy.aux_loss_coeff": only(
        0.0, 0.0, because="0 is none", instead="models with experts have no extra loss here; set it to 0"
    ),
    "policy.lora.r": joint(8, "lora.rank"),
    "policy.lora.lora_alpha": joint(8.0, "lora.alpha"),
    "policy.lora.lora_dropout": joint(0.0, "lora.dropout"),
    "policy.lora.target_modules": joint(None, "lora.targets", "lora.vision", takes="names"),
    "policy.lora.use_rslora": joint(False, "lora.rslora"),
    "policy.lora.modules_to_save": joint(None, "lora.targets", takes="names"),
    "policy.lora.alpha_pattern": joint(None, "lora.alpha_pattern", takes="table"),
    "policy.lora.r_pattern": joint(None, "lora.rank_pattern", takes="table"),
    "policy.lora.init_lora_weights": joint(True, "lora.rank", takes="any"),
    "policy.lora.lora_names": unused(None, "there is one adapter", takes="any"),
    "policy.lora.lora_path": unused(None, "cosmos-rl does not read it", takes="any"),
    "policy.parallelism.n_init_replicas": joint(1, "GPUs", "train.global_batch_size"),
    "policy.parallelism.tp_size": joint(2, "GPUs"),
    "policy.parallelism.cp_size": joint(1, "train.sequence_parallel_size"),
    "policy.parallelism.ep_size": unused(1, "ZeRO-3 shards experts as it does all weights"),
    "policy.parallelism.dp_shard_size": joint(1, "GPUs", "train.global_batch_size"),
    "policy.parallelism.dp_replicate_size": joint(1, "GPUs", "train.global_batch_size"),
    "policy.parallelism.pp_size": joint(1, "GPUs"),
    "policy.parallelism.pp_dynamic_shape": unused(False, NO_PIPELINE),
    "policy.parallelism.pp_micro_batch_size": unused(1, NO_PIPELINE),
    "policy.parallelism.pp_schedule": unused("Interleaved1F1B", NO_PIPELINE),
}

VALIDATION: dict[str, Key] = {
    "validation.enable": joint(False, "data.validation", "validation.every"),
    "validation.freq": joint(20, "validation.every"),
    "validation.val_before_train": joint(False, "validation.before_training"),
    "validation.batch_size": joint(None, "validation.micro_batch_size", takes="int"),
    "validation.dataset.name": joint("", "data.validation"),
    "validation.dataset.local_dir": joint("", "data.validation"),
    "validation.dataset.subset": joint("", "data.validation", takes="string"),
    "validation.dataset.revision": joint("", "data.validation", takes="string"),
    "validation.dataset.split": joint("", "data.validation", takes="names"),
    "validation.dataset.test_size": joint(None, "data.validation", takes="number"),
} | same_for(
    {
        "validation.temperature": joint(0.0, "validation.temperature"),
        "validation.top_p": joint(None, "validation.top_p", takes="number"),
        "validation.top_k": joint(1, "validation.temperature", takes="int"),
        "validation.repetition_penalty": joint(1.0, "validation.temperature"),
        "validation.n_generation": joint(1, "validation.temperature"),
        "validation.max_response_length": joint(None, "validation.max_completion_length", takes="int"),
        "validation.reward_function": joint([], "reward.functions", takes="rewards"),
        "validation.use_remote_reward": unused(None, "held-out rows have the rewards of training", takes="any"),
    },
    "grpo",
)

LOGGING: dict[str, Key] = {
    "logging.logger": joint(None, "monitor.wandb", takes="names"),
    "logging.project_name": joint("cosmos_rl", "monitor.wandb_project"),
    "logging.experiment_name": joint(None, "monitor.wandb_name", takes="string"),
    "logging.group_name": unused(None, "runs have no groups in Weights & Biases here", takes="any"),
    "logging.log_interval": unused(100, "every step is logged (monitor.log_every)"),
    "logging.multi_modal_log_interval": unused(None, "TensorBoard shows media as [rollout] and [validation] say"),
    "logging.report_mfu": unused(False, "it is always measured where the GPU's peak is known"),
}

PROFILING: dict[str, Key] = {
    "profiler.enable_profiler": unused(False, PROFILER),
    "profiler.enable_nsys": unused(False, PROFILER),
} | {
    f"profiler.sub_profiler_config.{name}": unused(default, PROFILER, takes="any")
    for name, default in {
        "do_profile": False,
        "active_steps": 1,
        "warmup_steps": 1,
        "wait_steps": 1,
        "rank_filter": None,
        "record_shape": False,
        "profile_memory": False,
        "with_stack": False,
        "with_modules": False,
    }.items()
}

VISION = (
    ("fps", "fps"),
    ("nframes", "nframes"),
    ("min_frames", "min_frames"),
    ("max_frames", "max_frames"),
    ("min_pixels", "min_pixels"),
    ("max_pixels", "max_pixels"),
    ("total_pixels", "total_pixels"),
    ("video_start", "video_start"),
    ("video_end", "video_end"),
)
"""Keys of `[custom.vision]`, and ours."""

CUSTOM: dict[str, Key] = {
    "custom.dataset.annotation_path": joint("", "data.path", "data.adapter"),
    "custom.dataset.media_path": joint("", "data.media_path"),
    "custom.dataset.path": joint("", "data.path", "data.adapter"),
    "custom.dataset.system_prompt": joint("", "data.system_prompt"),
    "custom.train_dataset.annotation_path": joint("", "data.path", "data.adapter"),
    "custom.train_dataset.media_path": joint("", "data.media_path"),
    "custom.train_dataset.media_root": joint("", "data.media_path"),
    "custom.train_dataset.system_prompt": joint("", "data.system_prompt"),
    "custom.train_dataset.response_mode": unused(None, "the answer is the one that the row has", takes="any"),
    "custom.val_dataset.annotation_path": joint("", "data.validation"),
    "custom.val_dataset.media_path": joint("", "data.validation"),
    "custom.val_dataset.media_root": joint("", "data.validation"),
    "custom.val_dataset.system_prompt": joint("", "data.validation"),
    "custom.system_prompt": joint("", "data.system_prompt"),
    "custom.payload_transfer": unused(None, "nothing is sent from process to process", takes="any"),
    "custom.vision.resized_height": only(
        None, None, because="it is unset", instead="sizes follow from pixels here; set max_pixels", takes="any"
    ),
    "custom.vision.resized_width": only(
        None, None, because="it is unset", instead="sizes follow from pixels here; set max_pixels", takes="any"
    ),
} | {f"custom.vision.{theirs}": joint(None, f"data.vision.{ours}", takes="number") for theirs, ours in VISION}

OUTSIDE: dict[str, Key] = {
    "redis": unused("", NO_CONTROLLER, takes="any"),
    "eth_ips": unused("", NO_CONTROLLER, takes="any"),
    "mode": unused(
        "disaggregated", "training and rollouts always share the GPUs; the engine sleeps while the policy trains"
    ),
}

KEYS: dict[str, Key] = POLICY | VALIDATION | LOGGING | PROFILING | CUSTOM | OUTSIDE
