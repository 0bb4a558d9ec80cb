"""Output folders that are free, resumed, used by another run, or not writable."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from dsreason.cli.job import Trainer, find_trainers
from dsreason.config.load import load_config
from dsreason.config.output import (
    build_default_output_dir,
    check_output_dir,
    read_run_config,
    resolve_output_dir,
    write_run_config,
)
from dsreason.config.schema import SFTConfig
from dsreason.errors import ConfigError


def make(**sections: Any) -> SFTConfig:
    return SFTConfig.model_validate(sections)


def test_default_folder_name_has_command_and_time() -> None:
    assert re.fullmatch(r"outputs/sft-\d{8}-\d{6}", str(build_default_output_dir("sft")))


def test_new_or_empty_folder_is_accepted_untouched(tmp_path: Path) -> None:
    check_output_dir(tmp_path / "a" / "b", SFTConfig(), None)
    (tmp_path / "logs").mkdir()
    check_output_dir(tmp_path, SFTConfig(), None)
    assert [path.name for path in tmp_path.iterdir()] == ["logs"]


@pytest.mark.parametrize("held", ["config.json", "checkpoints"])
def test_folder_with_run_is_rejected_without_resume(tmp_path: Path, held: str) -> None:
    (tmp_path / held).mkdir()
    with pytest.raises(ConfigError) as caught:
        check_output_dir(tmp_path, SFTConfig(), None)
    assert str(caught.value) == (
        f"{tmp_path} already contains a run ({held}); continue the run with --resume auto, or choose another --output-dir"
    )


def test_resume_allows_changes_of_speed_or_length(tmp_path: Path) -> None:
    write_run_config(tmp_path, make(train={"max_steps": 3}), {"world_size": 2})
    changed = make(
        model={"gradient_checkpointing": False},
        data={"workers": 0},
        train={"max_steps": 6, "micro_batch_size": 4},
        checkpoint={"every": 1},
    )
    check_output_dir(tmp_path, changed, "auto")
    assert json.loads((tmp_path / "config.json").read_text())["world_size"] == 2


@pytest.mark.parametrize(
    ("now", "shown"),
    [
        ({"model": {"path": "other"}}, "model.path was 'tiny:qwen2_5_vl' and is now 'other'"),
        ({"optim": {"lr": 1e-3}}, "optim.lr was 1e-05 and is now 0.001"),
        ({"data": {"vision": {"fps": 4}}}, "data.vision.fps was None and is now 4.0"),
        ({"train": {"global_batch_size": 8}}, "train.global_batch_size was 32 and is now 8"),
        ({"data": {"sources": [{"path": "x"}]}}, "data.sources.0.adapter was None and is now 'auto'"),
    ],
)
def test_different_run_is_rejected_with_both_values(tmp_path: Path, now: dict[str, Any], shown: str) -> None:
    write_run_config(tmp_path, SFTConfig(), {})
    with pytest.raises(ConfigError) as caught:
        check_output_dir(tmp_path, make(**now), "auto")
    text = str(caught.value)
    assert text.startswith(f"{tmp_path} contains a run with different settings: ")
    assert shown in text
    assert text.endswith("restore the old values to continue the run, or choose another --output-dir and omit --resume")


def test_key_missing_in_old_config_means_default(tmp_path: Path) -> None:
    write_run_config(tmp_path, SFTConfig(), {})
    record = json.loads((tmp_path / "config.json").read_text())
    del record["config"]["lora"]
    (tmp_path / "config.json").write_text(json.dumps(record))
    check_output_dir(tmp_path, SFTConfig(), "auto")
    with pytest.raises(ConfigError, match=r"lora\.rank was 0 and is now 8"):
        check_output_dir(tmp_path, make(lora={"rank": 8}), "auto")


def test_run_of_external_checkpoint_is_compared(tmp_path: Path) -> None:
    checkpoint = tmp_path / "old" / "checkpoints" / "step_3"
    checkpoint.mkdir(parents=True)
    write_run_config(tmp_path / "old", make(optim={"lr": 0.1}), {})
    with pytest.raises(
        ConfigError, match=r"old contains a run with different settings: optim\.lr was 0\.1 and is now 1e-05"
    ):
        check_output_dir(tmp_path / "new", SFTConfig(), str(checkpoint))


@pytest.mark.parametrize("trainer", find_trainers().values(), ids=find_trainers())
@pytest.mark.parametrize("before", find_trainers().values(), ids=find_trainers())
def test_run_continues_only_with_its_command(tmp_path: Path, trainer: Trainer[Any], before: Trainer[Any]) -> None:
    write_run_config(tmp_path, load_config(before.schema, None, default_recipe=before.recipe), {})
    config = load_config(trainer.schema, None, default_recipe=trainer.recipe)
    if trainer is before:
        check_output_dir(tmp_path, config, "auto")
        return
    words = f"{tmp_path} contains a run of dsreason {before.name}, but this is dsreason {trainer.name}; choose another"
    with pytest.raises(ConfigError, match=re.escape(words)):
        check_output_dir(tmp_path, config, "auto")


def test_file_as_output_folder_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError) as caught:
        check_output_dir(tmp_path / "file" / "run", SFTConfig(), None)
    assert str(caught.value) == (
        f"{tmp_path}/file/run: {tmp_path}/file is a file, not a folder; choose another --output-dir"
    )


def test_unwritable_folder_is_rejected() -> None:
    # /proc refuses new files from everyone, including root.
    with pytest.raises(ConfigError, match=r"^/proc/run: /proc is not writable \(.+\); choose another --output-dir"):
        check_output_dir(Path("/proc/run"), SFTConfig(), None)


@pytest.mark.parametrize(
    ("text", "cause"), [("{}", 'it has no "config" object'), ("{", "Expecting property name"), ("\xff", "can't decode")]
)
def test_foreign_config_json_is_rejected_with_cause(tmp_path: Path, text: str, cause: str) -> None:
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(ConfigError, match=rf"config\.json is not a valid run configuration \(.*{cause}"):
        read_run_config(tmp_path)


def test_resume_finds_the_folder_of_its_checkpoint(tmp_path: Path) -> None:
    checkpoint = tmp_path / "run" / "checkpoints" / "step_3"
    checkpoint.mkdir(parents=True)
    assert resolve_output_dir(str(checkpoint), None) == tmp_path / "run"
    assert resolve_output_dir(str(checkpoint), tmp_path / "new") == tmp_path / "new"
    assert resolve_output_dir("auto", tmp_path) == tmp_path
    assert resolve_output_dir(None, None) is None


def test_resume_without_checkpoint_folder_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="--resume auto needs the folder of the run; specify the folder with --output-dir"
    ):
        resolve_output_dir("auto", None)
    with pytest.raises(ConfigError, match="--resume .*/nothing: the folder does not exist; pass a checkpoint"):
        resolve_output_dir(str(tmp_path / "nothing"), None)
