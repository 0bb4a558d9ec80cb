"""Arguments with which vLLM is started, and the options that users may set."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from dsreason.config.schema_grpo import GRPOConfig
from dsreason.errors import ConfigError
from dsreason.job.ranks import World
from dsreason.models.load import read_model_config
from dsreason.rollout.vllm_arguments import (
    VLLMSettings,
    build_engine_arguments,
    check_delta_nets,
    check_engine_options,
    read_known_arguments,
)
from dsreason.rollout.vllm_engine import VLLMEngine
from dsreason.train.grpo.build import count_completions_per_engine


def world(device: str = "cuda", rank: int = 5, size: int = 8) -> World:
    return World(rank=rank, size=size, local_rank=rank, device=torch.device(device))


def arguments(device: str = "cuda", *, sleep_mode: bool = True, **changes: Any) -> dict[str, Any]:
    value = {"max_model_len": 16384, "tensor_parallel_size": 2, "gpu_memory_utilization": 0.5, "max_num_seqs": 64}
    settings, dtype = VLLMSettings(**value | changes), torch.bfloat16
    return build_engine_arguments(world(device), settings, dtype=dtype, sleep_mode=sleep_mode, trust_remote_code=False)


def test_delta_nets_require_bfloat16_on_cpu(tiny_qwen3_5: Path, tiny_qwen3_vl: Path) -> None:
    config, cpu = read_model_config(tiny_qwen3_5), torch.device("cpu")
    with pytest.raises(
        ConfigError, match=r"qwen3_5 on a CPU only in bfloat16, but the weights are float32; set train\."
    ):
        check_delta_nets(config, torch.float32, cpu)
    check_delta_nets(config, torch.bfloat16, cpu)
    check_delta_nets(config, torch.float32, torch.device("cuda"))
    check_delta_nets(read_model_config(tiny_qwen3_vl), torch.float32, cpu)


def test_gpu_engine_arguments_follow_rollout_settings() -> None:
    result = arguments()
    assert (result["max_num_seqs"], result["max_num_batched_tokens"]) == (64, 8192)
    assert "enable_chunked_prefill" not in result
    assert (result["enable_sleep_mode"], result["gpu_memory_utilization"]) == (True, 0.5)
    assert (result["dtype"], result["seed"], result["enforce_eager"]) == ("bfloat16", 2, False)
    assert arguments(max_num_seqs=5000)["max_num_seqs"] == 256
    assert arguments(enforce_eager=True)["enforce_eager"]
    assert not arguments(sleep_mode=False)["enable_sleep_mode"]


def test_cpu_processes_prompt_in_one_pass() -> None:
    result = arguments("cpu")
    assert (result["max_num_batched_tokens"], result["enable_chunked_prefill"]) == (16384, False)
    assert result["enforce_eager"]
    assert not {"enable_sleep_mode", "gpu_memory_utilization"} & result.keys()


@pytest.mark.parametrize(("max_model_len", "gib"), [(768, 1), (16384, 1), (32768, 2), (131072, 8)])
def test_media_cache_holds_two_longest_prompts(max_model_len: int, gib: int) -> None:
    assert arguments(max_model_len=max_model_len)["mm_processor_cache_gb"] == gib


@pytest.mark.parametrize(
    ("prompts", "generations", "ranks", "parallel", "expected"),
    [(16, 8, 8, 1, 64), (16, 16, 2, 1, 128), (16, 16, 2, 2, 256), (3, 64, 2, 1, 128), (1, 2, 1, 1, 64)],
)
def test_engine_has_room_for_rollout_share(
    prompts: int, generations: int, ranks: int, parallel: int, expected: int
) -> None:
    config = GRPOConfig.model_validate(
        {
            "grpo": {"prompts_per_step": prompts, "num_generations": generations},
            "rollout": {"tensor_parallel_size": parallel},
            "reward": {"functions": {"exact_match": 1}},
        }
    )
    assert count_completions_per_engine(config, world(size=ranks, rank=0)) == expected


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"max_num_seq": 8},
            "rollout.engine_options.max_num_seq is not an argument of the installed vLLM; did you mean max_num_seqs?",
        ),
        (
            {"qqqqqqqq": 8, "_api_process_rank": 0},
            "rollout.engine_options.qqqqqqqq is not an argument of the installed vLLM; remove it",
        ),
    ],
)
def test_error_names_unknown_vllm_options(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_engine_options(options, "rollout.engine_options")
    assert text in str(error.value)
    assert len(str(error.value).splitlines()) == len(options)


def test_known_options_and_defaults_are_vllm_arguments() -> None:
    check_engine_options({"max_num_seqs": 8, "attention_backend": "FLASH_ATTN"}, "rollout.engine_options")
    assert (arguments() | arguments("cpu")).keys() <= read_known_arguments()


def test_engine_options_require_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    check_engine_options({}, "rollout.engine_options")
    with pytest.raises(ConfigError, match="need vLLM, which is not installed"):
        check_engine_options({"max_num_seqs": 8}, "rollout.engine_options")


@pytest.mark.parametrize("tag", ["weights", "kv_cache"])
def test_torch_cache_is_emptied_before_vllm_wakes(tag: str) -> None:
    calls = mock.Mock()
    calls.is_sleeping.return_value = tag == "weights"
    engine = object.__new__(VLLMEngine)
    engine.world, engine.state = world("cuda"), calls.state
    engine.llm = SimpleNamespace(wake_up=calls.wake_up, llm_engine=SimpleNamespace(is_sleeping=calls.is_sleeping))
    with (
        mock.patch("torch.cuda.empty_cache", calls.empty_cache),
        mock.patch("dsreason.rollout.vllm_engine.preserve_process_state"),
    ):
        engine._wake(tag)
    assert calls.mock_calls == [
        mock.call.empty_cache(),
        mock.call.wake_up(tags=[tag]),
        mock.call.state.write_back(tag),
        mock.call.is_sleeping(),
    ]
