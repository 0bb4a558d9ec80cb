"""`dsreason eval`: its options determine the questions."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dsreason.cli import eval as cli
from dsreason.cli.eval import (
    RECIPE,
    build_question_overrides,
    check_unmasked,
    evaluate_world,
    find_world,
    has_datasets,
    load,
    resolve_export,
)
from dsreason.config.load import load_config, read_values
from dsreason.config.output import write_run_config
from dsreason.config.schema_eval import EvalConfig
from dsreason.errors import ConfigError
from dsreason.job import lifeline
from dsreason.world.schema import WorldConfig, WorldRewardConfig

ROWS = '[[sources]]\npath = "rows.jsonl"\n'


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the benchmarks av, agibot (twice) and robovqa, and with a file of rows."""
    monkeypatch.chdir(tmp_path)
    for place in ("data/av", "data/agibot", "data/benchmark/agibot", "data/benchmark/robovqa"):
        Path(place).mkdir(parents=True)
        (Path(place) / f"{Path(place).name}_benchmark_qa_pairs.json").write_text("[]")
    Path("rows.jsonl").write_text("")
    return tmp_path


@pytest.mark.parametrize(
    ("document", "options", "asked", "data_dir"),
    [
        (None, ([], "data"), ["agibot", "av", "robovqa"], "data"),
        (None, (["av"], "data"), ["av"], "data"),
        (None, ([], "rows.jsonl"), ["rows"], "data"),
        (ROWS, ([], "data"), ["agibot", "av", "robovqa"], "data"),
        ('datasets = ["robovqa", "holoassist"]\n', ([], "data"), ["robovqa", "holoassist"], "data"),
        ('datasets = ["robovqa"]\n' + ROWS, ([], "data/benchmark"), ["robovqa", "rows"], "data/benchmark"),
        ('datasets = ["robovqa"]\n' + ROWS, (["av"], None), ["av"], "data"),
        ('datasets = ["robovqa"]\n' + ROWS, ([], "rows.jsonl"), ["rows"], "data"),
    ],
)
def test_command_line_selects_datasets_or_data_dir(
    folder: Path, document: str | None, options: tuple[list[str], str | None], asked: list[str], data_dir: str
) -> None:
    file = None if document is None else folder / "eval.toml"
    if file is not None:
        file.write_text(str(document))
    changes = build_question_overrides(*options, None, named=has_datasets(file))
    config = load_config(EvalConfig, file, [*changes, "model.path=m"], default_recipe=RECIPE)
    assert (list(config.names), config.data_dir) == (asked, data_dir)


SEEDS_YAML = """
datasets: [robovqa]
model: {model_name: nvidia/Cosmos-Reason1-7B, tp_size: 4}
"""


@pytest.mark.parametrize(
    ("given", "changes", "size"),
    [
        (None, [], 4),
        ("", [], 4),
        ("2", [], 2),
        ("2", ["model.tensor_parallel_size=8"], 8),
        ("2", ["model.tp_size=8"], 8),
    ],
)
def test_tp_size_overrides_file_but_not_options(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    given: str | None,
    changes: list[str],
    size: int,
) -> None:
    if given is not None:
        monkeypatch.setenv("TP_SIZE", given)
    (folder / "robovqa.yaml").write_text(SEEDS_YAML)
    assert load(folder / "robovqa.yaml", changes).model.tensor_parallel_size == size
    message = "model.tensor_parallel_size is 2, from TP_SIZE in the environment" in capsys.readouterr().err
    assert message == (size == 2)


@pytest.mark.parametrize("given", ["0", "-1", "four", "2.0"])
def test_invalid_tp_size_is_rejected(folder: Path, monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    monkeypatch.setenv("TP_SIZE", given)
    with pytest.raises(ConfigError, match=rf"TP_SIZE \('{given}' in the environment\): must be a whole number"):
        load(None, ["datasets=['robovqa']", "model.path=m"])


def test_rank_uses_tp_size_of_first_host(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result: list[int] = []

    @contextmanager
    def joined(activity: str) -> Iterator[None]:
        monkeypatch.setenv("TP_SIZE", "2")  # as the first host sets it
        yield

    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(lifeline, "join_with_lifeline", joined)
    monkeypatch.setattr(cli, "run", lambda config: result.append(config.model.tensor_parallel_size))
    cli.evaluate(model="m", dataset=["robovqa"])
    assert result == [2]


def world_run(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"config": {"world": {"algorithm": "nft"}}}))
    return folder


