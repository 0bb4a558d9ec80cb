"""The conversion of cosmos-rl configurations: batches, schedules, objectives, rewards, data and checkpoints."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from dsreason.cli.job import find_trainers
from dsreason.config.load import read_values
from dsreason.errors import ConfigError
from dsreason.tools.cosmos_rl.convert import Imported, convert, is_importable
from dsreason.tools.cosmos_rl.parts.train import to_name_pattern

SFT = """
[policy]
model_name_or_path = "Qwen/Qwen2.5-VL-7B-Instruct"
[policy.parallelism]
tp_size = 1
[custom.dataset]
annotation_path = "rows.json"
[train.train_policy]
type = "sft"
"""
GRPO = """
[policy.parallelism]
tp_size = 1
dp_shard_size = 2
[rollout]
n_generation = 8
[rollout.parallelism]
tp_size = 2
[train]
train_batch_per_replica = 32
[train.train_policy]
type = "grpo"
dataset.name = "openai/gsm8k"
prompt_column_name = "question"
response_column_name = "answer"
reward_function = "gsm8k"
"""


def document(text: str, **changes: Any) -> dict[str, Any]:
    """Parse the file and add keys, such as `train__epoch=3`."""
    loaded = tomllib.loads(text)
    for key, value in changes.items():
        here = loaded
        *sections, name = key.split("__")
        for section in sections:
            here = here.setdefault(section, {})
        here[name] = value
    return loaded


def imported(text: str, *accepted: str, **changes: Any) -> Imported:
    result = convert(document(text, **changes), accepted)
    result.check("cosmos.toml")
    read_values(find_trainers()[result.trainer].schema, result.config, "cosmos.toml")
    return result


def config(text: str, *accepted: str, **changes: Any) -> dict[str, Any]:
    return imported(text, *accepted, **changes).config


def note(text: str, key: str, *accepted: str, **changes: Any) -> tuple[str, str]:
    """Return the verdict and the text for one key."""
    findings = convert(document(text, **changes), accepted).findings
    return next((finding.verdict, finding.text) for finding in findings if finding.key == key)


def refused(text: str, **changes: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        imported(text, **changes)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "trainer"),
    [
        (SFT, "sft"),
        (GRPO, "grpo"),
        ('[train.train_policy]\ntype = "sft"\ntrainer_type = "dpo"', "dpo"),
        ('[policy]\nmodel_name_or_path = "m"\n[rollout]\nn_generation = 4', "grpo"),
        ("[train]\nepoch = 3\n[policy]\nmodel_max_length = 8", "sft"),
        ("[policy]\nis_diffusers = true", "world"),
        ("[model.rl]\nnum_rollout = 8", "world"),
    ],
)
def test_trainer_is_determined_by_the_sections(text: str, trainer: str) -> None:
    assert is_importable(tomllib.loads(text))
    assert convert(tomllib.loads(text)).trainer == trainer


@pytest.mark.parametrize("text", ["", "[train]\nepochs = 3", '[model]\npath = "x"', "[policies]\na = 1", "train = 3"])
def test_dsreason_config_is_distinguished_from_cosmos_rl(text: str) -> None:
    assert not is_importable(tomllib.loads(text))


def test_sft_batch_counts_per_data_parallel_rank() -> None:
    parallel = {
        "n_init_replicas": 2,
        "tp_size": 2,
        "cp_size": 2,
        "dp_shard_size": 4,
        "dp_replicate_size": 3,
        "pp_size": 1,
    }
    result = imported(SFT, train__train_batch_per_replica=32, policy__parallelism=parallel)
    assert result.config["train"]["global_batch_size"] == 2 * 4 * 3 * 32
    assert result.num_gpus == 2 * 2 * 2 * 4 * 3
    assert result.config["train"]["sequence_parallel_size"] == 2


def test_tensor_parallelism_defaults_to_two() -> None:
    result = imported(SFT, policy__parallelism={"dp_shard_size": 4})
    assert (result.num_gpus, result.config["train"]["global_batch_size"]) == (8, 32)


def test_automatic_shards_count_as_one_with_note() -> None:
    result = imported(SFT, policy__parallelism={"tp_size": 1, "dp_shard_size": -1})
    assert result.config["train"]["global_batch_size"] == 8
    assert "taken as 1" in note(SFT, "policy.parallelism.dp_shard_size", policy__parallelism={"dp_shard_size": -1})[1]


def test_grpo_batch_counts_completions_per_replica() -> None:
    result = imported(GRPO, train__train_batch_per_replica=128, policy__parallelism__n_init_replicas=2)
    assert result.config["grpo"]["prompts_per_step"] == 2 * 128 // 8
    assert "global_batch_size" not in result.config["train"]
    assert result.num_gpus == 2 * 2 + 2


def test_colocated_job_uses_no_extra_gpus() -> None:
    assert imported(GRPO, mode="colocated_separated").num_gpus == 2


def test_incomplete_groups_are_rejected_with_nearest_sizes() -> None:
    text = refused(GRPO, train__train_batch_per_replica=30)
    assert text.startswith(
        "cosmos.toml: train.train_batch_per_replica: 30 completions per step cannot be divided into groups of 8"
    )
    assert text.endswith("set 24 or 32")


def test_batch_per_optimize_sets_steps_per_rollout() -> None:
    changed = config(GRPO, train__train_batch_per_replica=64, train__train_policy__batch_size_per_optimize=16)
    assert changed["grpo"]["optimizer_steps_per_rollout"] == 4
    assert "does not divide" in refused(GRPO, train__train_policy__batch_size_per_optimize=5)
    assert "whole groups" in refused(GRPO, train__train_policy__batch_size_per_optimize=4)


def test_forward_token_limit_matches_cosmos_rl() -> None:
    changed = config(SFT, train__train_policy__mini_batch=4, policy__model_max_length=1000)
    assert changed["train"]["max_tokens_per_micro_batch"] == 4000
    changed = config(GRPO, train__train_policy__max_token_len_per_mini_batch=777)
    assert changed["train"]["max_tokens_per_micro_batch"] == 777


@pytest.mark.parametrize(
    ("changes", "optim"),
    [
        (
            {},
            {"lr": 1e-6, "warmup": 20, "schedule": "constant", "eps": 1e-6, "weight_decay": 0.01, "max_grad_norm": 1.0},
        ),
        ({"optm_decay_type": "cosine"}, {"schedule": "cosine"}),
        ({"optm_decay_type": "none", "optm_decay_ratio": 0.3}, {"schedule": "constant"}),
        ({"optm_decay_type": "linear", "optm_decay_ratio": 0.3}, {"schedule": "linear", "decay_share": 0.3}),
        ({"optm_warmup_steps": 0.03}, {"warmup": 0.03}),
        ({"optm_warmup_steps": 0}, {"warmup": 0}),
        ({"optm_warmup_start_factor": 0.1}, {"warmup_start": 0.1}),
        ({"optm_grad_norm_clip": -1.0}, {"max_grad_norm": 0.0}),
        ({"optm_lr": [1e-5, 1e-5]}, {"lr": 1e-5}),
        ({"optm_lr": [1e-5, 1e-6]}, {"lr": 1e-5, "lr_multipliers": {r"^model\.visual\.": 0.1}}),
        ({"optm_lr": {"global": 1e-5}}, {"lr": 1e-5}),
        (
            {"optm_lr": {"visual": 1e-6, "visual.merger": 1e-5, "global": 1e-5}},
            {"lr": 1e-5, "lr_multipliers": {r"^model\.visual\.": 0.1, r"^model\.visual\.merger\.": 1.0}},
        ),
        ({"optm_name": "Adam", "optm_weight_decay": 0.0}, {"weight_decay": 0.0}),
    ],
)
def test_optimizer_settings_are_converted(changes: dict[str, Any], optim: dict[str, Any]) -> None:
    result = config(SFT, **{f"train__{name}": value for name, value in changes.items()})["optim"]
    assert {name: result[name] for name in optim} == optim
    assert ("decay_share" in result) == ("decay_share" in optim)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"optm_name": "AdamW8bit"}, "the moments are always float32"),
        ({"optm_name": "Adam"}, "Adam adds the weight decay (0.01) to the gradient"),
        ({"optm_lr": [1e-5, 1e-6, 1e-6]}, "must list the rates of language model and vision tower; got 3 values"),
        ({"optm_lr": {"visual": 1e-5}}, "must contain global"),
        (
            {"optm_lr": {"visual": 0.0, "global": 1e-5}},
            "must be greater than 0; got 0.0; to freeze weights, use policy.freeze",
        ),
        ({"optm_lr": "1e-5"}, "must be greater than 0; got '1e-5'"),
        ({"optm_decay_type": "exponential"}, "must be one of none, linear, cosine, sqrt; got 'exponential'"),
        ({"optm_warmup_steps": 1.0}, "number of steps"),
        ({"param_dtype": "float16"}, "weights must be bfloat16 or float32"),
        ({"ema_enable": True}, "only dsreason world"),
        ({"resume": "outputs/x/policy"}, "cosmos-rl's checkpoints cannot be resumed"),
        ({"epoch": "three"}, "must be a whole number; got 'three'"),
        ({"compile": 1}, "must be true or false; got 1"),
        ({"ckpt": 3}, "must be a section; got 3"),
    ],
)
def test_keys_that_change_the_result_are_refused(changes: dict[str, Any], text: str) -> None:
    assert text in refused(SFT, **{f"train__{name}": value for name, value in changes.items()})


@pytest.mark.parametrize(
    ("module", "matches"),
    [
        ("model", ["model.language_model.layers.1.mlp.up_proj.weight", "lm_head.weight", "model.layers.1.mlp.weight"]),
        ("model.layers.1", ["model.language_model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.weight"]),
        ("model.lm_head", ["lm_head.weight"]),
        ("visual", ["model.visual.merger.mlp.0.weight", "model.visual.blocks.1.norm1.weight"]),
        ("model.visual.merger", ["model.visual.merger.mlp.0.weight"]),
    ],
)
def test_module_path_becomes_name_pattern(module: str, matches: list[str]) -> None:
    names = [
        "model.visual.merger.mlp.0.weight",
        "model.visual.blocks.1.norm1.weight",
        "model.language_model.layers.1.mlp.up_proj.weight",
        "model.language_model.layers.10.mlp.up_proj.weight",
        "lm_head.weight",
        "model.layers.1.mlp.weight",  # a text-only model
    ]
    expected = {*matches, names[3]} if module == "model" else set(matches)
    assert {name for name in names if re.search(to_name_pattern(module), name)} == expected


def test_refused_key_can_be_accepted() -> None:
    key = "train.fp8.enable_fp8"
    assert "--accept train.fp8.enable_fp8" in refused(SFT, train__fp8={"enable_fp8": True})
    assert config(SFT, key, train__fp8={"enable_fp8": True})["train"]["precision"] == "bf16"
    assert note(SFT, key, key, train__fp8={"enable_fp8": True})[0] == "differs"


def test_accepting_unknown_key_is_rejected() -> None:
    with pytest.raises(ConfigError, match="--accept train.fp9"):
        convert(document(SFT), ["train.fp9"])


def test_all_errors_are_reported_together() -> None:
    text = refused(SFT, train__fp8={"enable_fp8": True}, train__optm_name="Adam8bit", train__ema_enable=True)
    assert text.startswith("3 problems in the configuration")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {"preset": "dapo", "advantage": "group_normalized", "dynamic_sampling": False, "overlong_filter": False}),
        ({"loss_type": "seq-mean-token-mean"}, {"preset": "grpo"}),
        (
            {"loss_type": "seq-mean-token-mean", "unbiased_loss_max_tokens": 2048, "unbiased_advantage": True},
            {"preset": "dr_grpo", "advantage": "group_centered"},
        ),
        (
            {"variant": "dapo", "max_retry_for_on_policy": 5},
            {"preset": "dapo", "dynamic_sampling": True, "max_refills": 5},
        ),
        ({"variant": "gspo", "loss_type": "seq-mean-token-mean"}, {"preset": "gspo"}),
        ({"epsilon_low": 0.1, "epsilon_high": 0.28}, {"clip_low": 0.1, "clip_high": 0.28}),
        ({"epsilon_low": -1.0, "epsilon_high": -1.0}, {"clip_low": 1.0, "clip_high": 1e9}),
        ({"lower_bound_ratio": 10.0}, {"dual_clip": 10.0}),
        ({"kl_beta": 0.05}, {"kl_coef": 0.05, "kl_clamp": 10.0, "kl_estimator": "k3"}),
        ({"kl_beta": 0.05, "unbiased_kl_estimate": True}, {"kl_estimator": "bias_corrected_k3"}),
        (
            {"kl_beta": 0.1, "reference_reset_interval": 50, "reset_optimizer_with_reference": False},
            {"reference_reset_every": 50},
        ),
        ({"entropy_coeff": 0.01}, {"entropy_coef": 0.01}),
        (
            {"use_decoupled_loss": True, "behav_imp_weight_cap": 5.0},
            {"correction": "token_mask", "correction_low": 0.0, "correction_high": 5.0},
        ),
    ],
)
def test_objective_settings_are_converted(changes: dict[str, Any], expected: dict[str, Any]) -> None:
    result = config(GRPO, **{f"train__train_policy__{name}": value for name, value in changes.items()})["grpo"]
    assert {name: result.get(name) for name in expected} == expected


def test_kl_settings_are_omitted_without_kl() -> None:
    assert {"kl_clamp", "kl_estimator", "reference_reset_every"} & config(GRPO)["grpo"].keys() == set()


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"mu_iterations": 2}, "each completion is trained on once"),
        ({"variant": "ppo"}, "must be one of grpo, gspo, dapo; got 'ppo'"),
        ({"loss_type": "seq-mean-token-sum"}, "dr_grpo up to a constant factor"),
        ({"loss_type": "mean"}, "got 'mean'"),
        ({"positive_nll_coef": 0.1}, "dsreason does not have this loss term"),
        ({"aipo_rho": 2.0}, "cispo"),
        ({"off_policy_masking_delta": 0.1}, "geometric_mask"),
        ({"reward_function": ["my_reward"]}, "file.py:my_reward"),
        ({"reward_function": ["overlong"]}, "at most the maximum completion length (2048); got 4096"),
        ({"use_remote_reward": True}, "dsreason world"),
        ({"group_reward_calculation": True}, "one completion at a time"),
        ({"kl_beta": 0.1, "reference_reset_interval": 9}, "keeps its moments"),
    ],
)
def test_objective_without_equivalent_is_refused(changes: dict[str, Any], text: str) -> None:
    assert text in refused(GRPO, **{f"train__train_policy__{name}": value for name, value in changes.items()})


@pytest.mark.parametrize(
    ("given", "functions"),
    [
        ("format", {"format": 1.0}),
        (["single_choice", "format"], {"single_choice": 1.0, "format": 1.0}),
        ({"boxed_math": 2.0, "mine.py:short": 0.1}, {"boxed_math": 2.0, "mine.py:short": 0.1}),
    ],
)
def test_rewards_keep_their_weights(given: Any, functions: dict[str, float]) -> None:
    assert config(GRPO, train__train_policy__reward_function=given)["reward"]["functions"] == functions


def test_unnamed_reward_defaults_to_single_choice() -> None:
    without = GRPO.replace('reward_function = "gsm8k"\n', "")
    assert config(without)["reward"]["functions"] == {"single_choice": 1.0}


def test_buffer_of_overlong_penalty_is_converted() -> None:
    changed = config(
        GRPO,
        train__train_policy__reward_function=["gsm8k", "overlong"],
        train__train_policy__overlong_reward={"buffer_length": 512, "penalty_factor": 2.0},
    )
    assert changed["reward"]["options"] == {"overlong": {"buffer": 512, "factor": 2.0}}


def test_conflicting_temperatures_are_rejected() -> None:
    key = "train.train_policy.temperature"
    assert config(GRPO, train__train_policy__temperature=0.9)["rollout"]["temperature"] == 0.9
    assert note(GRPO, key, train__train_policy__temperature=0.9)[0] == "differs"
    sampled = {"temperature": 0.7}
    assert config(GRPO, rollout__sampling_config=sampled)["rollout"]["temperature"] == 0.7
    assert "make them equal" in refused(GRPO, rollout__sampling_config=sampled, train__train_policy__temperature=0.9)
    changed = config(GRPO, key, rollout__sampling_config=sampled, train__train_policy__temperature=0.9)
    assert changed["rollout"]["temperature"] == 0.7


def test_truncated_sampling_disables_correction() -> None:
    changed = config(GRPO, rollout__sampling_config={"top_p": 0.9, "top_k": 20})
    assert (changed["rollout"]["top_p"], changed["rollout"]["top_k"], changed["grpo"]["correction"]) == (
        0.9,
        20,
        "none",
    )
    assert config(GRPO)["rollout"]["top_k"] == 0


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"backend": "vla"}, "got 'vla'"),
        ({"quantization": "fp8"}, "sampled from the weights that are trained"),
        ({"multi_turn_config": {"enable": True}}, "multi-turn rollouts are not supported"),
        ({"sampling_config": {"repetition_penalty": 1.1}}, "a policy other than"),
        (
            {
                "parallelism": {
                    "tp_size": 4,
                    "dp_shard_size": 1,
                    "pp_size": 1,
                    "n_init_replicas": 1,
                    "dp_replicate_size": 3,
                }
            },
            "",
        ),
    ],
)
def test_rollout_settings_without_equivalent_are_refused(changes: dict[str, Any], text: str) -> None:
    assert text in refused(GRPO, **{f"rollout__{name}": value for name, value in changes.items()})


def test_teacher_settings_are_converted() -> None:
    settings = {"enable": True, "model_name_or_path": "t", "kl_penalty_coef": 0.5, "kl_discount_factor": 0.9}
    changed = config(GRPO, distillation=settings)
    assert changed["distill"] == {"teacher": "t", "coef": 0.5, "discount": 0.9}
    alone = config(GRPO.replace('reward_function = "gsm8k"\n', ""), distillation=settings)
    assert "functions" not in alone.get("reward", {})
    assert "reverse KL" in refused(GRPO, distillation=settings | {"top_k": 20})
    assert "the teacher is missing" in refused(GRPO, distillation={"enable": True})
    off = {"enable": False, "top_k": 20, "kl_penalty_coef": 0.5}
    assert "distill" not in config(GRPO, distillation=off)
    assert note(GRPO, "distillation.top_k", distillation=off)[0] == "left out"


DPO = SFT.replace('type = "sft"', 'type = "sft"\ntrainer_type = "dpo"')


def test_dpo_without_reference_is_converted() -> None:
    changed = config(DPO, custom__dpo_beta=0.2)
    assert changed["dpo"] == {"beta": 0.2, "loss_weights": {"sigmoid": 1.0}, "reference": "none"}
    assert changed["train"]["global_batch_size"] == 8


def test_mixed_preference_losses_are_converted() -> None:
    mixed = {"custom__dpo_loss_type": ["sigmoid", "bco_pair", "sft"], "custom__dpo_loss_weights": [0.8, 0.2, 1.0]}
    changed = config(DPO, **mixed)["dpo"]
    assert changed == {"beta": 0.1, "loss_weights": {"sigmoid": 0.8, "bco": 0.2}, "sft_weight": 1.0}
    assert note(DPO, "custom.dpo_loss_type", **mixed)[0] == "differs"
    short = mixed | {"custom__dpo_loss_weights": [0.8]}
    assert config(DPO, **short)["dpo"]["loss_weights"] == {"sigmoid": 1.0, "bco": 1.0}
    assert "got 'kto'" in refused(DPO, custom__dpo_loss_type="kto")


def test_lora_settings_are_converted() -> None:
    lora = {
        "r": 16,
        "lora_alpha": 32,
        "target_modules": ["q_proj", "v_proj"],
        "use_rslora": True,
        "r_pattern": {"visual": 4},
    }
    assert config(SFT, policy__lora=lora)["lora"] == {
        "rank": 16,
        "alpha": 32,
        "targets": [r"(^|\.)q_proj$", r"(^|\.)v_proj$"],
        "rslora": True,
        "rank_pattern": {"visual": 4},
    }
    assert config(SFT, policy__lora={"target_modules": "all-linear"})["lora"] == {
        "rank": 8,
        "alpha": 8.0,
        "vision": True,
    }
    assert "only adapters are trained" in refused(SFT, policy__lora={"modules_to_save": ["lm_head"]})
    assert "PEFT's" in refused(SFT, policy__lora={"init_lora_weights": "pissa"})
    assert "adapter dropout is supported only in sft" in refused(GRPO, policy__lora={"lora_dropout": 0.1})
    assert "lora" not in config(SFT)


def test_freeze_and_trainable_patterns_are_converted() -> None:
    assert config(SFT, policy__freeze_pattern=["visual"])["model"]["freeze"] == ["visual"]
    assert config(SFT, policy__trainable_pattern=["merger", "lm_head"])["model"]["freeze"] == [
        "^(?!.*(?:merger|lm_head))"
    ]
    assert "cannot be combined with freeze_pattern" in refused(
        SFT, policy__freeze_pattern=["a"], policy__trainable_pattern=["b"]
    )
    assert "'[' is not a valid regular expression" in refused(SFT, policy__freeze_pattern=["["])
    assert "freeze_pattern" in refused(SFT, policy__trainable_map={"visual": False})


@pytest.mark.parametrize(
    ("ckpt", "expected"),
    [
        ({}, {"every": 0, "last": False, "keep_best": False, "export": "final", "keep": 5}),
        (
            {"enable_checkpoint": True, "save_freq": 100, "max_keep": 2, "save_mode": "sync"},
            {"every": 100, "keep": 2, "export": "all", "export_keep": 2, "background": False},
        ),
        ({"enable_checkpoint": True, "max_keep": -1, "export_safetensors": False}, {"keep": -1, "export": "final"}),
        (
            {"enable_checkpoint": True, "upload_hf": True, "hf_repo_name": "me/model"},
            {"upload": [{"to": "hub:me/model", "what": "final"}]},
        ),
        (
            {"enable_checkpoint": True, "upload_s3": "all", "s3_bucket": "bucket", "s3_prefix": "a/"},
            {"upload": [{"to": "s3://bucket/a", "what": "all"}]},
        ),
        (
            {"enable_checkpoint": True, "upload_s3": True, "s3_bucket": "bucket"},
            {"upload": [{"to": "s3://bucket/outputs", "what": "final"}]},
        ),
    ],
)
def test_checkpoint_settings_are_converted(ckpt: dict[str, Any], expected: dict[str, Any]) -> None:
    result = config(SFT, train__ckpt=ckpt)["checkpoint"]
    assert {name: result.get(name) for name in expected} == expected


def test_rejected_upload_value_suggests_intended_one() -> None:
    verdict, text = note(SFT, "train.ckpt.upload_s3", train__ckpt={"upload_s3": True, "s3_bucket": "bucket"})
    assert verdict == "differs"
    assert text.startswith('cosmos-rl rejects true; "final" or "all" was probably meant')


@pytest.mark.parametrize(
    ("ckpt", "text"),
    [
        ({"max_keep": 0}, "0 would delete"),
        ({"save_freq_in_epoch": 1}, "the interval is in steps"),
        ({"enable_checkpoint": True, "save_freq": 0}, "1 or more"),
        ({"upload_hf": True}, 'set "you/Comos-Reason1"'),
        ({"upload_s3": "all"}, "s3_bucket is missing"),
        ({"upload_s3": "some", "s3_bucket": "bucket"}, "got 'some'"),
    ],
)
def test_checkpoint_settings_without_equivalent_are_refused(ckpt: dict[str, Any], text: str) -> None:
    assert text in refused(SFT, train__ckpt=ckpt)


def data_of(**dataset: Any) -> dict[str, Any]:
    result: dict[str, Any] = config(
        SFT.replace('annotation_path = "rows.json"', ""), train__train_policy__dataset=dataset
    )["data"]
    return result


def test_llava_annotations_are_converted() -> None:
    settings = {"annotation_path": "a.json", "media_path": "m", "system_prompt": "Be short."}
    result = config(SFT, custom__dataset=settings)["data"]
    assert {name: result[name] for name in ("adapter", "path", "media_path", "system_prompt")} == {
        "adapter": "llava",
        "path": "a.json",
        "media_path": "m",
        "system_prompt": "Be short.",
    }
    assert config(SFT, custom__dataset={"path": "saved"})["data"]["adapter"] == "conversations"
    tao = config(SFT, custom__dataset={}, custom__train_dataset={"annotation_path": "a.json", "media_root": "m"})
    assert (tao["data"]["path"], tao["data"]["media_path"]) == ("a.json", "m")


@pytest.mark.parametrize(
    ("name", "adapter"),
    [
        ("nvidia/Cosmos-Reason1-SFT-Dataset", "cosmos_reason1"),
        ("/data/Cosmos-Reason1-SFT-Dataset/", "cosmos_reason1"),
        ("nvidia/Cosmos-Reason1-RL-Dataset", "cosmos_reason1_rl"),
        ("someone/videos", "conversations"),
    ],
)
def test_named_data_set_is_converted(name: str, adapter: str) -> None:
    data = data_of(name=name, subset="robovqa", split=["understanding", "reasoning"])
    assert (data["adapter"], data["path"], data["subset"]) == (adapter, name, "robovqa")
    assert data["split"] == ["understanding", "reasoning"]


def test_local_folder_of_labels_is_recognised(tmp_path: Path) -> None:
    for name in ("videos", "metas"):
        (tmp_path / name).mkdir()
    data = data_of(name=str(tmp_path), split="train")
    assert (data["adapter"], data["path"]) == ("local_labels", str(tmp_path))
    assert "split" not in data


def test_custom_trainer_type_is_refused() -> None:
    assert "'pi_sft' is a custom trainer" in refused(SFT, train__train_policy__trainer_type="pi_sft")


def test_unnamed_reward_mentions_script_rewards() -> None:
    without = GRPO.replace('reward_function = "gsm8k"\n', "")
    verdict, text = note(without, "train.train_policy.reward_function")
    assert (verdict, "launch_worker" in text) == ("differs", True)


def test_missing_folder_is_reported() -> None:
    dataset = {"name": "/no/such/folder"}
    text = SFT.replace('annotation_path = "rows.json"', "")
    verdict, message = note(text, "train.train_policy.dataset.name", train__train_policy__dataset=dataset)
    assert (verdict, "local_labels" in message) == ("differs", True)


def test_column_names_are_converted() -> None:
    assert "columns" not in config(GRPO)["data"]
    changed = config(
        GRPO, train__train_policy__prompt_column_name="problem", train__train_policy__response_column_name="solution"
    )
    assert changed["data"]["columns"] == {"question": "problem", "answer": "solution"}
    text = SFT.replace('annotation_path = "rows.json"', "")
    names = {"train__train_policy__dataset": {"name": "a/b"}, "train__train_policy__conversation_column_name": "talk"}
    assert config(text, **names)["data"]["columns"] == {"conversations": "talk"}


def test_rows_opened_by_script_are_rejected() -> None:
    text = SFT.replace('annotation_path = "rows.json"', "")
    assert "your script opens it" in refused(text)


@pytest.mark.parametrize(
    ("model", "vision", "expected"),
    [
        ("nvidia/Cosmos-Reason1-7B", None, {"fps": 1, "max_pixels": 81920}),
        ("nvidia/Cosmos-Reason2-2B", None, {"fps": 1, "total_pixels": 3774873}),
        ("nvidia/Cosmos-Reason2-2B", {"nframes": 8}, {"nframes": 8}),
        ("nvidia/Cosmos-Reason1-7B", {"fps": 2, "total_pixels": 6422528}, {"fps": 2, "total_pixels": 6422528}),
    ],
)
def test_media_sampling_settings_are_converted(
    model: str, vision: dict[str, Any] | None, expected: dict[str, Any]
) -> None:
    changes: dict[str, Any] = {"policy__model_name_or_path": model}
    if vision is not None:
        changes["custom__vision"] = vision
    assert config(SFT, **changes)["data"]["vision"] == expected


def test_validation_is_off_unless_enabled() -> None:
    off = config(SFT, validation={"freq": 7}, train__train_policy__dataset={"test_size": 100})
    assert "validation" not in off["data"]
    assert off["validation"] == {"before_training": False}
    assert note(SFT, "validation.freq", validation={"freq": 7}) == ("left out", "validation.enable is false")


def test_validation_data_is_converted() -> None:
    on = {"enable": True, "freq": 7, "val_before_train": True, "batch_size": 2}
    result = config(SFT, validation=on)
    assert result["data"]["validation"] == 0.1
    assert result["validation"] == {"every": 7, "before_training": True, "micro_batch_size": 2, "generate": False}
    assert config(SFT, validation=on, train__train_policy__dataset={"test_size": 100})["data"]["validation"] == 100
    local = config(SFT, validation=on | {"dataset": {"name": "a/b", "split": "test"}})["data"]["validation"]
    assert (local["path"], local["split"], local["adapter"]) == ("a/b", "test", "conversations")


def test_grpo_validation_keeps_sampling_settings() -> None:
    on = {"enable": True, "temperature": 0.8, "top_k": -1, "top_p": 0.9}
    result = config(GRPO, validation=on)
    assert (result["validation"]["temperature"], result["validation"]["top_p"]) == (0.8, 0.9)
    assert result["validation"]["max_completion_length"] == 2048
    assert result["checkpoint"]["best_metric"] == "val/reward/mean"
    assert config(GRPO, validation=on | {"top_k": 1})["validation"]["temperature"] == 0.0


def test_wandb_is_enabled_only_when_used() -> None:
    logging = {"logger": ["console", "wandb"], "project_name": "p", "experiment_name": "None"}
    assert config(SFT, logging=logging)["monitor"] == {"wandb": True, "wandb_project": "p"}
    assert "monitor" not in config(SFT, logging=logging | {"logger": ["console"]})


@pytest.mark.parametrize(
    ("seed", "expected"),
    [({}, 0), ({"seed": 7}, 7), ({"deterministic": True}, 42), ({"train_policy": {"dataloader_seed": 3}}, 3)],
)
def test_seed_matches_that_of_cosmos_rl(seed: dict[str, Any], expected: int) -> None:
    text = SFT.replace('[train.train_policy]\ntype = "sft"\n', "")
    assert config(text, **{f"train__{name}": value for name, value in seed.items()})["train"]["seed"] == expected


def test_comparison_shows_numbers_of_both_configurations(tmp_path: Path) -> None:
    rows = tmp_path / "rows.json"
    rows.write_text(json.dumps([{}] * 1001))
    changes = {
        "custom__dataset": {"annotation_path": str(rows)},
        "train__epoch": 3,
        "policy__parallelism__dp_shard_size": 4,
    }
    result = {meaning.name: meaning for meaning in imported(SFT, **changes).meanings}
    assert result["global batch"].cosmos_rl == "8 per data-parallel rank x 4 = 32 samples"
    assert result["steps"].cosmos_rl.endswith("1001 samples / 32 = 31.3 per epoch, 93 in total")
    assert result["steps"].dsreason.endswith("31.3 per epoch, 93 in total")
    assert result["learning rate"].dsreason == "0 to 1e-06 in 20 steps, then constant"
    assert result["tokens per step"].dsreason == "at most 131,072"
