"""`dsreason plan`: its output, errors and exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner, Result

from dsreason.cli.plan import plan
from dsreason.errors import ConfigError
from tests.unit.tools.cosmos_rl.test_convert import SFT
from tests.unit.tools.planning.test_parameters import CONFIG


def call(*arguments: object) -> Result:
    app = typer.Typer()
    app.command()(plan)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    file = tmp_path / "run.toml"
    file.write_text(f'[model]\npath = "{tmp_path}"\n[train]\nmax_tokens_per_micro_batch = 8192\n')
    return file


def test_fitting_plan_is_shown_and_exits_0(config: Path) -> None:
    ended = call("--config", config, "--gpus", 2)
    assert ended.exit_code == 0
    first, source, parameters, *_ = ended.stdout.splitlines()
    assert first.startswith("sft of ") and first.endswith("on 2 GPUs with 80 GB (78.8 GiB usable), zero3.json")
    assert source == f"architecture: {config.parent}/config.json"
    assert parameters.startswith("parameters: 107,072; 107,072 trained")
    for phase in ("forward and backward", "optimizer step", "memory of the host", "disk", "fits: "):
        assert phase in ended.stdout


def test_oversized_plan_exits_1_with_advice(config: Path) -> None:
    ended = call("--config", config, "--gpus", 1, "--gpu-memory", 1)
    assert ended.exit_code == 1
    assert "does not fit:" in ended.stdout
    assert "but a GPU has only" in ended.stdout


def test_json_has_bytes_of_every_phase(config: Path) -> None:
    ended = call("--config", config, "--gpus", 1, "--json")
    document = json.loads(ended.stdout)
    assert document["fits"] is True
    assert document["parameters"]["all"] == 107_072
    for phase in [*document["phases"], document["host_memory"], document["disk"]]:
        assert phase["bytes"] == sum(item["bytes"] for item in phase["items"])


def test_time_is_reported_as_text_and_json(config: Path) -> None:
    arguments = ("--config", config, "--gpus", 2, "--card", "H200", "--rows", 640, "--tokens-per-sample", 100)
    text = call(*arguments).stdout
    assert "forward and backward" in text and "tokens/s on 2 H200" in text and "GPU hours" in text
    time = json.loads(call(*arguments, "--json").stdout)["time"]
    assert time["step_seconds"] == pytest.approx(sum(phase["seconds"] for phase in time["phases"]))
    assert time["gpu_hours"] == pytest.approx(2 * time["steps"] * time["step_seconds"] / 3600)


def test_unknown_card_is_rejected_with_known_ones(config: Path) -> None:
    with pytest.raises(ConfigError, match="--card must be one of h200, h100, .*; got 'h99'"):
        plan(config=str(config), gpus=1, card="h99")


def test_options_override_values_and_deepspeed_json(config: Path) -> None:
    changes = ["--set", "train.max_tokens_per_micro_batch=4096", "--ds-config", "zero3_offload.json"]
    usual, changed = call("--config", config, "--gpus", 2), call("--config", config, "--gpus", 2, *changes)
    assert "8,192 tokens" in usual.stdout
    assert "4,096 tokens" in changed.stdout
    assert "zero3_offload.json" in changed.stdout.splitlines()[0]


def raised(*arguments: object) -> str:
    exception = call(*arguments).exception
    assert isinstance(exception, ConfigError) and exception.exit_code == 2
    return str(exception)


def test_missing_gpu_count_is_requested(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "--gpus 4" in raised("--config", config)


def test_world_model_configuration_is_rejected(tmp_path: Path) -> None:
    file = tmp_path / "world.toml"
    file.write_text('[world]\nalgorithm = "sft"\n')
    assert "only sft, grpo and dpo can be planned" in raised("--config", file, "--gpus", 1)


def test_unsupported_command_is_reported_with_the_file(config: Path) -> None:
    text = raised("--config", config, "--gpus", 1, "--for", "world")
    assert text.startswith(
        f"--for world: {config} is read as a configuration for `dsreason world`, but only sft, grpo and dpo can be planned"
    )


@pytest.mark.parametrize("memory", ["inf", "1e308", "nan", "0.5"])
def test_impossible_gpu_memory_is_rejected(config: Path, memory: str) -> None:
    text = raised("--config", config, "--gpus", 1, "--gpu-memory", memory)
    assert text.startswith("--gpu-memory (") and text.endswith("must be from 1 to 1000000 GB")


@pytest.mark.parametrize(
    "settings",
    [
        ("model.max_length=9000000000000000",),
        ("train.micro_batch_size=100000000000", "train.packing=false"),
        ("validation.micro_batch_size=100000000000", "validation.generate=true", "data.validation=0.1"),
    ],
)
def test_oversized_forward_is_rejected(config: Path, settings: tuple[str, ...]) -> None:
    config.write_text(f'[model]\npath = "{config.parent}"\n')
    text = raised("--config", config, "--gpus", 1, *(part for setting in settings for part in ("--set", setting)))
    assert "tokens or patches, but a plan supports at most 1e+09; lower model.max_length" in text


@pytest.mark.parametrize(
    ("zero", "error"),
    [
        ('"reduce_bucket_size": "5e8"', 'zero_optimization.reduce_bucket_size ("5e8") is rejected by DeepSpeed'),
        ('"reduce_bucket_size": NaN', "zero_optimization.reduce_bucket_size (NaN) is rejected by DeepSpeed"),
        ('"reduce_bucket_size": Infinity', "zero_optimization.reduce_bucket_size (Infinity) is rejected by DeepSpeed"),
        ('"reduce_bucket_size": [1]', "zero_optimization.reduce_bucket_size ([1]) is rejected by DeepSpeed"),
        ('"stagee": 3', "did you mean stage?"),
        (
            '"offload_param": {"device": "floppy"}',
            'zero_optimization.offload_param.device ("floppy") is rejected by DeepSpeed',
        ),
    ],
)
def test_setting_rejected_by_deepspeed_is_named(config: Path, zero: str, error: str) -> None:
    file = config.parent / "ds.json"
    file.write_text(f'{{"zero_optimization": {{"stage": 3, {zero}}}}}')
    text = raised("--config", config, "--gpus", 1, "--ds-config", file)
    assert text.startswith(f"{file}: ") and error in text


def test_indivisible_gpu_count_is_rejected(config: Path) -> None:
    text = raised("--config", config, "--gpus", 3, "--set", "train.sequence_parallel_size=2")
    assert "does not divide the number of ranks (3)" in text


def test_cosmos_rl_file_sets_gpu_count(tmp_path: Path) -> None:
    file = tmp_path / "cosmos.toml"
    file.write_text(SFT.replace("Qwen/Qwen2.5-VL-7B-Instruct", "tiny:qwen2_5_vl").replace("tp_size = 1", "tp_size = 2"))
    ended = call("--config", file)
    assert ended.exit_code == 0
    assert ended.stdout.startswith("sft of tiny:qwen2_5_vl on 2 GPUs")