def test_world_model_configuration_comes_from_the_run(tmp_path: Path) -> None:
    run = world_run(tmp_path / "run")
    export = run / "export" / "final"
    checkpoint = run / "checkpoints" / "step_3"
    for folder in (export, checkpoint):
        folder.mkdir(parents=True)
    for model in (run, export, checkpoint, checkpoint.parent):
        world = find_world(None, str(model))
        assert world is not None
        assert world.values == {"world": {"algorithm": "nft"}}
        assert world.arguments == []
    assert find_world(None, str(tmp_path)) is None
    assert find_world(None, None) is None


@pytest.mark.parametrize("model", ["nvidia/Cosmos-Reason1-7B", "export/none", "hub-name", "other"])
def test_unrelated_name_inside_world_run_is_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    (world_run(tmp_path / "run") / "other").mkdir()
    monkeypatch.chdir(tmp_path / "run")
    assert find_world(None, model) is None
    Path("export/final").mkdir(parents=True)
    assert find_world(None, "export/final") is not None
    monkeypatch.chdir("export")
    assert find_world(None, "final") is not None


@pytest.mark.parametrize(
    ("document", "of_world"),
    [
        ('[model]\npath = "tiny:squares"\n[reward.functions]\nred = 1.0', True),
        ("[data]\nframes = 9", True),
        ('[model]\npath = "m"', False),
        ('[[data.sources]]\npath = "rows.jsonl"\n[train]\nmax_steps = 3', False),
        ("[data]\nframes = 9\n[evaluation]\nseed = 1", False),
    ],
)
def test_world_configuration_may_omit_its_section(tmp_path: Path, document: str, of_world: bool) -> None:
    (tmp_path / "c.toml").write_text(document)
    assert (find_world(tmp_path / "c.toml", None) is not None) == of_world


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"options": {"leak.py:judge": {"api_key": "sk-live"}}}, "reward.options.leak.py:judge.api_key"),
        ({"enqueue_url": "https://host/enqueue?code=1"}, "reward.enqueue_url"),
    ],
)
def test_masked_values_of_run_are_rejected(tmp_path: Path, change: dict[str, Any], key: str) -> None:
    config = WorldConfig(reward=WorldRewardConfig(functions={"leak.py:judge": 1.0}, **change))
    check_unmasked(config, "w.toml")
    write_run_config(tmp_path, config, {})
    world = find_world(None, str(tmp_path))
    assert world is not None
    with pytest.raises(
        ConfigError, match=rf"config\.json: {re.escape(key)}: the stored secret is masked; .* --config, .* --set"
    ):
        evaluate_world(world, None, [], None, None, overwrite=False)
    replaced = read_values(WorldConfig, world.values, world.name, ["reward.options={}", "reward.enqueue_url=null"])
    check_unmasked(replaced, world.name)


def test_export_older_than_checkpoint_is_rejected(tmp_path: Path) -> None:
    run = world_run(tmp_path / "run")
    final, checkpoint = run / "export" / "final", run / "checkpoints" / "step_7"
    for folder, file in ((final, "model_index.json"), (checkpoint, "COMPLETE")):
        folder.mkdir(parents=True)
        (folder / file).write_text("{}")
    os.utime(checkpoint / "COMPLETE", (1, 1))
    assert resolve_export(str(run)) == str(final)
    os.utime(final / "model_index.json", (0, 0))
    message = (
        rf"step_7 is newer than export/final; .* --checkpoint {checkpoint} --output {run}/export/step_7, .*{final}$"
    )
    with pytest.raises(ConfigError, match=message):
        resolve_export(str(run))
    assert resolve_export(str(final)) == str(final)


def test_world_configuration_is_recognized_by_its_section(tmp_path: Path) -> None:
    (tmp_path / "world.toml").write_text('[world]\nalgorithm = "sft"')
    (tmp_path / "eval.toml").write_text('datasets = ["robovqa"]')
    world = find_world(tmp_path / "world.toml", "outputs/other")
    assert world is not None
    assert world.values == {"world": {"algorithm": "sft"}}
    assert find_world(tmp_path / "eval.toml", "outputs/other") is None
    record = find_world(world_run(tmp_path / "run") / "config.json", None)
    assert record is not None
    assert record.values == {"world": {"algorithm": "nft"}}


def test_world_run_resolves_to_its_final_export(tmp_path: Path) -> None:
    run = world_run(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"nor export/final; create one with dsreason export"):
        resolve_export(str(run))
    (run / "export" / "final").mkdir(parents=True)
    assert resolve_export(str(run)) == str(run / "export" / "final")
    assert resolve_export("nvidia/Cosmos-Predict2.5-2B") == "nvidia/Cosmos-Predict2.5-2B"
    (run / "export" / "final" / "model_index.json").write_text("{}")
    assert resolve_export(str(run / "export" / "final")) == str(run / "export" / "final")
