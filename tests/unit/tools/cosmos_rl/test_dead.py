"""Keys that cosmos-rl does not read: misspelt keys, and dead keys in its examples and guides."""

from __future__ import annotations

import tomllib

import pytest

from dsreason.tools.cosmos_rl.convert import convert
from tests.unit.tools.cosmos_rl.test_convert import GRPO, SFT

GUIDE = """
[train]
epoch = 1
output_dir = "./outputs/rl"
[rollout.parallelism]
tp_size = 2
[policy]
model_name_or_path = "nvidia/Cosmos-Reason1-7B"
[policy.parallelism]
dp_shard_size = 8
[train.train_policy]
type = "grpo"
dataset.name = "nvidia/Cosmos-Reason1-RL-Dataset"
rollout_batch_size = 32
[grpo]
num_samples_per_prompt = 4
kl_penalty = 0.01
"""
"""The configuration in the guide on post-training Cosmos-Reason1."""


def told(text: str) -> dict[str, str]:
    return {
        finding.key: finding.text for finding in convert(tomllib.loads(text)).findings if finding.verdict == "not read"
    }


def test_unknown_guide_keys_suggest_intended_keys() -> None:
    intended = {
        "train.train_policy.rollout_batch_size": ("rollout.batch_size", 1),
        "grpo.num_samples_per_prompt": ("rollout.n_generation", 16),
        "grpo.kl_penalty": ("train.train_policy.kl_beta", 0.0),
    }
    assert told(GUIDE) == {
        key: f"cosmos-rl does not read it; {name} was probably meant, whose value is {value}"
        for key, (name, value) in intended.items()
    }


@pytest.mark.parametrize(
    ("text", "key", "meant"),
    [
        (
            "[train]\nenable_validation = true",
            "train.enable_validation",
            "validation.enable was probably meant, whose value is False",
        ),
        ("[train]\nvalidation_step = 30", "train.validation_step", "validation.freq was probably meant"),
        ("[train]\noptm_weight_decays = 0.1", "train.optm_weight_decays", "train.optm_weight_decay was probably meant"),
        ("[train]\nepochs = 3", "train.epochs", "train.epoch was probably meant, whose value is 1"),
        ("[train]\nsave_freq = 3", "train.save_freq", "train.ckpt.save_freq was probably meant"),
        ("[train.ckpt]\nmax_keeps = 3", "train.ckpt.max_keeps", "train.ckpt.max_keep was probably meant"),
        ("[policy]\nlr = 3", "policy.lr", "train.optm_lr was probably meant"),
        ("[policy]\nmodel_name = 'x'", "policy.model_name", "policy.model_name_or_path was probably meant"),
        (
            "[policy.parallelism]\ncp_rotate_method = 'allgather'",
            "policy.parallelism.cp_rotate_method",
            "no longer has",
        ),
        ("[nothing]\nlike_this = 3", "nothing.like_this", "has no similar key"),
        ("[custom]\nmine = 3", "custom.mine", "passes [custom] to your script"),
    ],
)
def test_unread_key_is_reported_with_suggestion(text: str, key: str, meant: str) -> None:
    assert meant in told(text + "\n[train.train_policy]\ntype = 'sft'")[key]


def test_unread_key_does_not_change_result() -> None:
    with_it, without = convert(tomllib.loads(GUIDE)), GUIDE[: GUIDE.index("[grpo]")]
    assert with_it.config == convert(tomllib.loads(without)).config
    assert with_it.config["grpo"]["num_generations"] == 16


def test_grpo_keys_in_sft_file_are_reported() -> None:
    result = {
        finding.key: finding
        for finding in convert(tomllib.loads(SFT + "kl_beta = 0.1\n[rollout]\nbatch_size = 2")).findings
    }
    assert result["train.train_policy.kl_beta"].text == "cosmos-rl reads it only for grpo"
    assert told(GRPO) == {}
