"""Conversion of files for the older trainer for Cosmos-Predict2.5: FlowGRPO and DDRL."""

from __future__ import annotations

from typing import Any

from dsreason.tools.cosmos_rl.draft import Draft, Settings
from dsreason.tools.cosmos_rl.keys.key import is_of_kind, to_list

CLIPS = "dataloader_train.video_dataloader.dataloader"
LOCAL = "dataloader_train.video_dataloader"
SIZES = {"256": (192, 320), "480": (480, 832), "720": (704, 1280)}
"""Name of a resolution → height and width in pixels."""
SAMPLER = (
    "noise is added by Flow-GRPO's SDE (world.sde, noise_level) on the model's own schedule, which is similar but not identical "
    "to EDM's sampler with churn; its log-probabilities omit the standard deviation"
)


def convert_world(cosmos: Settings, draft: Draft) -> None:
    convert_ranks(cosmos, draft)
    convert_model(cosmos, draft)
    convert_objective(cosmos, draft)
    convert_clips(cosmos, draft)
    convert_clip_norm(cosmos, draft)
    warmup = to_list(cosmos["scheduler.warm_up_steps"]) + to_list(cosmos["scheduler.warmup_steps"])
    draft.set("optim.warmup", next((int(steps) for steps in warmup if steps), 0))
    draft.set("optim.schedule", "constant")
    draft.set("validation.every", cosmos["trainer.validation_iter"])
    draft.set("deepspeed", "zero3.json")
    if cosmos["job.wandb_mode"] in ("online", "offline"):
        draft.set("monitor.wandb", True)
        draft.set("monitor.wandb_name", cosmos["job.name"] or None)


