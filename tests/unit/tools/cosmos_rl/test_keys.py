"""The tables of keys, which must cover cosmos-rl's schema; every mapped key must have an effect."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dsreason.cli.job import find_trainers
from dsreason.config.load import read_values
from dsreason.errors import ConfigError
from dsreason.tools.cosmos_rl.convert import LANGUAGE_KEYS, PREDICT_KEYS, WORLD_KEYS, Imported, convert
from dsreason.tools.cosmos_rl.keys.framework import GENERATOR, REASONER
from dsreason.tools.cosmos_rl.keys.key import Key, is_of_kind
from dsreason.tools.cosmos_rl.write import write_toml
from tests.unit.tools.cosmos_rl.test_convert import DPO, GRPO, SFT, document

SHARED = Path(__file__).parents[4] / "../shared/cosmos_configs"
needs_configs = pytest.mark.skipif(
    not SHARED.is_dir(), reason="cosmos-rl's configurations (../shared/cosmos_configs) are not here"
)


WORLD = """
[policy]
is_diffusers = true
[rollout]
n_generation = 4
[train.train_policy]
type = "grpo"
trainer_type = "diffusion_nft"
use_remote_reward = true
dataset.name = "prompts.txt"
"""


def leaves(
    node: dict[str, Any], definitions: dict[str, Any], path: tuple[str, ...] = ()
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the dotted keys of a JSON schema that have plain values, with their descriptions."""
    if "$ref" in node:
        yield from leaves(definitions[node["$ref"].rpartition("/")[2]], definitions, path)
        return
    forms = node.get("anyOf") or node.get("oneOf") or node.get("allOf") or []
    sections = [form for form in forms if "$ref" in form]
    for form in sections:
        yield from leaves(form, definitions, path)
    for name, inside in node.get("properties", {}).items():
        yield from leaves(inside, definitions, (*path, name))
    if not sections and "properties" not in node:
        yield ".".join(path), node


@needs_configs
def test_every_schema_key_has_an_entry() -> None:
    schema = json.loads((SHARED / "cosmos_rl_config.schema.json").read_text())
    result = {key for key, _ in leaves(schema, schema["$defs"])}
    assert len(result) == 186
    assert result - {"custom"} - LANGUAGE_KEYS.keys() == set()  # [custom] is free, and its known keys are in the table


@needs_configs
def test_defaults_match_the_schema() -> None:
    schema = json.loads((SHARED / "cosmos_rl_config.schema.json").read_text())
    nodes = dict(leaves(schema, schema["$defs"]))
    value = {key: node["default"] for key, node in nodes.items() if "default" in node and key in LANGUAGE_KEYS}
    assert len(value) > 150
    different = {key for key, default in value.items() if LANGUAGE_KEYS[key].default != default}
    assert different == {"train.train_policy.balance_dp_token"}  # true for SFT, false for GRPO


BEYOND_THE_SCHEMA = [
    *("custom.dpo_beta", "custom.dpo_loss_type", "custom.dpo_loss_weights", "train.train_policy.trainer_type"),
    *(
        f"distillation.{name}"
        for name in (
            *("enable", "model_name_or_path", "batch_size_per_replica", "mini_batch", "kl_penalty_coef"),
            *("kl_discount_factor", "include_prompt", "top_k", "jsd_beta", "trainer_token_ids_from_teacher"),
            *("rollout_top_k_recompute", "parallelism.tp_size"),
        )
    ),
    *("train.logprob_dtype", "train.ema_enable", "train.ema_decay", "train.ema_update_interval", "train.force_use_hf"),
    *("train.non_text", "train.coalesce_weight_sync", "train.save_ckpt_at_exit", "train.optm_warmup_start_factor"),
    *("policy.freeze_pattern", "policy.trainable_pattern", "policy.aux_loss_coeff", "policy.lora.lora_path"),
    *(
        "custom.dataset.annotation_path",
        "custom.dataset.media_path",
        "custom.dataset.system_prompt",
        "custom.vision.fps",
    ),
    *("custom.vision.nframes", "custom.vision.total_pixels", "custom.vision.resized_height", "custom.vision.video_end"),
    *("validation.val_before_train", "validation.use_remote_reward", "logging.group_name", "logging.log_interval"),
    *("rollout.mode", "rollout.async_config.max_concurrent_requests", "rollout.prefetch_rollout", "mode"),
    *(
        f"train.train_policy.{name}"
        for name in (
            *("algo", "use_remote_reward", "remote_reward.scale", "bypass_reward", "group_reward_calculation"),
            *("advantage_low", "unbiased_kl_estimate", "off_policy_masking_delta", "uncentralized_training"),
            *("max_inflight_steps", "collect_rollout_logprobs", "use_rollout_logprobs_for_loss", "dataset.local_dir"),
            *("dataloader_seed", "dataloader_drop_last", "enable_dp_load_balancing", "load_balanced_pool_size"),
        )
    ),
]


