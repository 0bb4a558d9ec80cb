"""Problems that stop a run before it begins."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dsreason.config.schema import OptimConfig, SFTConfig
from dsreason.config.schema_grpo import GRPOConfig
from dsreason.data.order import StepOrder, WeightedRows
from dsreason.errors import ConfigError, DataError, RewardError
from dsreason.rewards.text import REQUEST
from dsreason.train.common import preflight
from dsreason.train.common.global_batches import list_step_warnings
from dsreason.train.common.preflight import check_deepspeed, check_upload
from dsreason.train.grpo.preflight import check as check_grpo
from dsreason.train.sft.preflight import check as check_sft

ROWS = [{"id": str(i), "question": "Which?", "options": ["left", "right"], "answer": "A"} for i in range(6)]


def config(folder: Path, model: Path, rows: list[dict[str, Any]], **sections: Any) -> GRPOConfig:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return GRPOConfig.model_validate(
        {
            "model": {"path": str(model), "max_length": 400},
            "data": {"adapter": "jsonl", "path": str(path), "system_prompt": REQUEST, **sections.get("data", {})},
            "grpo": {"prompts_per_step": 2},
            "rollout": {"max_completion_length": 200, **sections.get("rollout", {})},
            "reward": {"functions": {"single_choice": 1.0, "format": 0.5}, **sections.get("reward", {})},
            "checkpoint": sections.get("checkpoint", {}),
        }
    )


def test_valid_rows_prompts_and_rewards_pass_preflight(tmp_path, tiny_qwen3_vl):
    check_grpo(config(tmp_path, tiny_qwen3_vl, ROWS, data={"validation": 2}))


@pytest.mark.parametrize(("size", "divides"), [(2, True), (4, True), (3, False), (8, False)])
def test_sequence_parallel_size_must_divide_heads(tmp_path, tiny_qwen3_vl, size, divides):
    settings = config(tmp_path, tiny_qwen3_vl, ROWS)
    train = settings.train.model_copy(update={"sequence_parallel_size": size})
    settings = settings.model_copy(update={"train": train})
    expected = rf"train\.sequence_parallel_size \({size}\) does not divide the 4 attention heads of .*; set it to a divisor of 4"
    with nullcontext() if divides else pytest.raises(ConfigError, match=expected):
        preflight.check_model(settings)


def test_long_reference_takes_no_prompt_room(tmp_path, tiny_qwen3_vl):
    rows = [*ROWS[:5], {**ROWS[5], "answer": "<think>" + "well " * 150 + "</think> <answer>B</answer>"}]
    check_grpo(config(tmp_path, tiny_qwen3_vl, rows, reward={"functions": {"single_choice_lenient": 1.0}}))


@pytest.mark.parametrize(("warmup", "told"), [(7, True), (6, True), (5, False)])
def test_grpo_warmup_of_whole_run_is_reported(tmp_path, tiny_qwen3_vl, caplog, warmup, told):
    """Use 6 rows, 2 per rollout, and 2 optimizer steps per rollout: 6 steps."""
    settings = config(tmp_path, tiny_qwen3_vl, ROWS)
    check_grpo(
        settings.model_copy(
            update={
                "optim": settings.optim.model_copy(update={"warmup": warmup}),
                "grpo": settings.grpo.model_copy(update={"optimizer_steps_per_rollout": 2}),
            }
        )
    )
    assert (f"optim.warmup ({warmup} steps) is " in caplog.text) == told


@pytest.mark.parametrize(("warmup", "told"), [(4, True), (2, False)])
def test_sft_warmup_of_whole_run_is_reported(warmup, told):
    """Use 6 rows, 2 per step: 3 steps."""
    settings = SFTConfig(optim=OptimConfig(warmup=warmup))
    notes = list_step_warnings(
        StepOrder([WeightedRows(np.arange(6))], batch_size=2, epochs=1, max_steps=None, seed=0, shuffle=False), settings
    )
    assert any("longer than the run (3 steps) and is clipped to it" in note for note in notes) == told


ASKED = [{"id": str(i), "question": f"{i}?"} for i in range(6)]
OWN = """
def short(completion, sample):
    assert sample.answer is None
    return float(len(completion) < 99)