def convert_ranks(cosmos: Settings, draft: Draft) -> None:
    """Convert the number of GPUs and groups. A group has `num_rollout` clips, each computed by one or several ranks."""
    draft.num_gpus = max(cosmos["model.fsdp_shard_size"], 1) * max(cosmos["model.dp_replicate_size"], 1)
    together, group = max(cosmos["model_parallel.context_parallel_size"], 1), cosmos["model.rl.num_rollout"]
    draft.set("train.context_parallel_size", together)
    draft.set("world.num_generations", group)
    if group < 1:
        draft.reject_value("model.rl.num_rollout", f"must be at least 1; got {group}")
        return
    if draft.num_gpus % (group * together):
        draft.reject_value(
            "model.rl.num_rollout",
            f"{draft.num_gpus} GPUs cannot be divided into groups of {group} clips with {together} GPUs each; correct "
            "model.fsdp_shard_size",
        )
        return
    draft.set("world.prompts_per_step", draft.num_gpus // (group * together))


def convert_model(cosmos: Settings, draft: Draft) -> None:
    load_path = cosmos["checkpoint.load_path"]
    large = "14b" in (cosmos["job.name"] + load_path).lower()
    draft.set("model.path", f"nvidia/Cosmos-Predict2.5-{'14B' if large else '2B'}")
    draft.set("model.revision", "diffusers/base/pre-trained")
    draft.set("model.freeze_text_projection", True)
    draft.note_difference(
        "job.name", f"model.path = {draft.get('model.path')!r}, inferred from this name; correct it if it is wrong"
    )
    if load_path and not load_path.startswith("nvidia/"):
        draft.note_difference(
            "checkpoint.load_path",
            "its checkpoints have another format; export the model to diffusers' format, and set model.path",
        )


def convert_objective(cosmos: Settings, draft: Draft) -> None:
    weight = cosmos["model.rl.data_beta"]
    draft.set("world.algorithm", "ddrl" if weight else "flow_grpo")
    if weight:
        draft.set("world.data_coef", float(weight))
        draft.set("world.data_noise", "rollout" if cosmos["model.rl.use_rl_sigma_and_noise"] else "fresh")
        draft.set("world.data_steps", "first" if cosmos["model.rl.data_on_first_only"] else "all")
        draft.set("world.exponential_advantages", cosmos["model.rl.exp_reward"])
    elif cosmos["model.rl.exp_reward"]:
        draft.refuse("model.rl.exp_reward", "advantages are transformed this way only in ddrl; set it to false")
    steps = to_list(cosmos["model.rl.train_on"])
    if any(step < 0 for step in steps):
        draft.set("world.window", len(steps))
        draft.note_difference(
            "model.rl.train_on",
            f"world.window = {len(steps)}: {len(steps)} consecutive steps, drawn from the first half",
        )
    else:
        draft.set("world.trained_steps", steps)
    draft.set(
        "world.conditional_frames", [cosmos[f"model.rl.{which}_num_conditional_frames"] for which in ("min", "max")]
    )
    draft.set("world.kl_coef", float(cosmos["model.rl.kl_beta"]))
    draft.set("world.sde", "flow")
    draft.set("world.noise_level", 0.7)
    draft.note_difference("model.rl.solver_option", SAMPLER)
    if cosmos["model.rl.kl_beta"] and cosmos["model.rl.update_ref_every_iter"]:
        draft.note_difference(
            "model.rl.update_ref_every_iter", "the reference is never updated: it is always the initial model"
        )
    clip = cosmos["model.rl.reward_config.adv_clip_max"]
    if "model.rl.reward_config.adv_clip" in cosmos.given:
        clip = cosmos["model.rl.reward_config.adv_clip"]
    draft.set("world.advantage_clip", max((abs(float(bound)) for bound in to_list(clip)), default=5.0))


def convert_clips(cosmos: Settings, draft: Draft) -> None:
    loader_keys = LOCAL if cosmos["dataloader_train.type"] == "local" else CLIPS
    frames = f"{loader_keys}.num_frames" if loader_keys == LOCAL else f"{loader_keys}.dataset.num_video_frames"
    draft.set("data.frames", cosmos[frames])
    draft.set("data.workers", cosmos[f"{loader_keys}.num_workers"])
    draft.set("train.micro_batch_size", cosmos[f"{loader_keys}.batch_size"])
    convert_size(cosmos, draft)
    folder = cosmos[f"{LOCAL}.dataset_dir"]
    key = f"{CLIPS}.webdataset"
    if folder:
        draft.set("data.format", "folder")
        draft.set("data.path", folder)
        draft.set("data.validation", cosmos["dataloader_val.video_dataloader.dataset_dir"] or None)
    elif cosmos[key]:
        draft.refuse(
            key,
            'cosmos-rl defines the shards in its code; set data.format = "shards" and data.path in the imported file',
        )
    else:
        draft.set("data.format", "mock")
        draft.note_difference(key, 'data.format = "mock": random clips and prompts, like those of its loader')
    convert_rewards(cosmos, draft)


def convert_size(cosmos: Settings, draft: Draft) -> None:
    """Convert the size of the clips, which is set in a local loader or as the name of a resolution."""
    key = f"{LOCAL}.video_size"
    if value := cosmos[key]:
        if not isinstance(value, list) or len(value) != 2 or not all(isinstance(side, int) for side in value):
            draft.reject_value(key, f"must be [width, height]; got {value!r}")
            return
        width, height = value
    else:
        key = f"{CLIPS}.dataset.resolution" if cosmos[f"{CLIPS}.dataset.resolution"] else "model.resolution"
        resolution = str(cosmos[key] or "720")
        if resolution not in SIZES:
            draft.reject_value(key, f"must be one of {', '.join(SIZES)}; got {resolution!r}")
            return
        height, width = SIZES[resolution]
    draft.set("data.height", height)
    draft.set("data.width", width)


def convert_rewards(cosmos: Settings, draft: Draft) -> None:
    default = {"name": "dance_grpo", "score_key": "overall_reward", "weight": 1.0}
    reward_functions: Any = cosmos["model.rl.reward_config.reward_fns"]
    if draft.get("data.format") == "mock" and reward_functions is None:
        draft.set("reward.functions", {"brightness": 1.0})
        draft.note_difference(
            "model.rl.reward_config.reward_fns", "reward.functions = {'brightness': 1.0}, which needs no service"
        )
    elif reward_functions is None:
        draft.set("reward.services", [default])
        draft.note_difference("model.rl.reward_config.reward_fns", f"reward.services = [{default}]")
    else:
        convert_named_rewards(reward_functions, default, draft)


def convert_named_rewards(rewards: Any, default: dict[str, Any], draft: Draft) -> None:
    """Convert rewards from a table that maps names to weights, or from a list of tables."""
    services = (
        [{"name": name, "weight": weight} for name, weight in rewards.items()] if isinstance(rewards, dict) else rewards
    )
    if is_of_kind(services, "tables"):
        draft.set("reward.services", [default | service for service in services])
    else:
        draft.reject_value(
            "model.rl.reward_config.reward_fns",
            f"must be a table of weights by name, or a list of tables; got {rewards!r:.60}",
        )


def convert_clip_norm(cosmos: Settings, draft: Draft) -> None:
    """Convert the maximum norm of the callback that clips gradients; all other callbacks only log or display."""
    callbacks = to_list(cosmos["trainer.callbacks"])
    clips = [
        callback["args"]
        for callback in callbacks
        if callback.get("name") == "grad_clip" and isinstance(callback.get("args"), dict)
    ]
    draft.set("optim.max_grad_norm", next((args["clip_norm"] for args in clips if "clip_norm" in args), 1.0))
