"""Keys of the older trainer for Cosmos-Predict2.5 (FlowGRPO, DDRL): `[model.rl]`, `[trainer]`, data loaders and others."""

from __future__ import annotations

from dsreason.tools.cosmos_rl.keys.key import (
    Key,
    infer_takes,
    make_copied,
    make_fixed,
    make_joint,
    make_unused,
    restrict_all,
)

SAMPLER = "it belongs to EDM's sampler with churn, which Flow-GRPO's SDE replaces"
CALLBACK = "the output of callbacks is always written: metrics.jsonl, TensorBoard, world.html"
LOADER = "each rank's workers (data.workers) read the clips, each clip once per epoch"
IMAGES = "only clips are trained on, not images"
FAMILY = "the model folder determines the architecture and the text encoder"
NAMES = "the run is named after its output folder"

RL: dict[str, Key] = {
    "model.rl.enabled": make_unused(False, "the file is for reinforcement learning"),
    "model.rl.num_rollout": make_joint(8, "world.num_generations"),
    "model.rl.sample_steps": make_copied(10, "world.sampling_steps"),
    "model.rl.train_on": make_joint([0, 1, 2, 3, 4, 5, 6, 7], "world.trained_steps", takes="numbers"),
    "model.rl.on_policy": make_fixed(
        True,
        True,
        because="each rollout is trained on once",
        instead="each rollout is sampled from the weights that it trains; set it to true",
    ),
    "model.rl.update_ref_every_iter": make_joint(16, "world.kl_coef"),
    "model.rl.solver_option": make_joint("2ab", "world.sde"),
    "model.rl.s_churn": make_unused(1, SAMPLER, takes="any"),
    "model.rl.s_t_max": make_unused(None, SAMPLER, takes="any"),
    "model.rl.s_t_min": make_unused(0, SAMPLER, takes="any"),
    "model.rl.s_noise": make_unused(1, SAMPLER, takes="any"),
    "model.rl.guidance": make_copied(0, "world.guidance_scale", "number", convert=lambda scale: 1.0 + scale),
    "model.rl.min_num_conditional_frames": make_joint(1, "world.conditional_frames"),
    "model.rl.max_num_conditional_frames": make_joint(1, "world.conditional_frames"),
    "model.rl.clip_ratio": make_copied(1e-4, "world.clip_range"),
    "model.rl.kl_beta": make_joint(0.01, "world.kl_coef"),
    "model.rl.data_beta": make_joint(0.0, "world.algorithm", "world.data_coef", takes="number"),
    "model.rl.use_rl_sigma_and_noise": make_joint(True, "world.data_noise"),
    "model.rl.data_on_first_only": make_joint(False, "world.data_steps"),
    "model.rl.use_same_seed": make_copied(True, "world.same_noise"),
    "model.rl.exp_reward": make_joint(False, "world.exponential_advantages"),
    "model.rl.reward_config.adv_clip": make_joint(5, "world.advantage_clip", takes="numbers"),
    "model.rl.reward_config.adv_clip_max": make_joint(5, "world.advantage_clip", takes="numbers"),
    "model.rl.reward_config.adv_clip_min": make_unused(-5, "advantages are clipped symmetrically", takes="any"),
    "model.rl.reward_config.enabled": make_unused(True, "rewards are always requested"),
    "model.rl.reward_config.reward_fns": make_joint(None, "reward.services", takes="any"),
}

