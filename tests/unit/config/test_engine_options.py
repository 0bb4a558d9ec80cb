"""`engine_options` accept vLLM's own options; for an option that dsreason has as a key, the error names that key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dsreason.config import engine_options
from dsreason.config.keys import iter_keys, join_path
from dsreason.config.load import dump_config, load_config
from dsreason.config.schema_eval import EvalConfig
from dsreason.config.schema_grpo import GRPOConfig
from dsreason.errors import ConfigError

EVAL = 'datasets = ["robovqa"]\nmodel.path = "m"\n'
GRPO = "[reward.functions]\nexact_match = 1.0\n"


def load(schema: type[Any], text: str, *overrides: str) -> Any:
    file = Path("run.toml")
    file.write_text(text)
    return load_config(schema, file, overrides, default_recipe="builtin_grpo.toml")


def error(schema: type[Any], text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(schema, text, *overrides)
    return str(caught.value)


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_vllm_options_are_kept_unchanged() -> None:
    options = {"max_num_seqs": 8, "compilation_config": {"cudagraph_capture_sizes": [1, 2]}}
    set_one, set_two = "max_num_seqs=8", "compilation_config={cudagraph_capture_sizes = [1, 2]}"
    grpo = load(GRPOConfig, GRPO, f"rollout.engine_options.{set_one}", f"rollout.engine_options.{set_two}")
    evaluation = load(EvalConfig, EVAL, f"evaluation.engine_options.{set_one}", f"evaluation.engine_options.{set_two}")
    assert grpo.rollout.engine_options == evaluation.evaluation.engine_options == options
    assert load(GRPOConfig, GRPO, "rollout.enforce_eager=true").rollout.enforce_eager
    assert dump_config(grpo)["rollout"]["engine_options"] == options


@pytest.mark.parametrize(("option", "ours"), engine_options.ROLLOUT.items())
def test_rollout_option_names_its_dsreason_key(option: str, ours: str) -> None:
    text = error(GRPOConfig, GRPO, f"rollout.engine_options.{option}=3")
    assert text.endswith(f"rollout.engine_options: {option} (3) cannot be set here; set {ours} instead")
    assert ours in {join_path(key) for key in iter_keys(GRPOConfig)}


@pytest.mark.parametrize(("option", "ours"), engine_options.EVALUATION.items())
def test_evaluation_option_names_its_dsreason_key(option: str, ours: str) -> None:
    text = error(EvalConfig, EVAL, f"evaluation.engine_options.{option}=3")
    assert text.endswith(f"evaluation.engine_options: {option} (3) cannot be set here; set {ours} instead")
    assert ours in {join_path(key) for key in iter_keys(EvalConfig)}


@pytest.mark.parametrize("option", sorted(engine_options.FIXED))
def test_fixed_engine_option_is_rejected(option: str) -> None:
    text = error(GRPOConfig, GRPO, f'rollout.engine_options.{option}="x"', "rollout.engine_options.seed=1")
    assert "seed (1) cannot be set here; set train.seed instead" in text
    assert f"{option} ('x') cannot be changed, because only one value is supported; remove it" in text


def test_options_unused_by_engine_are_rejected() -> None:
    texts = [
        error(GRPOConfig, GRPO, "rollout.engine=transformers", "rollout.engine_options.max_num_seqs=8"),
        error(GRPOConfig, GRPO, "rollout.engine=transformers", "rollout.enforce_eager=true"),
        error(EvalConfig, EVAL, "model.engine=transformers", "evaluation.engine_options.max_num_seqs=8"),
        error(
            EvalConfig, EVAL, "model.path=null", "server.url=http://a/v1", "evaluation.engine_options.max_num_seqs=8"
        ),
    ]
    assert (
        "engine_options ({'max_num_seqs': 8}) can be set only for vLLM, but engine is \"transformers\"; remove it"
        in texts[0]
    )
    assert "enforce_eager (True) can be set only for vLLM" in texts[1]
    assert (
        "evaluation.engine_options ({'max_num_seqs': 8}) and model.engine (transformers) are mutually exclusive"
        in texts[2]
    )
    assert (
        "evaluation.engine_options ({'max_num_seqs': 8}) and server.url (http://a/v1) are mutually exclusive"
        in texts[3]
    )
