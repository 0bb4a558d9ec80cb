"""The engine of evaluations: it is loaded once, with the evaluated weights, and vLLM's options are checked before that."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from dsreason.config.schema_eval import EvalConfig
from dsreason.errors import ConfigError
from dsreason.evaluation import infer
from dsreason.evaluation.ask import answerers
from dsreason.evaluation.ask.answerers import build_engine, check_model
from dsreason.evaluation.ask.engine import VERSION
from dsreason.job.ranks import World
from dsreason.models.processors.loading import open_encoder
from dsreason.rollout.transformers_engine import TransformersEngine

WORLD = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"))


def config(engine: str, **options: Any) -> EvalConfig:
    return EvalConfig.model_validate(
        {
            "datasets": ["robovqa"],
            "model": {"path": "m", "engine": engine, "enforce_eager": True},
            "evaluation": {"engine_options": options},
        }
    )


@pytest.fixture
def encoder(tiny_qwen3_vl: Path) -> Any:
    return open_encoder(tiny_qwen3_vl, dtype=torch.float32, max_length=64, max_length_key="")


def test_vllm_answers_with_its_loaded_weights(tiny_qwen3_vl: Path, encoder: Any) -> None:
    """Check that no weights are sent to vLLM, and that it is not put to sleep between calls."""
    with mock.patch("dsreason.rollout.vllm_engine.VLLMEngine") as made, ExitStack() as stack:
        engine = build_engine(config("vllm", max_num_seqs=8), tiny_qwen3_vl, encoder, torch.float32, 64, WORLD, stack)
        assert engine.mock_calls == []
    assert engine.mock_calls == [mock.call.shutdown()]
    settings = made.call_args.args[3]
    assert made.call_args.kwargs["loaded_version"] == VERSION
    assert (settings.enforce_eager, settings.engine_options) == (True, {"max_num_seqs": 8})


def test_single_prompt_vllm_uses_loaded_weights(
    tiny_qwen3_vl: Path, encoder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("init_world", "shutdown"):
        monkeypatch.setattr(infer, name, lambda: WORLD)
    with mock.patch("dsreason.rollout.vllm_engine.VLLMEngine") as made:
        with infer.open_vllm_engine(tiny_qwen3_vl, torch.float32, encoder, 64):
            assert made.return_value.mock_calls == []
        assert made.return_value.mock_calls == [mock.call.shutdown()]
    assert made.call_args.kwargs["loaded_version"] == VERSION


def test_transformers_engine_loads_weights_from_folder(tiny_qwen3_vl: Path, encoder: Any) -> None:
    with ExitStack() as stack:
        engine = build_engine(config("transformers"), tiny_qwen3_vl, encoder, torch.float32, 64, WORLD, stack)
    assert isinstance(engine, TransformersEngine)
    assert (engine.awake, engine.version) == (True, VERSION)


def test_vllm_options_are_rejected_with_transformers(tiny_qwen3_vl: Path, encoder: Any) -> None:
    with ExitStack() as stack, pytest.raises(ConfigError, match=r"evaluation.engine_options \(\{'max_num_seqs': 8\}\)"):
        build_engine(config("auto", max_num_seqs=8), tiny_qwen3_vl, encoder, torch.float32, 64, WORLD, stack)


def test_unknown_option_is_rejected_before_model_lookup(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answerers, "find_run_weights", lambda path: None)
    monkeypatch.setattr(answerers, "resolve_model_folder", lambda config, own: Path("nowhere"))
    with pytest.raises(ConfigError, match=r"evaluation.engine_options.max_num_seq is .*did you mean max_num_seqs\?"):
        check_model(config("vllm", max_num_seq=8))
