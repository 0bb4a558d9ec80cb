"""Conversion of configurations that train world models in diffusers' format: DiffusionNFT, and SFT on clips."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

from dsreason.tools.cosmos_rl.draft import Draft, Settings
from dsreason.tools.cosmos_rl.keys.key import to_list
from dsreason.tools.cosmos_rl.parts.train import (
    convert_checkpoints,
    convert_loading,
    convert_optimizer,
    count_data_parallel_ranks,
    count_gpus,
    is_divisible,
)

POLICY, DIFFUSERS = "train.train_policy", "policy.diffusers"
DECAYS = {0: "none", 1: "slow", 2: "late"}
"""Value of `weight_copy_decay_type` → value of `world.nft_decay`."""


def convert_world(cosmos: Settings, draft: Draft) -> None:
    draft.num_gpus = count_gpus(cosmos, "policy") * max(cosmos["policy.parallelism.n_init_replicas"], 1)
    draft.set("deepspeed", "zero3_offload.json" if cosmos["train.fsdp_offload"] else "zero3.json")
    if cosmos["policy.parallelism.cp_size"] > 1:
        draft.set("train.context_parallel_size", cosmos["policy.parallelism.cp_size"])
    draft.set("train.max_steps", cosmos["train.max_num_steps"])
    convert_loading(cosmos, draft)
    convert_optimizer(cosmos, draft)
    convert_adapters(cosmos, draft)
    if cosmos["train.ema_enable"]:
        draft.set("train.ema_decay", cosmos["train.ema_decay"])
        draft.set("train.ema_every", max(cosmos["train.ema_update_interval"], 1))
    convert_clips(cosmos, draft)
    if cosmos[f"{POLICY}.type"] == "sft":
        convert_supervised(cosmos, draft)
    else:
        convert_nft(cosmos, draft)
    convert_validation(cosmos, draft)
    convert_checkpoints(cosmos, draft)
    logger = to_list(cosmos["logging.logger"])
    if "wandb" in logger:
        draft.set("monitor.wandb", True)
        draft.set("monitor.wandb_project", cosmos["logging.project_name"])


def convert_adapters(cosmos: Settings, draft: Draft) -> None:
    if "policy.lora" not in cosmos:
        return
    draft.set("lora.rank", cosmos["policy.lora.r"])
    draft.set("lora.alpha", cosmos["policy.lora.lora_alpha"])
    targets = cosmos["policy.lora.target_modules"]
    if targets != "all-linear":
        draft.set("lora.targets", to_list(targets) or None)


def convert_clips(cosmos: Settings, draft: Draft) -> None:
    size = cosmos[f"{DIFFUSERS}.inference_size"]
    if len(size) != 2 or not all(isinstance(side, int) for side in size):
        draft.reject_value(f"{DIFFUSERS}.inference_size", f"must be [height, width]; got {size!r}")
        return
    draft.set("data.height", size[0])
    draft.set("data.width", size[1])


def convert_supervised(cosmos: Settings, draft: Draft) -> None:
    draft.set("world.algorithm", "sft")
    replicas = max(cosmos["policy.parallelism.n_init_replicas"], 1)
    draft.set(
        "train.global_batch_size",
        cosmos["train.train_batch_per_replica"] * count_data_parallel_ranks(cosmos) * replicas,
    )
    key = f"{POLICY}.dataset.name" if cosmos[f"{POLICY}.dataset.name"] else f"{POLICY}.dataset.local_dir"
    if not cosmos[key]:
        draft.refuse(f"{POLICY}.dataset.name", "the folder of clips is missing; set it")
        return
    draft.set("data.format", "folder")
    draft.set("data.path", cosmos[key])
    draft.note_difference(
        key,
        f"data.path = {cosmos[key]!r}: clips are read from its videos/ and metas/*.txt, not from pairs of x.mp4 and x.json",
    )


def convert_nft(cosmos: Settings, draft: Draft) -> None:
    trainer = cosmos[f"{POLICY}.trainer_type"]
    if trainer != "diffusion_nft":
        draft.refuse(f"{POLICY}.trainer_type", f'must be "diffusion_nft" for world models; got {trainer!r}')
    draft.set("world.algorithm", "nft")
    group, key = cosmos["rollout.n_generation"], "train.train_batch_per_replica"
    batch = cosmos[key] * max(cosmos["policy.parallelism.n_init_replicas"], 1)
    draft.set("world.num_generations", group)
    if not is_divisible(batch, group):
        draft.reject_value(
            key,
            f"{batch} clips per step cannot be divided into groups of {group} (rollout.n_generation); change one of them",
        )
        return
    draft.set("world.prompts_per_step", batch // group)
    convert_prompts(cosmos, draft)
    low, high = cosmos[f"{POLICY}.advantage_low"], cosmos[f"{POLICY}.advantage_high"]
    draft.set("world.advantage_clip", float(high))
    if low != -high:
        draft.refuse(
            f"{POLICY}.advantage_low",
            f"must be -advantage_high, because advantages are clipped symmetrically; got {low:g}. Set {-high:g}",
        )
    decay = cosmos[f"{DIFFUSERS}.weight_copy_decay_type"]
    if decay not in DECAYS:
        draft.reject_value(f"{DIFFUSERS}.weight_copy_decay_type", f"must be one of 0, 1, 2; got {decay!r}")
    draft.set("world.nft_decay", DECAYS.get(decay))
    steps, share = cosmos[f"{DIFFUSERS}.sample.num_steps"], cosmos[f"{DIFFUSERS}.timesteps_fraction"]
    if share != 0.99:
        draft.set("world.nft_times", max(math.floor(steps * share), 1))
    draft.note_difference(
        f"{DIFFUSERS}.sample.solver",
        "it becomes the ODE of the model family's schedule, which the family's pipeline also uses",
    )
    convert_guidance(cosmos, draft)
    convert_services(cosmos, draft)


def convert_guidance(cosmos: Settings, draft: Draft) -> None:
    scale = cosmos[f"{DIFFUSERS}.sample.guidance_scale"]
    is_cosmos = "cosmos" in cosmos["policy.model_name_or_path"].lower()
    draft.set("world.guidance_scale", scale + 1.0 if scale > 1 and is_cosmos else max(scale, 1.0))


def convert_prompts(cosmos: Settings, draft: Draft) -> None:
    key = f"{POLICY}.dataset.name"
    if not cosmos[key]:
        draft.refuse(key, "the prompts are missing; set it to a data set")
        return
    draft.set("data.format", "prompts")
    draft.set("data.path", find_prompt_file(cosmos[key], choose_split(cosmos[f"{POLICY}.dataset.split"], "train")))
    if cosmos["validation.dataset.name"]:
        split = choose_split(cosmos["validation.dataset.split"], "test")
        draft.set("data.validation", find_prompt_file(cosmos["validation.dataset.name"], split))


def choose_split(names: Any, default: str) -> str:
    """Return the first nonempty name in a setting of splits, or else `default`."""
    return next((name for name in to_list(names) if name), default)


def find_prompt_file(name: str, split: Any) -> str:
    """Return the file of a split's prompts: `name` itself if it is a file, or else a file in the folder `name` or the cache."""
    folder = Path(name).expanduser()
    if folder.suffix in (".txt", ".jsonl"):
        return name
    if not folder.is_dir():
        cache = Path(os.environ.get("COSMOS_CACHE") or "~/.cache/cosmos").expanduser()
        folder = cache / "diffusion_nft" / name
    return str(folder / f"{split}.txt")