@pytest.mark.parametrize("key", BEYOND_THE_SCHEMA)
def test_keys_missing_from_schema_have_entries(key: str) -> None:
    assert key in LANGUAGE_KEYS


@pytest.mark.parametrize(
    ("keys", "name"),
    [
        *((WORLD_KEYS, f"policy.diffusers.{name}") for name in ("train_frames", "timesteps_fraction", "sample.solver")),
        *((WORLD_KEYS, f"train.train_policy.remote_reward.{name}") for name in ("scale", "reward_fns")),
        *(
            (PREDICT_KEYS, f"model.rl.{name}")
            for name in (
                *("enabled", "num_rollout", "sample_steps", "train_on", "on_policy", "update_ref_every_iter"),
                *(
                    "solver_option",
                    "s_churn",
                    "s_t_max",
                    "s_t_min",
                    "s_noise",
                    "guidance",
                    "min_num_conditional_frames",
                ),
                *("max_num_conditional_frames", "clip_ratio", "kl_beta", "data_beta", "use_rl_sigma_and_noise"),
                *("data_on_first_only", "use_same_seed", "exp_reward", "reward_config.adv_clip"),
            )
        ),
        *((PREDICT_KEYS, name) for name in ("trainer.max_iter", "checkpoint.save_iter", "model.dp_replicate_size")),
    ],
)
def test_world_model_keys_are_in_key_table(keys: dict[str, Key], name: str) -> None:
    assert name in keys


@pytest.mark.parametrize(
    "keys",
    [LANGUAGE_KEYS, WORLD_KEYS, PREDICT_KEYS, REASONER, GENERATOR],
    ids=["language", "world", "predict", "reasoner", "generator"],
)
def test_every_key_entry_has_target_or_reason(keys: dict[str, Key]) -> None:
    for name, key in keys.items():
        assert bool(key.becomes) != bool(key.because), name
        assert (key.only is None) == (key.instead == ""), name
        assert key.default is None or key.takes == "any" or is_of_kind(key.default, key.takes), name


OTHER_VALUES: dict[str, Any] = {
    "train.optm_name": "AdamW8bit",
    "train.optm_lr": 0.5,
    "train.optm_decay_type": "cosine",
    "train.optm_decay_ratio": 0.5,
    "train.optm_warmup_steps": 7,
    "train.max_num_steps": 9,
    "train.resume": True,
    "train.seed": 5,
    "train.param_dtype": "float32",
    "train.ckpt.upload_hf": True,
    "train.ckpt.upload_s3": "all",
    "train.ckpt.save_mode": "sync",
    "train.train_policy.type": "sft",
    "train.train_policy.trainer_type": "dpo",
    "train.train_policy.dataset.subset": "s",
    "train.train_policy.dataset.revision": "r",
    "train.train_policy.dataset.split": "s",
    "train.train_policy.dataloader_prefetch_factor": 7,
    "train.train_policy.max_token_len_per_mini_batch": 99,
    "train.train_policy.dataset.test_size": 5,
    "train.train_policy.variant": "gspo",
    "train.train_policy.loss_type": "seq-mean-token-mean",
    "train.train_policy.unbiased_loss_max_tokens": 99,
    "train.train_policy.reference_reset_interval": 5,
    "train.train_policy.batch_size_per_optimize": 16,
    "train.train_policy.reward_function": "format",
    "train.train_policy.filter_reward_metric": "x",
    "train.train_policy.min_filter_prefix_tokens": 1,
    "train.train_policy.behav_imp_weight_cap": 4.0,
    "train.train_policy.lower_bound_ratio": 4.0,
    "rollout.backend": "example_hf",
    "rollout.enforce_eager": True,
    "policy.parallelism.dp_shard_size": 4,
    "rollout.sampling_config.top_k": 5,
    "rollout.gpu_memory_utilization": 0.3,
    "rollout.parallelism.tp_size": 1,
    "rollout.parallelism.dp_shard_size": 2,
    "rollout.n_generation": 4,
    "distillation.model_name_or_path": "t",
    "distillation.model_revision": "r",
    "custom.dpo_loss_type": "bco_pair",
    "custom.dpo_loss_weights": [0.5],
    "policy.model_revision": "r",
    "policy.freeze_pattern": ["x"],
    "policy.trainable_pattern": ["x"],
    "policy.lora.target_modules": ["q_proj"],
    "policy.lora.modules_to_save": ["x"],
    "policy.lora.alpha_pattern": {"x": 3},
    "policy.lora.r_pattern": {"x": 3},
    "policy.lora.init_lora_weights": "pissa",
    "policy.parallelism.tp_size": 4,
    "validation.batch_size": 3,
    "validation.top_p": 0.5,
    "validation.top_k": -1,
    "validation.max_response_length": 9,
    "validation.reward_function": "format",
    "validation.dataset.subset": "s",
    "validation.dataset.revision": "r",
    "validation.dataset.split": "s",
    "validation.dataset.test_size": 5,
    "logging.logger": ["wandb"],
    "logging.experiment_name": "x",
} | {f"custom.vision.{name}": 4 for _, name in (("", name) for name in ("fps", "nframes", "min_frames", "max_frames"))}
OTHER_VALUES |= {
    f"custom.vision.{name}": 9999 for name in ("min_pixels", "max_pixels", "total_pixels", "video_start", "video_end")
}

