"""Keys for world models in diffusers' format: `[policy.diffusers]`, and other sections' keys that world models use."""

from __future__ import annotations

from dsreason.tools.cosmos_rl.keys import grpo, model, train
from dsreason.tools.cosmos_rl.keys.key import Key, make_copied, make_fixed, make_joint, make_unused, restrict_all

ODE = "clips are sampled along the ODE of the model family's schedule, without noise"
ALWAYS_CLIPS = "dsreason world trains only models that generate clips"

OTHERS: dict[str, Key] = {
    name: make_unused(key.default, "it applies to language models", takes="any")
    for name, key in (train.DATA | grpo.KEYS | model.KEYS).items()
}

SHARED: dict[str, Key] = (
    train.KEYS
    | {name: key for name, key in model.KEYS.items() if name.startswith(("logging.", "profiler."))}
    | model.OUTSIDE
)

OWN: dict[str, Key] = {
    "train.train_batch_per_replica": make_joint(8, "world.prompts_per_step", "train.global_batch_size"),
    "train.resume": make_joint(False, "--resume", takes="any"),
    "train.activation_offload": make_unused(False, "the inputs of layers stay on the GPU", takes="bool"),
    "train.sequence_packing": make_unused(False, "each clip is a separate sample"),
    "train.ema_enable": make_joint(False, "train.ema_decay"),
    "train.ema_decay": make_joint(0.9999, "train.ema_decay"),
    "train.ema_update_interval": make_joint(0, "train.ema_every"),
    "train.train_policy.type": make_joint("grpo", "world.algorithm"),
    "train.train_policy.trainer_type": make_joint("", "world.algorithm"),
    "train.train_policy.mini_batch": make_copied(2, "train.micro_batch_size"),
    "train.train_policy.dataset.name": make_joint("", "data.path", "data.format"),
    "train.train_policy.dataset.local_dir": make_joint("", "data.path", "data.format"),
    "train.train_policy.dataset.split": make_joint("", "data.path", takes="names"),
    "train.train_policy.dataloader_shuffle": make_copied(True, "data.shuffle"),
    "train.train_policy.dataloader_num_workers": make_joint(0, "data.workers"),
    "train.train_policy.dataloader_prefetch_factor": make_joint(None, "data.prefetch", takes="int"),
    "train.train_policy.dataloader_seed": make_joint(0, "train.seed"),
    "train.train_policy.kl_beta": make_copied(0.0, "world.kl_coef"),
    "train.train_policy.advantage_low": make_joint(-5.0, "world.advantage_clip"),
    "train.train_policy.advantage_high": make_joint(5.0, "world.advantage_clip"),
    "train.train_policy.use_remote_reward": make_joint(False, "reward.services"),
    "train.train_policy.remote_reward.scale": make_copied(1.0, "reward.scale"),
    "train.train_policy.remote_reward.reward_fns": make_joint(None, "reward.services", takes="tables"),
    "train.train_policy.remote_reward.reward_clip_min": make_fixed(
        -5.0,
        -5.0,
        -5,
        because="the sum of rewards is always clipped at ± 5",
        instead="the sum of rewards is always clipped at ± 5; set it to -5",
    ),
    "train.train_policy.remote_reward.reward_clip_max": make_fixed(
        5.0,
        5.0,
        5,
        because="the sum of rewards is always clipped at ± 5",
        instead="the sum of rewards is always clipped at ± 5; set it to 5",
    ),
    "train.train_policy.remote_reward.batch_size": make_unused(1, "each request contains the clips of one micro-batch"),
    "train.train_policy.reward_function": make_joint(None, "reward.functions", takes="rewards"),
    "train.train_policy.uncentralized_training": make_unused(False, "every rank always reads its own prompts"),
    "policy.model_name_or_path": make_copied("Qwen/Qwen2.5-VL-7B-Instruct", "model.path"),
    "policy.model_revision": make_copied(None, "model.revision"),
    "policy.model_gradient_checkpointing": make_copied(True, "model.gradient_checkpointing"),
    "policy.is_diffusers": make_joint(False, "the command"),
    "policy.lora.r": make_joint(8, "lora.rank"),
    "policy.lora.lora_alpha": make_joint(8.0, "lora.alpha"),
    "policy.lora.target_modules": make_joint(None, "lora.targets", takes="names"),
    "policy.lora.lora_names": make_unused(
        None, "the earlier weights are kept as tensors, not as a second adapter", takes="any"
    ),
    "policy.lora.init_lora_weights": make_unused(
        True, "B is 0 and A is random, so training starts from the unchanged model", takes="any"
    ),
    "policy.diffusers.is_video": make_unused(True, ALWAYS_CLIPS),
    "policy.diffusers.offload": make_unused(False, "idle parts are kept in CPU memory if the algorithm permits it"),
    "policy.diffusers.max_prompt_length": make_copied(512, "model.max_prompt_length"),
    "policy.diffusers.inference_size": make_joint([512, 512], "data.height", "data.width"),
    "policy.diffusers.train_frames": make_copied(93, "data.frames"),
    "policy.diffusers.timesteps_fraction": make_joint(0.99, "world.nft_times"),
    "policy.diffusers.nft_beta": make_copied(1.0, "world.nft_beta"),
    "policy.diffusers.weight_copy_decay_type": make_joint(1, "world.nft_decay"),
    "policy.diffusers.sample.num_steps": make_copied(10, "world.sampling_steps"),
    "policy.diffusers.sample.eval_num_steps": make_copied(40, "validation.sampling_steps"),
    "policy.diffusers.sample.guidance_scale": make_joint(1.0, "world.guidance_scale"),
    "policy.diffusers.sample.noise_level": make_unused(0.7, ODE),
    "policy.diffusers.sample.solver": make_joint("dpm2", "world.schedule"),
    "policy.diffusers.sample.deterministic_sampling": make_unused(True, ODE),
    "policy.parallelism.n_init_replicas": make_joint(1, "GPUs", "world.prompts_per_step"),
    "policy.parallelism.tp_size": make_joint(1, "GPUs"),
    "policy.parallelism.cp_size": make_joint(1, "train.context_parallel_size"),
    "policy.parallelism.dp_shard_size": make_joint(1, "GPUs"),
    "policy.parallelism.dp_replicate_size": make_joint(1, "GPUs"),
    "policy.parallelism.pp_size": make_joint(1, "GPUs"),
    "rollout.backend": make_joint("diffusion_nft_rollout", "world.algorithm"),
    "rollout.n_generation": make_joint(16, "world.num_generations"),
    "validation.enable": make_joint(False, "validation.every"),
    "validation.freq": make_joint(20, "validation.every"),
    "validation.val_before_train": make_joint(False, "validation.before_training"),
    "validation.dataset.name": make_joint("", "data.validation"),
    "validation.dataset.local_dir": make_joint("", "data.validation"),
    "validation.dataset.split": make_joint("", "data.validation", takes="names"),
}

KEYS: dict[str, Key] = OTHERS | restrict_all(SHARED | OWN, "world")
KEYS |= restrict_all({name: KEYS[name] for name in OTHERS}, "world")
