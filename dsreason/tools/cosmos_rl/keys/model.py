"""Keys of `[policy]`, `[validation]`, `[logging]`, `[profiler]` and `[custom]`, and top-level keys."""

from __future__ import annotations

from dsreason.tools.cosmos_rl.keys.grpo import NO_PIPELINE
from dsreason.tools.cosmos_rl.keys.key import Key, make_copied, make_fixed, make_joint, make_unused, restrict_all
from dsreason.tools.cosmos_rl.keys.train import SPEED

NO_CONTROLLER = "no controller or redis is needed, because all ranks belong to one job"
PROFILER = "a profiler does not change any result"

POLICY: dict[str, Key] = {
    "policy.model_name_or_path": make_copied("Qwen/Qwen2.5-VL-7B-Instruct", "model.path"),
    "policy.model_revision": make_joint(None, "model.revision", takes="string"),
    "policy.model_max_length": make_copied(4096, "model.max_length"),
    "policy.model_gradient_checkpointing": make_copied(True, "model.gradient_checkpointing"),
    "policy.is_diffusers": make_unused(False, "it is off"),
    "policy.freeze_pattern": make_joint(None, "model.freeze", takes="names"),
    "policy.trainable_pattern": make_joint(None, "model.freeze", takes="names"),
    "policy.trainable_map": make_fixed(
        None,
        None,
        {},
        because="it is empty",
        instead="select the frozen weights with regular expressions in freeze_pattern",
    ),
    "policy.enable_liger_kernel": make_unused(False, SPEED),
    "policy.aux_loss_coeff": make_fixed(
        0.0,
        0.0,
        because="0 disables it",
        instead="models with experts are trained without an auxiliary loss; set it to 0",
    ),
    "policy.lora.r": make_joint(8, "lora.rank"),
    "policy.lora.lora_alpha": make_joint(8.0, "lora.alpha"),
    "policy.lora.lora_dropout": make_joint(0.0, "lora.dropout"),
    "policy.lora.target_modules": make_joint(None, "lora.targets", "lora.vision", takes="names"),
    "policy.lora.use_rslora": make_joint(False, "lora.rslora"),
    "policy.lora.modules_to_save": make_joint(None, "lora.targets", takes="names"),
    "policy.lora.alpha_pattern": make_joint(None, "lora.alpha_pattern", takes="table"),
    "policy.lora.r_pattern": make_joint(None, "lora.rank_pattern", takes="table"),
    "policy.lora.init_lora_weights": make_joint(True, "lora.rank", takes="any"),
    "policy.lora.lora_names": make_unused(None, "only one adapter is trained", takes="any"),
    "policy.lora.lora_path": make_unused(None, "cosmos-rl does not read it", takes="any"),
    "policy.parallelism.n_init_replicas": make_joint(1, "GPUs", "train.global_batch_size"),
    "policy.parallelism.tp_size": make_joint(2, "GPUs"),
    "policy.parallelism.cp_size": make_joint(1, "train.sequence_parallel_size"),
    "policy.parallelism.ep_size": make_unused(1, "ZeRO-3 shards experts like all other weights"),
    "policy.parallelism.dp_shard_size": make_joint(1, "GPUs", "train.global_batch_size"),
    "policy.parallelism.dp_replicate_size": make_joint(1, "GPUs", "train.global_batch_size"),
    "policy.parallelism.pp_size": make_joint(1, "GPUs"),
    "policy.parallelism.pp_dynamic_shape": make_unused(False, NO_PIPELINE),
    "policy.parallelism.pp_micro_batch_size": make_unused(1, NO_PIPELINE),
    "policy.parallelism.pp_schedule": make_unused("Interleaved1F1B", NO_PIPELINE),
}

