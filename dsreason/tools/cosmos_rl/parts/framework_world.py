"""Conversion of cosmos-framework's files for generators, which become supervised fine-tuning of a world model."""

from __future__ import annotations

from dsreason.tools.cosmos_rl.draft import Draft, Settings
from dsreason.tools.cosmos_rl.keys.key import to_list
from dsreason.tools.cosmos_rl.parts.framework import convert_shared, leave_out

NEAREST = "nvidia/Cosmos-Predict2.5-2B"
LAYERS = {"q_proj": "to_q", "k_proj": "to_k", "v_proj": "to_v", "o_proj": "to_out.0"}
"""Attention layers of Cosmos 3, without the suffix of the generator's, and their names in diffusers' models."""
GENERATOR = ("moe_gen", "time_embedder", "vae2llm", "llm2vae", "k_norm_und_for_gen")
"""Parts of names that select all of the generator's weights."""
WIDEST_AVERAGE = 0.28
"""Relative width of a power-function average whose exponent is 0, rounded down: the widest average that the framework's formula
defines."""


def convert_generator(cosmos: Settings, draft: Draft) -> None:
    convert_shared(cosmos, draft)
    task = cosmos["job.task"]
    if task != "vfm":
        draft.reject_value("job.task", f"must be vlm (reasoner) or vfm (generator); got {task!r}")
        return
    convert_model(cosmos, draft)
    convert_average(cosmos, draft)
    convert_trained(cosmos, draft)
    draft.set("world.algorithm", "sft")
    draft.set("train.micro_batch_size", 1)
    for key in ("model.max_num_tokens_after_packing", "dataloader_train.max_sequence_length"):
        if key in cosmos.given:
            draft.note_difference(
                key,
                f"train.micro_batch_size = 1, train.global_batch_size = {draft.get('train.global_batch_size')}: clips are "
                "counted, one per packed row; raise train.global_batch_size if several of your clips fit into a row",
            )
    draft.set("data.format", "curator")
    draft.set("world.conditional_frames", [0, 2])
    draft.note_difference(
        "job.experiment",
        'data.format = "curator", world.conditional_frames = [0, 2] (text, image or 5 frames of video): the experiment\'s Python '
        "file sets these and the size of clips; set data.path, frames, height, width and fps in the imported file",
    )


def convert_model(cosmos: Settings, draft: Draft) -> None:
    """Refuse Cosmos 3's generator, which `dsreason world` cannot train; if accepted, use the settings for another model."""
    from dsreason.world.families import FAMILIES  # imports torch

    key = next((key for key in ("job.task", "job.experiment") if key in cosmos.given), "job.task")
    supported = ", ".join(f"{family.name} ({', '.join(family.pipelines)})" for family in FAMILIES.values())
    draft.refuse(
        key,
        f"Cosmos 3's generator is not supported; dsreason world trains {supported}. To use the settings for one of them, accept "
        f"this, which sets model.path = {NEAREST!r}",
    )
    draft.set("model.path", NEAREST)
    draft.set("model.revision", "diffusers/base/post-trained")
    if "checkpoint.load_path" in cosmos.given:
        draft.note_difference("checkpoint.load_path", f"model.path = {NEAREST!r} instead of a Cosmos 3 checkpoint")
    leave_out("checkpoint.keys_to_skip_loading", "all tensors of the model folder are loaded", cosmos, draft)


def convert_average(cosmos: Settings, draft: Draft) -> None:
    """Convert the moving average of the weights, a power function of the step, to the constant decay that it ends with."""
    rate, steps = cosmos["model.ema.rate"], cosmos["trainer.max_iter"]
    if not cosmos["model.ema.enabled"]:
        for key in ("model.ema.rate", "model.ema.iteration_shift"):
            leave_out(key, "the moving average is off", cosmos, draft)
        return
    if not 0 < rate < WIDEST_AVERAGE:
        draft.reject_value("model.ema.rate", f"must be between 0 and {WIDEST_AVERAGE}; got {rate:g}")
        return
    decay = compute_last_decay(rate, steps)
    draft.set("train.ema_decay", round(decay, 4))
    draft.note_difference(
        "model.ema.rate",
        f"train.ema_decay = {decay:.4f}: the decay is constant, here that of step {steps}; cosmos-framework's grows with the "
        "step",
    )
    if cosmos["model.ema.iteration_shift"]:
        draft.note_difference("model.ema.iteration_shift", "the decay does not depend on the step")


def compute_last_decay(width: float, steps: int) -> float:
    """Return the decay in the last step of an average that weights step t by t^gamma and has this relative width.

    The width (standard deviation over length) is sqrt((gamma + 1) / ((gamma + 2)² (gamma + 3))), see arXiv 2312.02696.
    """
    scale = width**-2
    import numpy as np  # imported on demand, because every command imports this module

    gamma = float(np.roots([1, 7, 16 - scale, 12 - scale]).real.max())
    return float((1 - 1 / (steps + 1)) ** (gamma + 1))


def convert_trained(cosmos: Settings, draft: Draft) -> None:
    """Convert which weights are trained: the whole transformer, or adapters of its attention layers."""
    names, key = to_list(cosmos["optimizer.keys_to_select"]), "optimizer.keys_to_select"
    adapters = ("model.lora_rank", "model.lora_alpha", "model.lora_target_modules")
    multipliers = "optimizer.lr_multipliers"
    if any(value != 1 for value in cosmos[multipliers].values()):
        draft.refuse(
            multipliers, "Cosmos 3's parameters have other names here; set optim.lr_multipliers in the imported file"
        )
    else:
        leave_out(multipliers, "1 is the learning rate itself", cosmos, draft)
    if cosmos["model.lora_enabled"]:
        convert_adapters(cosmos, draft)
        if names != ["lora_"]:
            draft.refuse(key, 'with adapters, no other weights are trained; set it to ["lora_"]')
        return
    for name in adapters:
        leave_out(name, "model.lora_enabled is false", cosmos, draft)
    others = [name for name in names if not any(part in name for part in GENERATOR)]
    if others:
        draft.refuse(key, f"only the whole transformer can be trained, not {', '.join(others)}")
    else:
        leave_out(key, "the whole transformer is trained, and the text encoder is frozen", cosmos, draft)


def convert_adapters(cosmos: Settings, draft: Draft) -> None:
    key = "model.lora_target_modules"
    layers = [name.strip().removesuffix("_moe_gen") for name in cosmos[key].split(",") if name.strip()] or list(LAYERS)
    draft.set("lora.rank", cosmos["model.lora_rank"])
    draft.set("lora.alpha", float(cosmos["model.lora_alpha"]))
    targets = [LAYERS[layer] for layer in layers if layer in LAYERS]
    draft.set("lora.targets", targets)
    if unknown := [layer for layer in layers if layer not in LAYERS]:
        draft.refuse(
            key, f"only attention layers ({', '.join(LAYERS)}) can get adapters here, not {', '.join(unknown)}"
        )
    else:
        draft.note_difference(key, f"lora.targets = {targets!r}: the names of these layers in diffusers' models")
