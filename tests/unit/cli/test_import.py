"""`dsreason import`, and training commands that get a cosmos-rl file as their configuration."""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from dsreason.cli import job, main
from dsreason.cli.job import find_trainers
from dsreason.config.load import load_config
from dsreason.config.schema import SFTConfig
from dsreason.job import launch
from tests.unit.tools.cosmos_rl.test_convert import GRPO, SFT
from tests.unit.tools.cosmos_rl.test_framework import REASONER_FILE
from tests.unit.tools.cosmos_rl.test_keys import SHARED, needs_configs


@pytest.fixture(autouse=True)
def on_a_cpu_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", launch.ERROR_DIR):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(launch, "count_gpus", lambda: 0)
    Path("cosmos.toml").write_text(SFT)
    Path("rows.json").write_text("[]")


def call(*arguments: str, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", ["dsreason", *arguments])
    with pytest.raises(SystemExit) as caught:
        main.main()
    return int(caught.value.code or 0)


def test_imported_file_is_readable_by_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("import", "cosmos.toml", "-o", "run.toml", monkeypatch=monkeypatch) == 0
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "written to run.toml, for 1 GPU. Next: dsreason sft --config run.toml --dry-run" in printed.err
    config = load_config(SFTConfig, Path("run.toml"), default_recipe="builtin_sft.toml")
    assert (config.data.adapter, config.train.global_batch_size, config.optim.lr) == ("llava", 8, 1e-6)


def test_cosmos_framework_file_is_used_unchanged(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("theirs.toml").write_text(REASONER_FILE)
    assert call("import", "theirs.toml", "-o", "run.toml", monkeypatch=monkeypatch) == 0
    printed = capsys.readouterr().err
    assert "cosmos-framework key" in printed
    assert "written to run.toml, for 4 GPUs. Next: dsreason sft --config run.toml --dry-run" in printed
    assert Path("run.toml").read_text().startswith("# Imported from the cosmos-framework file theirs.toml, for 4 GPUs.")
    result = find_trainers()["sft"]
    direct = job.load_job(job.TrainingCommand(result, Path("theirs.toml")))
    assert load_config(SFTConfig, Path("run.toml"), default_recipe="x") == direct
    assert call("grpo", "--config", "theirs.toml", "--dry-run", monkeypatch=monkeypatch) == 2
    assert "is a cosmos-framework configuration for `dsreason sft`" in capsys.readouterr().err


def test_import_prints_config_without_output_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("import", "cosmos.toml", monkeypatch=monkeypatch) == 0
    printed = capsys.readouterr()
    assert tomllib.loads(printed.out)["data"]["path"] == "rows.json"
    assert "mapped" in printed.err
    assert "What they mean" in printed.err


@pytest.mark.parametrize(
    ("content", "arguments", "text"),
    [
        (
            SFT + "[train.fp8]\nenable_fp8 = true",
            [],
            "cosmos.toml: train.fp8.enable_fp8: 8-bit training is not supported",
        ),
        ("[model]\npath = 'x'", [], "cosmos.toml: this is not a configuration for cosmos-rl or cosmos-framework"),
        ("datasets = []\n[evaluation]\nfps = 4", [], "dsreason eval --config cosmos.toml"),
        (SFT, ["--accept", "train.x"], "--accept train.x: the file has no such key"),
        (SFT, ["-o", "rows.json"], "rows.json: already exists"),
        (SFT, ["-o", "no/such/run.toml"], "no/such/run.toml: cannot be written"),
        ("[policy", [], "not valid TOML"),
        (SFT + "[train]\nepoch = 0", [], "train.epochs: must be at least 1; got 0"),
    ],
)
def test_import_error_is_reported_once_without_files(
    content: str, arguments: list[str], text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("cosmos.toml").write_text(content)
    before = sorted(path.name for path in Path().iterdir())
    assert call("import", "cosmos.toml", *(arguments or ["-o", "run.toml"]), monkeypatch=monkeypatch) == 2
    printed = capsys.readouterr().err
    assert printed.count(text) == 1
    assert "Traceback" not in printed
    assert sorted(path.name for path in Path().iterdir()) == before


def test_control_characters_of_file_are_not_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("cosmos.toml").write_text(SFT + '[odd]\n"a\\u001b[31m" = 1')
    assert call("import", "cosmos.toml", monkeypatch=monkeypatch) == 0
    assert "\x1b[31m" not in capsys.readouterr().err


@needs_configs
@pytest.mark.parametrize("name", sorted(path.name for path in SHARED.glob("*.toml")) if SHARED.is_dir() else [])
def test_written_config_equals_config_of_direct_training(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Compare the configuration from the imported file with that of training on the original file."""
    assert call("import", str(SHARED / name), "-o", "run.toml", monkeypatch=monkeypatch) == 0
    first = tomllib.loads((SHARED / name).read_text())
    command = "world" if "is_diffusers" in first.get("policy", {}) or "model_parallel" in first else None
    command = command or first["train"]["train_policy"]["type"]
    result = find_trainers()[command]
    written = load_config(result.schema, Path("run.toml"), default_recipe="x")
    direct = job.load_job(job.TrainingCommand(result, SHARED / name))
    assert written == direct
    assert "What they mean" in capsys.readouterr().err


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    recorded: list[Any] = []
    monkeypatch.setattr(job, "check_job", lambda trainer, config, resume: recorded.append(config))
    return recorded


def test_training_command_accepts_cosmos_rl_file(
    checked: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["sft", "--config", "cosmos.toml", "--set", "train.global_batch_size=4", "--dry-run"]
    assert call(*arguments, monkeypatch=monkeypatch) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["data"]["adapter"] == "llava"
    assert checked[0].train.global_batch_size == 4
    assert "What they mean" in printed.err


def test_config_for_another_command_is_rejected(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("cosmos.toml").write_text(GRPO)
    assert call("sft", "--config", "cosmos.toml", monkeypatch=monkeypatch) == 2
    assert "is a cosmos-rl configuration for `dsreason grpo`, but this is `dsreason sft`" in capsys.readouterr().err
