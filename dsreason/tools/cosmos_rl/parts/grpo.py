"""Conversion of the settings that only GRPO has: objective, rollouts, rewards and teacher."""

from __future__ import annotations

from typing import Any

from dsreason.tools.cosmos_rl.draft import Draft, Settings
from dsreason.tools.cosmos_rl.keys.key import to_list
from dsreason.tools.cosmos_rl.parts.train import is_divisible

POLICY = "train.train_policy"
NO_CLIP_LOW, NO_CLIP_HIGH = 1.0, 1e9
"""Clip range so wide that no ratio is clipped."""
MOST_UTILIZATION = 0.6
"""Maximum share of a GPU's memory for vLLM; the rest is for the policy, which stays on the GPU."""
REWARDS = {
    "format": "any white space is allowed between the tags; cosmos-rl requires one empty line, which its prompt does not show",
    "single_choice": "the last <answer> counts, but cosmos-rl reads the first",
    "gsm8k": "",
    "boxed_math": "",
    "direct_math": "",
    "overlong": "",
}
"""Rewards with the same name in cosmos-rl and dsreason → how their behaviour differs, or "" if it does not."""


def convert_algorithm(cosmos: Settings, draft: Draft) -> None:
    convert_groups(cosmos, draft)
    convert_objective(cosmos, draft)
    convert_clip_range(cosmos, draft)
    if cosmos[f"{POLICY}.kl_beta"] > 0:
        draft.set("grpo.kl_clamp", 10.0)
        draft.set("grpo.kl_estimator", "bias_corrected_k3" if cosmos[f"{POLICY}.unbiased_kl_estimate"] else "k3")
        if every := cosmos[f"{POLICY}.reference_reset_interval"]:
            draft.set("grpo.reference_reset_every", every)
            if cosmos[f"{POLICY}.reset_optimizer_with_reference"]:
                draft.refuse(
                    f"{POLICY}.reset_optimizer_with_reference",
                    "the optimizer keeps its moments when the reference is reset; set it to false",
                )
    convert_correction(cosmos, draft)
    prefix = f"{POLICY}.min_filter_prefix_tokens"
    if cosmos[prefix] is not None:
        draft.note_difference(
            prefix,
            "the prefix that a group's completions share is trained on, too; their advantages cancel out in its "
            "gradient, but its tokens count in the mean",
        )


