"""What stops a run before it begins."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dsreason.config.schema import SFTConfig
from dsreason.config.schema_grpo import GRPOConfig
from dsreason.errors import ConfigError, DataError
from dsreason.rewards.text import REQUEST
from dsreason.train import preflight
from dsreason.train.preflight import check_grpo, check_upload

ROWS = [{"id": str(i), "question": "Which?", "options": ["left", "right"], "answer": "A"} for i in range(6)]


def config(folder: Path, model: Path, rows: list[dict[str, Any]], **sections: Any) -> GRPOConfig:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return GRPOConfig.model_validate(
        {
            "model": {"path": str(model), "max_length": 400},
            "data": {"adapter": "jsonl", "path": str(path), "system_prompt": REQUEST, **sections.get("data", {})},
            "grpo": {"prompts_per_step": 2},
            "rollout": {"max_completion_length": 200},
            "reward": {"functions": {"single_choice": 1.0, "format": 0.5}, **sections.get("reward", {})},
        }
    )


def test_rows_prompts_and_rewards_that_fit_pass(tmp_path, tiny_qwen3_vl):
    check_grpo(config(tmp_path, tiny_qwen3_vl, ROWS, data={"validation": 2}))


def test_a_long_reference_takes_no_room_from_the_prompt(tmp_path, tiny_qwen3_vl):
    rows = [*ROWS[:5], {**ROWS[5], "answer": "<think>" + "well " * 150 + "</think> <answer>B</answer>"}]
    check_grpo(config(tmp_path, tiny_qwen3_vl, rows, reward={"functions": {"single_choice_lenient": 1.0}}))


@pytest.mark.parametrize("on_bad_row", ["error", "skip"])
def test_an_answer_that_is_no_option_is_named_with_row_and_reward(tmp_path, tiny_qwen3_vl, caplog, on_bad_row):
    rows = [*ROWS[:4], {**ROWS[4], "answer": "D"}, ROWS[5]]
    settings = config(tmp_path, tiny_qwen3_vl, rows, data={"on_bad_row": on_bad_row})
    text = r"rows.jsonl, row 5: sample '4': field 'answer' is 'D', none of the options A, B (single_choice)"
    if on_bad_row == "error":
        with pytest.raises(DataError) as error:
            check_grpo(settings)
        assert text in str(error.value)
    else:
        check_grpo(settings)
        assert "training: 1 rows are left out" in caplog.text
        assert text in caplog.text


@pytest.mark.parametrize(
    ("sections", "text"),
    [
        ({"data": {"system_prompt": ""}}, "asks for no format"),
        ({"reward": {"options": {"format": {"pattern": "<box>.*</box>"}}}}, "<box>"),
        ({"reward": {"options": {"single_choice": {"strict": True}}}}, "strict"),
        ({"reward": {"functions": {"remote:a": 1.0}, "remote": {"url": "ftp://host"}}}, "http://"),
    ],
)
def test_rewards_that_cannot_work_are_named(tmp_path, tiny_qwen3_vl, sections, text):
    with pytest.raises(ConfigError, match=text):
        check_grpo(config(tmp_path, tiny_qwen3_vl, ROWS, **sections))


def test_only_a_run_that_has_a_checkpoint_goes_on_through_an_outage_and_looking_creates_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[dict[str, bool]] = []
    monkeypatch.setattr(preflight, "check_target", lambda target, **how: asked.append(how))
    settings = SFTConfig.model_validate({"checkpoint": {"upload": "hub:user/name"}})
    check_upload(settings, None)
    check_upload(settings, Path("step_4"))
    check_upload(settings, None, create=True)
    check_upload(SFTConfig(), None)
    assert [(how["create"], how["outage_passes"]) for how in asked] == [(False, False), (False, True), (True, False)]