"""


@pytest.mark.parametrize("reward", ["format", "overlong", "own"])
def test_rows_need_no_answer_without_comparing_rewards(tmp_path, tiny_qwen3_vl, reward):
    (tmp_path / "own.py").write_text(OWN)
    functions = {str(tmp_path / "own.py") if reward == "own" else reward: 1.0}
    check_grpo(config(tmp_path, tiny_qwen3_vl, ASKED, reward={"functions": functions}))


def test_own_reward_that_raises_stops_before_training(tmp_path, tiny_qwen3_vl):
    (tmp_path / "own.py").write_text("def own(completions, level, **kwargs):\n    return [1.0 for _ in level]\n")
    settings = config(tmp_path, tiny_qwen3_vl, ASKED, reward={"functions": {str(tmp_path / "own.py"): 1.0}})
    with pytest.raises(RewardError, match=r"row 1: reward .*own.py.*: the function needs level"):
        check_grpo(settings)


def test_comparing_reward_rejects_rows_without_answer(tmp_path, tiny_qwen3_vl):
    with pytest.raises(
        DataError, match="row 1: sample '0': field 'answer' is None, but the reward exact_match compares"
    ):
        check_grpo(config(tmp_path, tiny_qwen3_vl, ASKED, reward={"functions": {"exact_match": 1.0}}))


@pytest.mark.parametrize(
    ("checkpoint", "fits"), [({}, False), ({"best_metric": "val/reward/mean"}, True), ({"keep_best": False}, True)]
)
@pytest.mark.parametrize("answer", [{}, {"answer": ""}])
def test_best_loss_metric_needs_held_out_answers(tmp_path, tiny_qwen3_vl, checkpoint, fits, answer):
    settings = config(
        tmp_path,
        tiny_qwen3_vl,
        [row | answer for row in ASKED],
        data={"validation": 2},
        reward={"functions": {"format": 1.0}},
        checkpoint=checkpoint,
    )
    if fits:
        check_grpo(settings)
    else:
        with pytest.raises(ConfigError, match='best_metric = "val/reward/mean"'):
            check_grpo(settings)


def test_sft_rows_need_an_answer(tmp_path, tiny_qwen3_vl):
    settings = config(tmp_path, tiny_qwen3_vl, ASKED, reward={"functions": {"format": 1.0}})
    with pytest.raises(DataError, match="row 1: sample '0' has neither an assistant message nor an answer"):
        check_sft(SFTConfig(model=settings.model, data=settings.data, train={"global_batch_size": 2}))


@pytest.mark.parametrize("on_bad_row", ["error", "skip"])
def test_answer_outside_options_is_reported_with_row(tmp_path, tiny_qwen3_vl, caplog, on_bad_row):
    rows = [*ROWS[:4], {**ROWS[4], "answer": "D"}, ROWS[5]]
    settings = config(tmp_path, tiny_qwen3_vl, rows, data={"on_bad_row": on_bad_row})
    text = "rows.jsonl, row 5: the answer must be one of the options A, B, or the text of an option; got 'D'"
    if on_bad_row == "error":
        with pytest.raises(DataError) as error:
            check_grpo(settings)
        assert text in str(error.value)
    else:
        check_grpo(settings)
        assert "training: 1 rows are skipped" in caplog.text
        assert text in caplog.text


@pytest.mark.parametrize(
    ("sections", "text"),
    [
        ({"data": {"system_prompt": ""}}, "requests no format"),
        ({"reward": {"options": {"format": {"pattern": "<box>.*</box>"}}}}, "<box>"),
        ({"reward": {"options": {"single_choice": {"strict": True}}}}, "strict"),
        ({"reward": {"functions": {"remote:a": 1.0}, "remote": {"url": "ftp://host"}}}, "http://"),
    ],
)
def test_unusable_rewards_are_named_in_preflight(tmp_path, tiny_qwen3_vl, sections, text):
    with pytest.raises(ConfigError, match=text):
        check_grpo(config(tmp_path, tiny_qwen3_vl, ROWS, **sections))


def test_unknown_vllm_option_is_reported_before_model(tmp_path):
    settings = config(tmp_path, tmp_path / "no model", ROWS, rollout={"engine_options": {"max_num_seq": 8}})
    with pytest.raises(
        ConfigError, match=r"rollout.engine_options.max_num_seq is .*did you mean max_num_seqs\?"
    ) as caught:
        check_grpo(settings)
    assert caught.value.exit_code == 2


def test_only_resumed_run_tolerates_upload_outage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    requested: list[dict[str, bool]] = []
    monkeypatch.setattr(preflight, "check_target", lambda target, **how: requested.append(how))
    settings = SFTConfig.model_validate({"checkpoint": {"upload": "hub:user/name"}})
    check_upload(settings, None)
    check_upload(settings, Path("step_4"))
    check_upload(settings, None, create=True)
    check_upload(SFTConfig(), None)
    assert [(how["create"], how["tolerate_outage"]) for how in requested] == [
        (False, False),
        (False, True),
        (True, False),
    ]


def test_every_unusable_upload_target_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(target: str, **how: bool) -> None:
        if target != "s3://open/run":
            raise ConfigError(f"checkpoint.upload: {target}: refused")

    monkeypatch.setattr(preflight, "check_target", check)
    upload = ["s3://closed/run", "s3://open/run", {"to": "hub:user/name"}]
    with pytest.raises(ConfigError) as caught:
        check_upload(SFTConfig.model_validate({"checkpoint": {"upload": upload}}), None)
    assert str(caught.value).splitlines() == [
        "2 problems in the configuration",
        "  checkpoint.upload: s3://closed/run: refused",
        "  checkpoint.upload: hub:user/name: refused",
    ]


@pytest.mark.parametrize(
    ("document", "messages"),
    [
        ({"checkpoint": {"tag_validation": 3}}, ["checkpoint.tag_validation (3)"]),
        ({"checkpoint": {"tag_validation": "evil"}}, ['checkpoint.tag_validation ("evil")']),
        ({"checkpoint": {"parallel_write": 3}}, ["checkpoint.parallel_write (3)"]),
        ({"zero_optimization": {"stage": 3, "stge": 3}}, ["zero_optimization.stge (3)", "did you mean stage?"]),
        ({"zero_optimization": {"stage": 3, "qqq": 3}}, ["zero_optimization.qqq (3)", "correct or remove it"]),
        ({"compile": {"deepcompile": "x"}}, ['compile.deepcompile ("x")', "valid boolean"]),
        ({"timers": {"throughput": {"enabled": "x"}}}, ['timers.throughput.enabled ("x")']),
        ({"timers": 3}, ["timers (3)"]),
        ({"data_types": {"keep_in_fp32_modules": 3}}, ["data_types.keep_in_fp32_modules (3)"]),
        ({"vocabulary_size": 3.5, "compile": {"passes": ["z9"]}}, ['compile.passes (["z9"])', "'z1'"]),
        (
            {"zero_optimization": {"stage": 3, "reduce_bucket_size": -1, "offload_param": {"device": "x"}}},
            [
                "2 problems",
                "zero_optimization.reduce_bucket_size (-1)",
                "greater than 0",
                'zero_optimization.offload_param.device ("x")',
            ],
        ),
        (
            {"checkpoint": {"tag_validation": 3}, "compile": {"deepcompile": "x"}},
            ["2 problems", "checkpoint.tag_validation (3)", 'compile.deepcompile ("x")'],
        ),
    ],
)
def test_rejected_deepspeed_value_is_reported_with_key(tmp_path, document, messages):
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 3}} | document))
    with pytest.raises(ConfigError) as caught:
        check_deepspeed(SFTConfig(deepspeed=str(file)))
    assert caught.value.exit_code == 2
    for message in (f"{file}: ", *messages):
        assert message in str(caught.value)


@pytest.mark.parametrize("key", ["mics_shard_size", "mics_hierarchical_params_gather", "zeropp_loco_param"])
def test_removed_zero_key_is_reported_as_removed(tmp_path: Path, key: str) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 3, key: 1}}))
    with pytest.raises(ConfigError) as caught:
        check_deepspeed(SFTConfig(deepspeed=str(file)))
    assert str(caught.value).startswith(f"{file}: zero_optimization.{key} (1) is rejected")
    assert "; DeepSpeed has removed this key; remove it (zero_" in str(caught.value)


@pytest.mark.parametrize("name", ["zero2.json", "zero3.json", "zero3_offload.json"])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_deepspeed_takes_each_shipped_file(name, precision):
    check_deepspeed(SFTConfig.model_validate({"deepspeed": name, "train": {"precision": precision}}))


def test_rejection_of_whole_deepspeed_config_is_reported(tmp_path, monkeypatch):
    def refuse(settings: dict[str, Any]) -> None:
        if {"compile", "timers"} <= settings.keys():
            raise ValueError("compile and timers exclude each other")

    monkeypatch.setattr(preflight, "DeepSpeedConfig", refuse)
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 3}, "compile": {}, "timers": {}}))
    with pytest.raises(
        ConfigError, match="ds.json: DeepSpeed rejects the configuration as a whole .*exclude each other.*; correct it"
    ):
        check_deepspeed(SFTConfig(deepspeed=str(file)))


def sft_config(folder: Path, model_path: Path, **sections: Any) -> SFTConfig:
    settings = config(folder, model_path, ROWS)
    document = {"train": {"global_batch_size": 2}, "data": settings.data, **sections}
    return SFTConfig.model_validate(document | {"model": {"path": str(model_path), **sections.get("model", {})}})


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"optim": {"lr_multipliers": {"projector": 0.1}}}, "'projector' matches none of 63 parameters"),
        (
            {"optim": {"lr_multipliers": {"visual": 0.1}}, "lora": {"rank": 2}},
            "'visual' has no effect: none of the parameters that it matches .39. is trained",
        ),
        (
            {
                "optim": {"lr_multipliers": {r"model\.visual": 0.1, "merger": 1.0}},
                "model": {"freeze": [r"visual\.(?!.*merger)"]},
            },
            r"'model\\.visual' has no effect: .* also matches the narrower 'merger'; remove",
        ),
    ],
)
def test_multiplier_without_effect_stops_before_training(tmp_path, tiny_qwen3_vl, sections, message):
    with pytest.raises(ConfigError, match=message):
        check_sft(sft_config(tmp_path, tiny_qwen3_vl, **sections))


def test_dry_run_table_has_trained_modules(tmp_path, tiny_qwen3_vl):
    sections = {
        "optim": {"lr": 1e-5, "lr_multipliers": {"merger": 0.1}},
        "model": {"freeze": [r"visual\.(?!.*merger)"]},
    }
    table = preflight.describe_modules(sft_config(tmp_path, tiny_qwen3_vl, **sections))
    assert [line.split(maxsplit=3) for line in table.splitlines()[1:]] == [
        ["model.visual.patch_embed", "196,736", "0", "frozen"],
        ["model.visual.pos_embed", "8,192", "0", "frozen"],
        ["model.visual.blocks", "264,960", "0", "frozen"],
        ["model.visual.merger", "328,576", "328,576", "1e-06 (0.1 x 1e-05)"],
        ["model.visual.deepstack_merger_list", "329,344", "329,344", "1e-06 (0.1 x 1e-05)"],
        ["model.language_model", "361,216", "361,216", "1e-05"],
        ["total", "1,489,024", "1,019,136"],
    ]


def test_run_with_one_learning_rate_has_no_table(tmp_path, tiny_qwen3_vl):
    assert preflight.describe_modules(sft_config(tmp_path, tiny_qwen3_vl)) == ""