BESIDE: dict[str, dict[str, Any]] = {
    "train.train_policy.load_balanced": {},
    "train.optm_decay_ratio": {"train__optm_decay_type": "linear"},
    "train.optm_weight_decay": {},
    "train.ckpt.": {"train__ckpt__enable_checkpoint": True},
    "train.ckpt.enable_checkpoint": {},
    "train.ckpt.upload_hf": {"train__ckpt__enable_checkpoint": True, "train__ckpt__hf_repo_name": "me/m"},
    "train.ckpt.hf_repo_name": {"train__ckpt__enable_checkpoint": True, "train__ckpt__upload_hf": True},
    "train.ckpt.s3": {
        "train__ckpt__enable_checkpoint": True,
        "train__ckpt__upload_s3": "all",
        "train__ckpt__s3_bucket": "bucket",
    },
    "train.train_policy.unbiased_kl_estimate": {"train__train_policy__kl_beta": 0.1},
    "train.train_policy.unbiased_loss_max_tokens": {"train__train_policy__loss_type": "seq-mean-token-mean"},
    "train.train_policy.re": {"train__train_policy__kl_beta": 0.1},
    "train.train_policy.reset_optimizer": {
        "train__train_policy__kl_beta": 0.1,
        "train__train_policy__reference_reset_interval": 5,
    },
    "train.train_policy.overlong": {
        "train__train_policy__reward_function": "overlong",
        "rollout__max_response_length": 9999,
    },
    "train.train_policy.max_retry": {"train__train_policy__variant": "dapo"},
    "train.train_policy.filter_reward": {"train__train_policy__variant": "dapo"},
    "train.train_policy.behav": {"train__train_policy__use_decoupled_loss": True},
    "distillation.": {"distillation__enable": True, "distillation__model_name_or_path": "m"},
    "validation.": {"validation__enable": True},
    "validation.dataset.": {"validation__enable": True, "validation__dataset__name": "a/b"},
    "validation.dataset.test_size": {"validation__enable": True},
    "validation.dataset.local_dir": {"validation__enable": True},
    "validation.temperature": {"validation__enable": True, "validation__top_k": -1},
    "validation.top_k": {"validation__enable": True, "validation__temperature": 0.8},
    "validation.enable": {},
    "train.train_policy.dataset.test_size": {"validation__enable": True},
    "custom.val_dataset.": {"validation__enable": True, "custom__val_dataset__annotation_path": "v.json"},
    "policy.lora.": {"policy__lora__r": 4},
    "logging.": {"logging__logger": ["wandb"]},
    "logging.logger": {},
}
"""Settings that must accompany a key for it to take effect, by key prefix. The longest prefix applies."""

NAMED = {"train.train_policy.dataset.", "train.train_policy.conversation_column_name"}
NOTHING_TO_SEE = {
    "policy.parallelism.pp_size": "counted among the GPUs alone",
    "custom.train_dataset.media_path": "media_root is the other name of it",
}