RUN: dict[str, Key] = {
    "model.fsdp_shard_size": make_joint(8, "GPUs"),
    "model.dp_replicate_size": make_joint(1, "GPUs"),
    "model.conditioner": make_unused(
        None, "the model family determines the conditioning on prompt, first frame and frame rate", takes="any"
    ),
    "model.text_encoder_class": make_unused("t5_XXL", FAMILY, takes="any"),
    "model.text_encoder_config": make_unused(None, FAMILY, takes="any"),
    "model.net": make_unused(None, FAMILY, takes="any"),
    "model.resolution": make_joint("", "data.height", takes="any"),
    "model_parallel.tensor_model_parallel_size": make_unused(1, "ZeRO-3 shards the weights across all ranks"),
    "model_parallel.pipeline_model_parallel_size": make_unused(1, "ZeRO-3 shards the weights across all ranks"),
    "model_parallel.pipeline_parallel_size": make_unused(1, "ZeRO-3 shards the weights across all ranks"),
    "model_parallel.context_parallel_size": make_joint(1, "train.context_parallel_size"),
    "optimizer.lr": make_copied(1e-5, "optim.lr"),
    "optimizer.weight_decay": make_copied(1e-4, "optim.weight_decay"),
    "optimizer.betas": make_copied([0.9, 0.99], "optim.betas"),
    "optimizer.eps": make_copied(1e-12, "optim.eps"),
    "optimizer.fused": make_unused(True, "DeepSpeed has one implementation of AdamW for each device"),
    "optimizer.master_weights": make_unused(True, "master weights are always float32"),
    "scheduler.warm_up_steps": make_joint([0], "optim.warmup", takes="numbers"),
    "scheduler.warmup_steps": make_joint(0, "optim.warmup", takes="numbers"),
    "scheduler.f_start": make_unused(
        None, "the warmup starts at 0; set optim.warmup_start for another value", takes="any"
    ),
    "scheduler.f_max": make_fixed(
        None,
        None,
        [1.0],
        1.0,
        because="1 is the learning rate itself",
        instead="set the learning rate with optimizer.lr, and this key to [1.0]",
        takes="any",
    ),
    "scheduler.f_min": make_fixed(
        None,
        None,
        [1.0],
        1.0,
        because="the learning rate is constant after the warmup",
        instead="the learning rate is constant after the warmup; set it to [1.0]",
        takes="any",
    ),
    "scheduler.cycle_lengths": make_unused(None, "the learning rate is constant after the warmup", takes="any"),
    "trainer.max_iter": make_copied(2001, "train.max_steps"),
    "trainer.seed": make_copied(0, "train.seed"),
    "trainer.callbacks": make_joint(None, "optim.max_grad_norm", takes="tables"),
    "trainer.grad_scaler_args.enabled": make_unused(False, "bf16 needs no gradient scaler"),
    "trainer.logging_iter": make_unused(1, "every step is logged", takes="any"),
    "trainer.run_validation": make_unused(False, CALLBACK, takes="any"),
    "trainer.validation_iter": make_joint(32, "validation.every"),
    "checkpoint.save_iter": make_copied(32, "checkpoint.every"),
    "checkpoint.load_path": make_joint("", "model.path"),
    "checkpoint.model_id": make_unused("", "model.revision selects the weights", takes="any"),
    "checkpoint.type": make_unused("distributed", "checkpoints are in DeepSpeed's format", takes="any"),
    "checkpoint.load_training_state": make_unused(
        False, "a run starts from a model; --resume continues a dsreason run", takes="any"
    ),
    "checkpoint.save_to_object_store.enabled": make_fixed(
        False, False, because="it is off", instead="set checkpoint.upload in the imported file, and this key to false"
    ),
    "checkpoint.load_from_object_store.enabled": make_unused(False, "model.path may be an s3:// URI"),
    "job.project": make_unused("", NAMES),
    "job.group": make_unused("", NAMES),
    "job.name": make_joint("", "model.path"),
    "job.wandb_mode": make_joint("", "monitor.wandb"),
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
"""Keys and defaults of loaders with `type = "local"`, which have no `dataloader` section."""
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


def build_loader_keys() -> dict[str, Key]:
    """Build the keys of both splits' image and video loaders. Nearly all are left out, except the training videos' keys."""
    keys: dict[str, Key] = {}
    for split in ("train", "val"):
        keys[f"dataloader_{split}.type"] = make_unused("web", LOADER)
        for kind in ("image", "video"):
            loader = f"dataloader_{split}.{kind}_dataloader"
            because = LOADER if kind == "video" else IMAGES
            keys[f"{loader}.ratio"] = make_unused(1, because, takes="any")
            inside = LOADER_KEYS | {"num_workers": 8, "webdataset": False}
            inside |= {f"dataset.{name}": default for name, default in SET_KEYS.items()}
            keys |= {
                f"{loader}.{name}": make_unused(default, because, takes="any") for name, default in LOCAL_KEYS.items()
            }
            keys |= {
                f"{loader}.dataloader.{name}": make_unused(default, because, takes="any")
                for name, default in inside.items()
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
        keys[f"{own_loader}.{name}"] = make_joint(default, own_key, takes=infer_takes(default))
    local = {
        "dataset_dir": "data.path",
        "num_frames": "data.frames",
        "video_size": "data.height",
        "batch_size": "train.micro_batch_size",
        "num_workers": "data.workers",
    }
    for name, own_key in local.items():
        keys[f"dataloader_train.video_dataloader.{name}"] = make_joint(LOCAL_KEYS[name], own_key)
    keys["dataloader_train.video_dataloader.offline_text_embedding"] = make_unused(
        False, "each prompt is encoded only once"
    )
    keys["dataloader_val.video_dataloader.dataset_dir"] = make_joint("", "data.validation")
    return keys


KEYS: dict[str, Key] = restrict_all(RL | RUN | build_loader_keys(), "world")