def convert_groups(cosmos: Settings, draft: Draft) -> None:
    """Convert the number of completions per step to a number of groups, and the size of the updates to steps per rollout."""
    size, key = cosmos["rollout.n_generation"], "train.train_batch_per_replica"
    batch = cosmos[key] * max(cosmos["policy.parallelism.n_init_replicas"], 1)
    draft.set("grpo.num_generations", size)
    if not is_divisible(batch, size):
        lower = batch // max(size, 1) * size
        near = f"{lower} or {lower + size}" if lower else f"{size}"
        draft.reject_value(
            key,
            f"{batch} completions per step cannot be divided into groups of {size} (rollout.n_generation); set {near}",
        )
        return
    draft.set("grpo.prompts_per_step", batch // size)
    each = cosmos[f"{POLICY}.batch_size_per_optimize"]
    if each and not is_divisible(cosmos[key], each):
        draft.reject_value(
            f"{POLICY}.batch_size_per_optimize", f"{each} does not divide {key} ({cosmos[key]}); choose a divisor"
        )
    elif each and each != cosmos[key]:
        steps = cosmos[key] // each
        draft.set("grpo.optimizer_steps_per_rollout", steps)
        if not is_divisible(batch // size, steps):
            draft.reject_value(
                f"{POLICY}.batch_size_per_optimize",
                f"{batch // size} prompts per step cannot be divided into {steps} updates of whole groups; choose another number",
            )
        if draft.get("train.max_steps"):
            draft.note_difference(
                "train.max_num_steps", f"dsreason counts optimizer steps, of which each rollout has {steps}"
            )


def convert_objective(cosmos: Settings, draft: Draft) -> None:
    """Convert how the loss is averaged and the advantages are normalized, and dynamic sampling."""
    variant, loss, key = cosmos[f"{POLICY}.variant"], cosmos[f"{POLICY}.loss_type"], f"{POLICY}.loss_type"
    longest = cosmos[f"{POLICY}.unbiased_loss_max_tokens"]
    if variant not in ("grpo", "gspo", "dapo"):
        draft.reject_value(f"{POLICY}.variant", f"must be one of grpo, gspo, dapo; got {variant!r}")
        return
    presets = {"token-mean": "dapo", "seq-mean-token-mean": "dr_grpo" if longest else "grpo"}
    if variant == "gspo":
        draft.set("grpo.preset", "gspo")
        if loss != "seq-mean-token-mean":
            draft.note_difference(key, "GSPO's loss is the mean over sequences with equal weights, as in its paper")
    elif loss in presets:
        draft.set("grpo.preset", presets[loss])
    elif loss in ("seq-mean-token-sum", "token-sum"):
        draft.set("grpo.preset", "dr_grpo")
        draft.refuse(
            key,
            f"{loss} is dr_grpo up to a constant factor, which affects gradient clipping; set seq-mean-token-mean or token-mean",
        )
    else:
        draft.reject_value(key, f"must be one of token-mean, seq-mean-token-mean, seq-mean-token-sum; got {loss!r}")
        return
    if longest and draft.get("grpo.preset") == "dr_grpo" and longest != cosmos["rollout.max_response_length"]:
        draft.note_difference(
            f"{POLICY}.unbiased_loss_max_tokens",
            f"token sums are divided by the completion limit ({cosmos['rollout.max_response_length']}), not by {longest}",
        )
    unbiased = cosmos[f"{POLICY}.unbiased_advantage"]
    draft.set("grpo.advantage", "group_centered" if unbiased else "group_normalized")
    draft.set("grpo.overlong_filter", False)
    draft.set("grpo.dynamic_sampling", variant == "dapo")
    if variant == "dapo":
        refills = cosmos[f"{POLICY}.max_retry_for_on_policy"]
        draft.set("grpo.max_refills", refills if refills > 0 else None)
        if cosmos[f"{POLICY}.filter_reward_metric"]:
            draft.refuse(
                f"{POLICY}.filter_reward_metric",
                "groups are replaced if all their total rewards are equal; remove the key",
            )


def convert_clip_range(cosmos: Settings, draft: Draft) -> None:
    low, high, bound = (cosmos[f"{POLICY}.{name}"] for name in ("epsilon_low", "epsilon_high", "lower_bound_ratio"))
    draft.set("grpo.clip_low", low if low >= 0 else NO_CLIP_LOW)
    draft.set("grpo.clip_high", high if high >= 0 else NO_CLIP_HIGH)
    if draft.get("grpo.preset") == "gspo":
        draft.notes.setdefault(f"{POLICY}.lower_bound_ratio", ("left out", "GSPO has no such bound"))
    elif bound > 1:
        draft.set("grpo.dual_clip", bound)
    else:
        draft.refuse(f"{POLICY}.lower_bound_ratio", f"the bound of the ratio must be greater than 1; got {bound:g}")


def convert_correction(cosmos: Settings, draft: Draft) -> None:
    """Convert the correction for differences between the engine's and the trainer's log-probabilities.

    By default, cosmos-rl ignores these differences, whereas dsreason corrects for them.
    """
    all_tokens = cosmos["rollout.sampling_config.top_p"] == 1 and cosmos["rollout.sampling_config.top_k"] < 1
    decoupled, cap = cosmos[f"{POLICY}.use_decoupled_loss"], cosmos[f"{POLICY}.behav_imp_weight_cap"]
    if not all_tokens:
        draft.set("grpo.correction", "none")
        if decoupled:
            draft.refuse(
                f"{POLICY}.use_decoupled_loss",
                "its weights require sampling from all tokens; set top_p = 1 and top_k = -1",
            )
    elif decoupled:
        draft.set("grpo.correction", "token_mask")
        draft.set("grpo.correction_low", 0.0)
        draft.set("grpo.correction_high", cap or 1e9)
    else:
        draft.set("grpo.correction", "token_truncate")
    key = f"{POLICY}.use_rollout_logprobs_for_loss"
    if cosmos[key]:
        draft.note_difference(
            key,
            "the ratio uses the trainer's log-probabilities, and the engine's are used in a weight (grpo.correction)",
        )


def convert_rollout(cosmos: Settings, draft: Draft) -> None:
    backend = cosmos["rollout.backend"]
    engines = {"vllm": "vllm", "vllm_async": "vllm", "trtllm": "vllm", "example_hf": "transformers"}
    if backend not in engines:
        draft.refuse(
            "rollout.backend",
            f"must be one of {', '.join(engines)}; got {backend!r}. dsreason samples with vLLM or transformers",
        )
    engine = engines.get(backend, "vllm")
    draft.set("rollout.engine", engine)
    if backend == "trtllm":
        draft.note_difference("rollout.backend", "vLLM is used instead, in the training ranks")
    if engine == "vllm":
        convert_utilization(cosmos, draft)
        if "rollout.enforce_eager" in cosmos.given:
            draft.set("rollout.enforce_eager", cosmos["rollout.enforce_eager"] or None)
        parallel = max(cosmos["rollout.parallelism.tp_size"], 1)
        draft.set("rollout.tensor_parallel_size", parallel)
        if draft.num_gpus % parallel:
            draft.reject_value(
                "rollout.parallelism.tp_size",
                f"{parallel} does not divide the number of GPUs of the job ({draft.num_gpus}); choose a divisor",
            )
    convert_temperature(cosmos, draft)


def convert_utilization(cosmos: Settings, draft: Draft) -> None:
    key = "rollout.gpu_memory_utilization"
    value = cosmos[key]
    draft.set(key, min(value, MOST_UTILIZATION))
    if value > MOST_UTILIZATION and key in cosmos.given:
        draft.note_difference(
            key,
            f"{key} = {MOST_UTILIZATION}: the engine shares its GPU with the idle policy; run `dsreason plan` to see what fits",
        )


def convert_temperature(cosmos: Settings, draft: Draft) -> None:
    """Convert the two temperatures, for sampling and for the logits in training, to dsreason's single temperature."""
    sampled, trained = "rollout.sampling_config.temperature", f"{POLICY}.temperature"
    given_keys = [key for key in (sampled, trained) if key in cosmos.given]
    values = {cosmos[key] for key in given_keys}
    if len(values) > 1:
        draft.set("rollout.temperature", cosmos[sampled])
        draft.refuse(
            trained,
            f"the training temperature is {cosmos[trained]:g}, but the sampling temperature ({sampled}) is "
            f"{cosmos[sampled]:g}; dsreason has one for both: make them equal",
        )
        return
    draft.set("rollout.temperature", values.pop() if values else 1.0)
    if given_keys == [trained] and cosmos[trained] != cosmos[sampled]:
        draft.note_difference(
            trained,
            f"rollout.temperature = {cosmos[trained]:g} for sampling and training; cosmos-rl only trains with it, and samples "
            f"with {sampled} (default: {cosmos[sampled]:g})",
        )


def convert_rewards(cosmos: Settings, draft: Draft) -> None:
    key = f"{POLICY}.reward_function"
    value = cosmos[key]
    only_teacher = cosmos["distillation.enable"] and value is None
    weights: dict[str, float] = {} if only_teacher else {"single_choice": 1.0} if value is None else to_weights(value)
    if unknown := [name for name in weights if name not in REWARDS and ":" not in name]:
        draft.reject_value(
            key,
            f"{unknown[0]!r} is a function of your script; set it to file.py:{unknown[0]}, which must be fn(completion, sample)",
        )
        return
    draft.set("reward.functions", weights or None)
    if "overlong" in weights:
        convert_overlong(cosmos, draft)
    if value is None and weights:
        draft.note_difference(
            key,
            f"reward.functions = {weights}: the file does not contain rewards that your script passes to launch_worker; "
            "add them as file.py:function",
        )
    elif other := [f"{name}: {REWARDS[name]}" for name in weights if REWARDS.get(name)]:
        draft.note_difference(key, f"reward.functions = {weights}; {'; '.join(other)}")


def to_weights(rewards: Any) -> dict[str, float]:
    if isinstance(rewards, dict):
        return {str(name): float(weight) for name, weight in rewards.items()}
    return {str(name): 1.0 for name in to_list(rewards)}


def convert_overlong(cosmos: Settings, draft: Draft) -> None:
    key = f"{POLICY}.overlong_reward.buffer_length"
    buffer, longest = cosmos[key], cosmos["rollout.max_response_length"]
    options: dict[str, float] = {"factor": cosmos[f"{POLICY}.overlong_reward.penalty_factor"]}
    if not 0 < buffer <= longest:
        draft.refuse(
            key,
            f"must be greater than 0 and at most the maximum completion length ({longest}); got {buffer}",
        )
    else:
        options["buffer"] = buffer
    draft.set("reward.options", {"overlong": options})


def convert_teacher(cosmos: Settings, draft: Draft) -> None:
    section = "distillation"
    if not cosmos[f"{section}.enable"]:
        for key in cosmos.given:
            if key.startswith(f"{section}.") and key != f"{section}.enable":
                draft.notes[key] = ("left out", "distillation.enable is false")
        return
    if not cosmos[f"{section}.model_name_or_path"]:
        draft.reject_value(f"{section}.model_name_or_path", "the teacher is missing; set it to a model")
        return
    if cosmos[f"{section}.top_k"]:
        draft.refuse(
            f"{section}.top_k",
            "the teacher scores only the sampled tokens (reverse KL); set it to 0",
        )
    draft.set("distill.teacher", cosmos[f"{section}.model_name_or_path"])
    draft.set("distill.revision", cosmos[f"{section}.model_revision"])
    draft.set("distill.coef", cosmos[f"{section}.kl_penalty_coef"])
    draft.set("distill.discount", cosmos[f"{section}.kl_discount_factor"])
