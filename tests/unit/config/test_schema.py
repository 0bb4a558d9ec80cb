"""Contradictory settings are refused with their values; similar valid settings are accepted."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from dsreason.config.schema import SFTConfig
from dsreason.config.schema_grpo import GRPOConfig

REWARD = {"reward": {"functions": {"format": 1.0}}}


@pytest.mark.parametrize(
    ("section", "refused", "accepted", "message"),
    [
        ("data", {"vision": {"video_start": 5, "video_end": 4}}, {"vision": {"video_start": 3, "video_end": 4}}, "(5"),
        ("data", {"vision": {"min_frames": 5, "max_frames": 4}}, {"vision": {"min_frames": 4, "max_frames": 4}}, "(5"),
        ("data", {"vision": {"min_pixels": 5, "max_pixels": 4}}, {"vision": {"min_pixels": 4, "max_pixels": 4}}, "(5"),
        ("data", {"vision": {"fps": 2, "nframes": 4}}, {"vision": {"fps": 2}}, "are mutually exclusive"),
        ("data", {"validation": 1.5}, {"validation": 2.0}, "should be less than 1"),
        ("data", {"validation": -1}, {"validation": 0}, "should be greater than or equal to 0"),
        ("data", {"validation": True}, {"validation": 1}, "rows, such as 0.1; got True"),
        ("data", {"sources": [{"path": "a"}], "limit": 3}, {"sources": [{"path": "a", "limit": 3}]}, "limit cannot be"),
        ("optim", {"warmup": 1.5}, {"warmup": 2.0}, "should be less than 1"),
        (
            "train",
            {"micro_batch_size": 2, "max_tokens_per_micro_batch": 9},
            {"micro_batch_size": 2},
            "are mutually exclusive",
        ),
        ("monitor", {"profile": [2, 3, 2]}, {"profile": [2, 3]}, "step 2 is listed twice"),
        ("monitor", {"profile": [0]}, {"profile": [1]}, "should be greater than or equal to 1"),
        ("checkpoint", {"keep": 0}, {"keep": -1}, "0 would delete"),
        (
            "checkpoint",
            {"upload": "s3://bucket/run", "export": "none", "upload_include": ["export"]},
            {"upload": "s3://bucket/run", "export": "none", "upload_include": ["checkpoint"]},
            "selects nothing to upload",
        ),
        ("checkpoint", {"best_metric": "val/reward/mean"}, {"best_metric": "val/accuracy"}, "measured only by grpo"),
    ],
)
def test_impossible_sft_settings_are_rejected(section: str, refused: Any, accepted: Any, message: str) -> None:
    SFTConfig.model_validate({section: accepted})
    with pytest.raises(ValidationError) as caught:
        SFTConfig.model_validate({section: refused})
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("refused", "accepted", "message"),
    [
        (
            {"grpo": {"optimizer_steps_per_rollout": 4}, "train": {"max_steps": 6}},
            {"grpo": {"optimizer_steps_per_rollout": 4}, "train": {"max_steps": 8}},
            "train.max_steps (6) must be a multiple",
        ),
        (
            {"grpo": {"prompts_per_step": 6, "optimizer_steps_per_rollout": 4}},
            {"grpo": {"prompts_per_step": 8, "optimizer_steps_per_rollout": 4}},
            "prompts_per_step (6) must be a multiple",
        ),
        ({"rollout": {"top_p": 0.9}}, {"rollout": {"top_p": 0.9}, "grpo": {"correction": "none"}}, "top_p (0.9)"),
        ({"rollout": {"top_k": 5}}, {"rollout": {"top_k": 5}, "grpo": {"correction": "none"}}, "top_k (5)"),
        (
            {"grpo": {"correction_low": 2.0, "correction_high": 1.0}},
            {"grpo": {"correction_low": 1.0, "correction_high": 1.0}},
            "correction_low (2.0) is greater",
        ),
        ({"grpo": {"correction": "none", "correction_high": 2.0}}, {"grpo": {"correction_high": 2.0}}, "no effect"),
        (
            {"grpo": {"kl_coef": 0.0, "kl_clamp": 10.0}},
            {"grpo": {"kl_clamp": 10.0}},
            "kl_clamp cannot be set if kl_coef is 0",
        ),
        ({"grpo": {"kl_estimator": "k2", "kl_clamp": 10.0}}, {"grpo": {"kl_estimator": "k2"}}, "only to k3"),
        ({"grpo": {"preset": "gspo", "dual_clip": 3.0}}, {"grpo": {"preset": "dapo", "dual_clip": 3.0}}, "dual_clip"),
        (
            {"grpo": {"dynamic_sampling": False, "max_refills": 2}},
            {"grpo": {"dynamic_sampling": True, "max_refills": 2}},
            "max_refills cannot be set if dynamic_sampling is false",
        ),
        (
            {"rollout": {"mismatch_warn": 0.6, "mismatch_stop": 0.5}},
            {"rollout": {"mismatch_warn": 0.5, "mismatch_stop": 0.5}},
            "mismatch_warn (0.6) is greater",
        ),
        (
            {"rollout": {"engine": "transformers", "enforce_eager": True}},
            {"rollout": {"engine": "vllm", "enforce_eager": True}},
            "can be set only for vLLM",
        ),
        (
            {"checkpoint": {"best_metric": "val/reward/mean"}, "validation": {"generate": False}},
            {"checkpoint": {"best_metric": "val/reward/mean"}},
            "requires generated answers",
        ),
    ],
)
def test_impossible_grpo_settings_are_rejected(refused: Any, accepted: Any, message: str) -> None:
    GRPOConfig.model_validate(REWARD | accepted)
    with pytest.raises(ValidationError) as caught:
        GRPOConfig.model_validate(REWARD | refused)
    assert message in str(caught.value)


def test_samples_per_step_divide_rollout_completions() -> None:
    grpo = {"prompts_per_step": 6, "num_generations": 4, "optimizer_steps_per_rollout": 3}
    assert GRPOConfig.model_validate(REWARD | {"grpo": grpo}).samples_per_step == 8


@pytest.mark.parametrize(
    ("rollout", "expected"),
    [({}, True), ({"top_p": 0.99}, False), ({"top_k": 50}, False), ({"temperature": 0.5}, True)],
)
def test_truncated_sampling_is_detected(rollout: Any, expected: bool) -> None:
    config = GRPOConfig.model_validate(REWARD | {"rollout": rollout, "grpo": {"correction": "none"}})
    assert config.rollout.samples_all_tokens is expected