VALIDATION: dict[str, Key] = {
    "validation.enable": make_joint(False, "data.validation", "validation.every"),
    "validation.freq": make_joint(20, "validation.every"),
    "validation.val_before_train": make_joint(False, "validation.before_training"),
    "validation.batch_size": make_joint(None, "validation.micro_batch_size", takes="int"),
    "validation.dataset.name": make_joint("", "data.validation"),
    "validation.dataset.local_dir": make_joint("", "data.validation"),
    "validation.dataset.subset": make_joint("", "data.validation", takes="string"),
    "validation.dataset.revision": make_joint("", "data.validation", takes="string"),
    "validation.dataset.split": make_joint("", "data.validation", takes="names"),
    "validation.dataset.test_size": make_joint(None, "data.validation", takes="number"),
} | restrict_all(
    {
        "validation.temperature": make_joint(0.0, "validation.temperature"),
        "validation.top_p": make_joint(None, "validation.top_p", takes="number"),
        "validation.top_k": make_joint(1, "validation.temperature", takes="int"),
        "validation.repetition_penalty": make_joint(1.0, "validation.temperature"),
        "validation.n_generation": make_joint(1, "validation.temperature"),
        "validation.max_response_length": make_joint(None, "validation.max_completion_length", takes="int"),
        "validation.reward_function": make_joint([], "reward.functions", takes="rewards"),
        "validation.use_remote_reward": make_unused(
            None, "held-out rows are scored with the training rewards", takes="any"
        ),
    },
    "grpo",
)

LOGGING: dict[str, Key] = {
    "logging.logger": make_joint(None, "monitor.wandb", takes="names"),
    "logging.project_name": make_joint("cosmos_rl", "monitor.wandb_project"),
    "logging.experiment_name": make_joint(None, "monitor.wandb_name", takes="string"),
    "logging.group_name": make_unused(None, "runs are not grouped in Weights & Biases", takes="any"),
    "logging.log_interval": make_unused(100, "every step is logged (monitor.log_every)"),
    "logging.multi_modal_log_interval": make_unused(
        None, "[rollout] and [validation] select the media that TensorBoard shows"
    ),
    "logging.report_mfu": make_unused(False, "it is always reported if the GPU's peak FLOP/s are known"),
}

PROFILING: dict[str, Key] = {
    "profiler.enable_profiler": make_unused(False, PROFILER),
    "profiler.enable_nsys": make_unused(False, PROFILER),
} | {
    f"profiler.sub_profiler_config.{name}": make_unused(default, PROFILER, takes="any")
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
"""Keys of `[custom.vision]`, each with the corresponding key of `[data.vision]`."""

CUSTOM: dict[str, Key] = {
    "custom.dataset.annotation_path": make_joint("", "data.path", "data.adapter"),
    "custom.dataset.media_path": make_joint("", "data.media_path"),
    "custom.dataset.path": make_joint("", "data.path", "data.adapter"),
    "custom.dataset.system_prompt": make_joint("", "data.system_prompt"),
    "custom.train_dataset.annotation_path": make_joint("", "data.path", "data.adapter"),
    "custom.train_dataset.media_path": make_joint("", "data.media_path"),
    "custom.train_dataset.media_root": make_joint("", "data.media_path"),
    "custom.train_dataset.system_prompt": make_joint("", "data.system_prompt"),
    "custom.train_dataset.response_mode": make_unused(None, "the answer in the row is used", takes="any"),
    "custom.val_dataset.annotation_path": make_joint("", "data.validation"),
    "custom.val_dataset.media_path": make_joint("", "data.validation"),
    "custom.val_dataset.media_root": make_joint("", "data.validation"),
    "custom.val_dataset.system_prompt": make_joint("", "data.validation"),
    "custom.system_prompt": make_joint("", "data.system_prompt"),
    "custom.payload_transfer": make_unused(None, "processes do not send data to each other", takes="any"),
    "custom.vision.resized_height": make_fixed(
        None, None, because="it is unset", instead="sizes are derived from pixel limits; set max_pixels", takes="any"
    ),
    "custom.vision.resized_width": make_fixed(
        None, None, because="it is unset", instead="sizes are derived from pixel limits; set max_pixels", takes="any"
    ),
} | {
    f"custom.vision.{cosmos_key}": make_joint(None, f"data.vision.{own_key}", takes="number")
    for cosmos_key, own_key in VISION
}

OUTSIDE: dict[str, Key] = {
    "redis": make_unused("", NO_CONTROLLER, takes="any"),
    "eth_ips": make_unused("", NO_CONTROLLER, takes="any"),
    "mode": make_unused(
        "disaggregated", "training and rollouts always share the GPUs; the engine sleeps while the policy trains"
    ),
}

KEYS: dict[str, Key] = POLICY | VALIDATION | LOGGING | PROFILING | CUSTOM | OUTSIDE
