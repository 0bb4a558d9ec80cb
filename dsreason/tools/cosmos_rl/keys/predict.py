"""The older trainer of Cosmos-Predict2.5 (FlowGRPO, DDRL), whose files have `[model.rl]`, `[trainer]` and data loaders."""

from __future__ import annotations

from dsreason.tools.cosmos_rl.keys.key import Key, copied, joint, only, same_for, takes_of, unused

SAMPLER = "it is of EDM's sampler with churn, in whose place stands the SDE of Flow-GRPO"
CALLBACK = "what callbacks show is always written: metrics.jsonl, TensorBoard, world.html"
LOADER = "clips are read by the ranks' own workers (data.workers), each once an epoch"
IMAGES = "images are not trained on; clips are"
FAMILY = "the model's own folder says how it is built and which encoder reads prompts"
NAMES = "the run is called as its output folder"

RL: dict[str, Key] = {
    "model.rl.enabled": unused(False, "the file is one of reinforcement learning"),
    "model.rl.num_rollout": joint(8, "world.num_generations"),
    "model.rl.sample_steps": copied(10, "world.sampling_steps"),
    "model.rl.train_on": joint([0, 1, 2, 3, 4, 5, 6, 7], "world.trained_steps", takes="numbers"),
    "model.rl.on_policy": only(
        True,
        True,
        because="each rollout is trained once",
        instead="each rollout is drawn from the weights it trains; set it to true",
    ),
    "model.rl.update_ref_every_iter": joint(16, "world.kl_coef"),
    "model.rl.solver_option": joint("2ab", "world.sde"),
    "model.rl.s_churn": unused(1, SAMPLER, takes="any"),
    "model.rl.s_t_max": unused(None, SAMPLER, takes="any"),
    "model.rl.s_t_min": unused(0, SAMPLER, takes="any"),
    "model.rl.s_noise": unused(1, SAMPLER, takes="any"),
    "model.rl.guidance": copied(0, "world.guidance_scale", "number", convert=lambda scale: 1.0 + scale),
    "model.rl.min_num_conditional_frames": joint(1, "world.conditional_frames"),
    "model.rl.max_num_conditional_frames": joint(1, "world.conditional_frames"),
    "model.rl.clip_ratio": copied(1e-4, "world.clip_range"),
    "model.rl.kl_beta": joint(0.01, "world.kl_coef"),
    "model.rl.data_beta": joint(0.0, "world.algorithm", "world.data_coef", takes="number"),
    "model.rl.use_rl_sigma_and_noise": joint(True, "world.data_noise"),
    "model.rl.data_on_first_only": joint(False, "world.data_steps"),
    "model.rl.use_same_seed": copied(True, "world.same_noise"),
    "model.rl.exp_reward": joint(False, "world.exponential_advantages"),
    "model.rl.reward_config.adv_clip": joint(5, "world.advantage_clip", takes="numbers"),
    "model.rl.reward_config.adv_clip_max": joint(5, "world.advantage_clip", takes="numbers"),
    "model.rl.reward_config.adv_clip_min": unused(-5, "advantages are clipped at ± the same value", takes="any"),
    "model.rl.reward_config.enabled": unused(True, "rewards are always asked for"),
    "model.rl.reward_config.reward_fns": joint(None, "reward.services", takes="any"),
}

