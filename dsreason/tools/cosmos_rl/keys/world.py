"""World models in diffusers' format: `[policy.diffusers]`, and what the other sections mean there."""

from __future__ import annotations

from dsreason.tools.cosmos_rl.keys import grpo, model, train
from dsreason.tools.cosmos_rl.keys.key import Key, copied, joint, only, same_for, unused

ODE = "clips are drawn along the ODE of the family's schedule, without noise"
ALWAYS_CLIPS = "all that dsreason world trains makes clips"

OTHERS: dict[str, Key] = {
    name: unused(key.default, "it is of language models", takes="any")
    for name, key in (train.DATA | grpo.KEYS | model.KEYS).items()
}

SHARED: dict[str, Key] = (
    train.KEYS
    | {name: key for name, key in model.KEYS.items() if name.startswith(("logging.", "profiler."))}
    | model.OUTSIDE
)

OWN: dict[str, Key] = {
    "train.train_batch_per_replica": joint(8, "world.prompts_per_step", "train.global_batch_size"),
    "train.resume": joint(False, "--resume", takes="any"),
    "train.activation_offload": unused(False, "a layer's input stays on the GPU", takes="bool"),
    "train.sequence_packing": unused(False, "each clip is a separate sample"),
    "train.ema_enable": joint(False, "train.ema_decay"),
    "train.ema_decay": joint(0.9999, "train.ema_decay"),
    "train.ema_update_interval": joint(0, "train.ema_every"),
    "train.train_policy.type": joint("grpo", "world.algorithm"),
    "train.train_policy.trainer_type": joint("", "world.algorithm"),
    "train.train_policy.mini_batch": copied(2, "train.micro_batch_size"),
    "train.train_policy.dataset.name": joint("", "data.path", "data.format"),
    "train.train_policy.dataset.local_dir": joint("", "data.path", "data.format"),
    "train.train_policy.dataset.split": joint("", "data.path", takes="names"),
    "train.train_policy.dataloader_shuffle": copied(True, "data.shuffle"),
    "train.train_policy.dataloader_num_workers": joint(0, "data.workers"),
    "train.train_policy.dataloader_prefetch_factor": joint(None, "data.prefetch", takes="int"),
    "train.train_policy.dataloader_seed": joint(0, "train.seed"),
    "train.train_policy.kl_beta": copied(0.0, "world.kl_coef"),
    "train.train_policy.advantage_low": joint(-5.0, "world.advantage_clip"),
    "train.train_policy.advantage_high": joint(5.0, "world.advantage_clip"),
    "train.train_policy.use_remote_reward": joint(False, "reward.services"),
    "train.train_policy.remote_reward.scale": copied(1.0, "reward.scale"),
    "train.train_policy.remote_reward.reward_fns": joint(None, "reward.services", takes="tables"),
    "train.train_policy.remote_reward.reward_clip_min": only(
        -5.0, -5.0, -5, because="the sum is clipped at ± 5", instead="the sum is clipped at ± 5; set it to -5"
    ),
    "train.train_policy.remote_reward.reward_clip_max": only(
        5.0, 5.0, 5, because="the sum is clipped at ± 5", instead="the sum is clipped at ± 5; set it to 5"
    ),
    "train.train_policy.remote_reward.batch_size": unused(1, "a request has the clips of a micro-batch"),
    "train.train_policy.reward_function": joint(None, "reward.functions", takes="rewards"),
    "train.train_policy.uncentralized_training": unused(False, "every rank always reads its own prompts"),
    "policy.model_name_or_path": copied("Qwen/Qwen2.5-VL-7B-Instruct", "model.path"),
    "policy.model_revision": copied(None, "model.revision"),
    "policy.model_gradient_checkpointing": copied(True, "model.gradient_checkpointing"),
    "policy.is_diffusers": joint(False, "the command"),
    "policy.lora.r": joint(8, "lora.rank"),
    "policy.lora.lora_alpha": joint(8.0, "lora.alpha"),
    "policy.lora.target_modules": joint(None, "lora.targets", takes="names"),
    "policy.lora.lora_names": unused(
        None, "the adapter of before is kept as numbers, not as a second one", takes="any"
    ),
    "policy.lora.init_lora_weights": unused(
        True, "B is 0 and A is drawn, so that training starts from the model", takes="any"
    ),
    "policy.diffusers.is_video": unused(True, ALWAYS_CLIPS),
    "policy.diffusers.offload": unused(False, "what waits is in CPU memory where the algorithm lets it"),
    "policy.diffusers.max_prompt_length": copied(512, "model.max_prompt_length"),
    "policy.diffusers.inference_size": joint([512, 512], "data.height", "data.width"),
    "policy.diffusers.train_frames": copied(93, "data.frames"),
    "policy.diffusers.timesteps_fraction": joint(0.99, "world.nft_times"),
    "policy.diffusers.nft_beta": copied(1.0, "world.nft_beta"),
    "policy.diffusers.weight_copy_decay_type": joint(1, "world.nft_decay"),
    "policy.diffusers.sample.num_steps": copied(10, "world.sampling_steps"),
    "policy.diffusers.sample.eval_num_steps": copied(40, "validation.sampling_steps"),
    "policy.diffusers.sample.guidance_scale": joint(1.0, "world.guidance_scale"),
    "policy.diffusers.sample.noise_level": unused(0.7, ODE),
    "policy.diffusers.sample.solver": joint("dpm2", "world.schedule"),
    "policy.diffusers.sample.deterministic_sampling": unused(True, ODE),
    "policy.parallelism.n_init_replicas": joint(1, "GPUs", "world.prompts_per_step"),
    "policy.parallelism.tp_size": joint(1, "GPUs"),
    "policy.parallelism.cp_size": joint(1, "train.context_parallel_size"),
    "policy.parallelism.dp_shard_size": joint(1, "GPUs"),
    "policy.parallelism.dp_replicate_size": joint(1, "GPUs"),
    "policy.parallelism.pp_size": joint(1, "GPUs"),
    "rollout.backend": joint("diffusion_nft_rollout", "world.algorithm"),
    "rollout.n_generation": joint(16, "world.num_generations"),
    "validation.enable": joint(False, "validation.every"),
    "validation.freq": joint(20, "validation.every"),
    "validation.val_before_train": joint(False, "validation.before_training"),
    "validation.dataset.name": joint("", "data.validation"),
    "validation.dataset.local_dir": joint("", "data.validation"),
    "validation.dataset.split": joint("", "data.validation", takes="names"),
}

KEYS: dict[str, Key] = OTHERS | same_for(SHARED | OWN, "world")
KEYS |= same_for({name: KEYS[name] for name in OTHERS}, "world")