def convert_services(cosmos: Settings, draft: Draft) -> None:
    key = f"{POLICY}.remote_reward.reward_fns"
    if not cosmos[f"{POLICY}.use_remote_reward"]:
        reward_function = cosmos[f"{POLICY}.reward_function"]
        draft.refuse(
            f"{POLICY}.reward_function",
            f"{reward_function!r} is not available for clips; set your own functions in reward.functions",
        )
        return
    usual = {"name": "dance_grpo", "weight": 1.0, "score_key": "overall_reward"}
    given_rewards = cosmos[key] if cosmos[key] is not None else [usual]
    known_names = {*usual, "clip_min", "clip_max"}
    complete_rewards = []
    for service in given_rewards:
        if unknown := sorted(service.keys() - known_names):
            draft.reject_value(
                key,
                f"{unknown[0]!r} is not a valid key of a reward; the valid keys are {', '.join(sorted(known_names))}",
            )
            return
        complete_rewards.append(usual | service)
    draft.set("reward.services", complete_rewards)


def convert_validation(cosmos: Settings, draft: Draft) -> None:
    held_out = cosmos["validation.dataset.local_dir"] or cosmos["validation.dataset.name"]
    if draft.get("world.algorithm") == "sft" and held_out:
        draft.set("data.validation", held_out)
    on = cosmos["validation.enable"]
    draft.set("validation.every", cosmos["validation.freq"] if on else 0)
    draft.set("validation.before_training", bool(on and cosmos["validation.val_before_train"]))