RUN: dict[str, Key] = {
    "model.fsdp_shard_size": joint(8, "GPUs"),
    "model.dp_replicate_size": joint(1, "GPUs"),
    "model.conditioner": unused(
        None, "the family says how a prompt, a first frame and the rate of frames condition", takes="any"
    ),
    "model.text_encoder_class": unused("t5_XXL", FAMILY, takes="any"),
    "model.text_encoder_config": unused(None, FAMILY, takes="any"),
    "model.net": unused(None, FAMILY, takes="any"),
    "model.resolution": joint("", "data.height", takes="any"),
    "model_parallel.tensor_model_parallel_size": unused(1, "ZeRO-3 shares the weights among all ranks"),
    "model_parallel.pipeline_model_parallel_size": unused(1, "ZeRO-3 shares the weights among all ranks"),
    "model_parallel.pipeline_parallel_size": unused(1, "ZeRO-3 shares the weights among all ranks"),
    "model_parallel.context_parallel_size": joint(1, "train.context_parallel_size"),
    "optimizer.lr": copied(1e-5, "optim.lr"),
    "optimizer.weight_decay": copied(1e-4, "optim.weight_decay"),
    "optimizer.betas": copied([0.9, 0.99], "optim.betas"),
    "optimizer.eps": copied(1e-12, "optim.eps"),
    "optimizer.fused": unused(True, "DeepSpeed has one implementation of AdamW for each device"),
    "optimizer.master_weights": unused(True, "master weights are always float32"),
    "scheduler.warm_up_steps": joint([0], "optim.warmup", takes="numbers"),
    "scheduler.warmup_steps": joint(0, "optim.warmup", takes="numbers"),
    "scheduler.f_start": unused(None, "the warmup begins at 0", takes="any"),
    "scheduler.f_max": only(
        None,
        None,
        [1.0],
        1.0,
        because="1 is the rate itself",
        instead="set optimizer.lr, and this to [1.0]",
        takes="any",
    ),
    "scheduler.f_min": only(
        None,
        None,
        [1.0],
        1.0,
        because="the rate is held after the warmup",
        instead="the rate is held; set it to [1.0]",
        takes="any",
    ),
    "scheduler.cycle_lengths": unused(None, "the rate is held after the warmup", takes="any"),
    "trainer.max_iter": copied(2001, "train.max_steps"),
    "trainer.seed": copied(0, "train.seed"),
    "trainer.callbacks": joint(None, "optim.max_grad_norm", takes="tables"),
    "trainer.grad_scaler_args.enabled": unused(False, "bf16 needs no scaler"),
    "trainer.logging_iter": unused(1, "every step is logged", takes="any"),
    "trainer.run_validation": unused(False, CALLBACK, takes="any"),
    "trainer.validation_iter": joint(32, "validation.every"),
    "checkpoint.save_iter": copied(32, "checkpoint.every"),
    "checkpoint.load_path": joint("", "model.path"),
    "checkpoint.model_id": unused("", "model.revision says which weights", takes="any"),
    "checkpoint.type": unused("distributed", "checkpoints are DeepSpeed's", takes="any"),
    "checkpoint.load_training_state": unused(
        False, "a run starts from a model; --resume continues one of ours", takes="any"
    ),
    "checkpoint.save_to_object_store.enabled": only(
        False, False, because="it is off", instead="name checkpoint.upload in the imported file; set it to false"
    ),
    "checkpoint.load_from_object_store.enabled": unused(False, "model.path may be s3://…"),
    "job.project": unused("", NAMES),
    "job.group": unused("", NAMES),
    "job.name": joint("", "model.path"),
    "job.wandb_mode": joint("", "monitor.wandb"),
}

LOCAL_KEYS = {
    "dataset_dir": "",
    "num_frames": 93,
    "video_size": None,
    "batch_size": 1,
    "num_workers": 8,
    "pin_memory": True,
    "offline_text_embedding": False,
}
"""Keys of `type = "local"`, whose loaders have no section `dataloader`."""
LOADER_KEYS = {
    "use_cache": False,
    "cache_size": 16,
    "concat_size": 1,
    "cache_replay_name": "",
    "batch_size": 1,
    "pin_memory": True,
    "cache_augment_fn.name": "",
    "cache_augment_fn.args": None,
}
SET_KEYS = {
    "dataset_resolution_type": "",
    "caption_type": "",
    "embedding_type": "",
    "len_t5": 512,
    "t5_dim": 1024,
    "video_decoder_name": "",
    "augmentor_name": "",
    "num_video_frames": 93,
    "resolution": "",
    "video_dir": "",
    "dataset_dir": "",
}


def loaders() -> dict[str, Key]:
    """Both loaders of both splits: what the training one of clips says counts, the rest is left out."""
    keys: dict[str, Key] = {}
    for split in ("train", "val"):
        keys[f"dataloader_{split}.type"] = unused("web", LOADER)
        for kind in ("image", "video"):
            loader = f"dataloader_{split}.{kind}_dataloader"
            because = LOADER if kind == "video" else IMAGES
            keys[f"{loader}.ratio"] = unused(1, because, takes="any")
            inside = LOADER_KEYS | {"num_workers": 8, "webdataset": False}
            inside |= {f"dataset.{name}": default for name, default in SET_KEYS.items()}
            keys |= {f"{loader}.{name}": unused(default, because, takes="any") for name, default in LOCAL_KEYS.items()}
            keys |= {
                f"{loader}.dataloader.{name}": unused(default, because, takes="any") for name, default in inside.items()
            }
    own_loader = "dataloader_train.video_dataloader.dataloader"
    read = {
        "num_workers": "data.workers",
        "batch_size": "train.micro_batch_size",
        "webdataset": "data.format",
        "dataset.num_video_frames": "data.frames",
        "dataset.resolution": "data.height",
        "dataset.dataset_dir": "data.path",
        "dataset.video_dir": "data.path",
    }
    for name, own_key in read.items():
        default = keys[f"{own_loader}.{name}"].default
        keys[f"{own_loader}.{name}"] = joint(default, own_key, takes=takes_of(default))
    local = {
        "dataset_dir": "data.path",
        "num_frames": "data.frames",
        "video_size": "data.height",
        "batch_size": "train.micro_batch_size",
        "num_workers": "data.workers",
    }
    for name, own_key in local.items():
        keys[f"dataloader_train.video_dataloader.{name}"] = joint(LOCAL_KEYS[name], own_key)
    keys["dataloader_train.video_dataloader.offline_text_embedding"] = unused(
        False, "each prompt is encoded once, and kept"
    )
    keys["dataloader_val.video_dataloader.dataset_dir"] = joint("", "data.validation")
    return keys


KEYS: dict[str, Key] = same_for(RL | RUN | loaders(), "world")