def another(key: str, known: Key) -> Any:
    """Return a value of the same type as the default, but different from it."""
    if key in OTHER_VALUES:
        return OTHER_VALUES[key]
    default = known.default
    if isinstance(default, bool):
        return not default
    if isinstance(default, int | float):
        return type(default)(2 if default < 1 else default * 2) if default != 1.0 or isinstance(default, int) else 0.5
    if isinstance(default, list):
        return [0.5, 0.6] if default else ["x"]
    return "other"


def setting_for(key: str, trainer: str) -> tuple[str, dict[str, Any]]:
    text = {"sft": SFT, "dpo": DPO, "grpo": GRPO}[trainer]
    if trainer != "grpo" and (
        key.startswith(tuple(NAMED)) or key.startswith(("custom.dataset", "custom.train_dataset"))
    ):
        text = text.replace('annotation_path = "rows.json"', "")
    beside = max((start for start in BESIDE if key.startswith(start)), key=len, default=None)
    changes = dict(BESIDE[beside]) if beside else {}
    if text != GRPO and key.startswith(tuple(NAMED)) and not key.endswith((".name", ".local_dir")):
        changes["train__train_policy__dataset__name"] = "a/b"
    if key.startswith(("custom.dataset.", "custom.train_dataset.")) and not key.endswith("annotation_path"):
        section = key.split(".")[1]
        if not key.endswith(".path"):
            changes[f"custom__{section}__annotation_path"] = "a.json"
    return text, changes


MAPPED = [
    (key, trainer)
    for key, expected in LANGUAGE_KEYS.items()
    if expected.becomes and key not in NOTHING_TO_SEE
    for trainer in (expected.trainers[:1] if key.startswith(tuple(NAMED)) else expected.trainers[-1:])
]


@pytest.mark.parametrize(("key", "trainer"), MAPPED)
def test_mapped_key_changes_config_or_is_reported(key: str, trainer: str) -> None:
    language_keys = LANGUAGE_KEYS[key]
    text, beside = setting_for(key, trainer)
    name = key.replace(".", "__")
    before = convert(document(text, **{raw: value for raw, value in beside.items() if raw != name}))
    after = convert(document(text, **beside | {name: another(key, language_keys)}))
    spoken = [finding for finding in after.findings if finding.key == key and finding.verdict in ("differs", "error")]
    assert spoken or effect(after) != effect(before)


def effect(found: Imported) -> tuple[object, ...]:
    errors = [finding for finding in found.findings if finding.verdict == "error"]
    return found.config, found.num_gpus, found.arguments, found.trainer, errors


@needs_configs
@pytest.mark.parametrize("name", sorted(path.name for path in SHARED.glob("*.toml")) if SHARED.is_dir() else [])
def test_every_key_of_real_file_is_reported(name: str) -> None:
    findings = convert(tomllib.loads((SHARED / name).read_text())).findings
    assert all(finding.text for finding in findings)
    assert [finding for finding in findings if finding.verdict == "error"] == []


ODD_VALUES: list[Any] = [
    -1,
    0,
    3,
    10**30,
    -0.5,
    1e300,
    True,
    False,
    "",
    "x",
    "ä/b",
    [],
    [1],
    ["a", 2],
    [{}],
    [[]],
    {},
    {"a": 1},
]


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        (LANGUAGE_KEYS, SFT),
        (LANGUAGE_KEYS, DPO),
        (LANGUAGE_KEYS, GRPO),
        (WORLD_KEYS, WORLD),
        (PREDICT_KEYS, "[model.rl]\na = 1"),
        (REASONER, '[job]\ntask = "vlm"'),
        (GENERATOR, '[job]\ntask = "vfm"'),
    ],
    ids=["sft", "dpo", "grpo", "world", "predict", "reasoner", "generator"],
)
def test_no_value_causes_a_traceback(keys: dict[str, Key], text: str) -> None:
    """Check that a wrong value raises only ConfigError, from the import or from dsreason's schema."""
    for key in keys:
        taken_value, used = None, None
        for value in ODD_VALUES:
            try:
                converted = convert(document(text, **{key.replace(".", "__"): value}))
                converted.check("x")
                read_values(find_trainers()[converted.trainer].schema, converted.config, "x")
                taken_value, used = value, converted
            except ConfigError:
                pass
            except Exception as error:
                raise AssertionError(f"{key} = {value!r}") from error
        try:
            if used is not None:
                write_toml(used, "x")
        except Exception as error:
            raise AssertionError(f"{key} = {taken_value!r}, written as TOML") from error
