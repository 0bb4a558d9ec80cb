"""The parts of a new trainer: a schema, a folder in `train/` and a file in `cli/`, as in `toy/`.

Everything else finds the trainer automatically.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from dsreason import cli, config, train
from dsreason.errors import ConfigError
from tests.distributed import run_on_ranks
from tests.integration.command import metrics
from tests.integration.rows import write_mixed_rows

pytestmark = pytest.mark.integration

RUN = """
[model]
path = "{model}"
[data]
adapter = "jsonl"
path = "{rows}"
workers = 0
validation = 2
vision.fps = 4.0
[optim]
lr = 1e-3
[train]
max_steps = 4
precision = "fp32"
[toy]
scale = 0.5
[validation]
max_completion_length = 4
[checkpoint]
every = 2
keep = -1
"""


def add_toy(place: Any = setattr) -> None:
    """Make the files of `toy/` appear to be part of the package; `place` is a function that sets an attribute."""
    folder = Path(__file__).parent / "toy"
    for package in (cli, config, train):
        place(package, "__path__", [*package.__path__, str(folder / package.__name__.rpartition(".")[2])])


@pytest.fixture
def _toy(monkeypatch: pytest.MonkeyPatch) -> None:
    add_toy(monkeypatch.setattr)


def run_toy(file: str, output_dir: str, resume: str | None) -> None:
    """Run the toy trainer the way a rank of `dsreason toy` does."""
    add_toy()
    from dsreason.cli.job import TrainingCommand, find_trainers, load_job

    trainer = find_trainers()["toy"]
    trainer.run(load_job(TrainingCommand(trainer, Path(file))), Path(output_dir), resume)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_qwen3_vl: Path) -> Path:
    """Create `whole/`, a run of four steps on two ranks, and `resumed/`, which repeats its last two steps."""
    folder = tmp_path_factory.mktemp("toy")
    rows = write_mixed_rows(folder / "data")
    (folder / "run.toml").write_text(RUN.format(model=tiny_qwen3_vl, rows=rows))
    start = partial(run_on_ranks, run_toy, 2, str(folder / "run.toml"))
    start(str(folder / "whole"), None)
    start(str(folder / "resumed"), str(folder / "whole/checkpoints/step_2"))
    return folder


def test_toy_run_is_logged_validated_and_checkpointed(folder: Path) -> None:
    lines = metrics(folder / "whole")
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4]
    assert all("val/accuracy" in line for line in (lines[0], lines[-1]))
    assert {"train/skipped_rows", "train/epoch", "perf/tokens_per_second", "memory/train/peak_gib"} <= lines[1].keys()
    assert {path.name for path in (folder / "whole/checkpoints").iterdir()} == {"step_2", "step_4"}


def test_toy_run_resumes_exactly(folder: Path) -> None:
    full, resumed = ([line["train/loss"] for line in metrics(folder / name) if line["step"] > 2] for name in RUNS)
    assert full == resumed
    expected, result = (load_file(folder / name / "export/final/model.safetensors") for name in RUNS)
    assert all(expected[name].equal(result[name]) for name in expected)


RUNS = ("whole", "resumed")


@pytest.mark.usefixtures("_toy")
def test_changed_toy_setting_is_rejected_on_resume(folder: Path) -> None:
    from dsreason.cli.job import TrainingCommand, find_trainers, load_job
    from dsreason.config.output import check_output_dir

    job = TrainingCommand(find_trainers()["toy"], folder / "run.toml", overrides=("toy.scale=2.0",))
    with pytest.raises(ConfigError, match="toy.scale was 0.5 and is now 2.0"):
        check_output_dir(folder / "whole", load_job(job), "auto")


@pytest.mark.usefixtures("_toy")
def test_data_validate_infers_toy_trainer_from_section(folder: Path) -> None:
    from dsreason.cli.data.chosen_run import choose_trainer, load_run
    from dsreason.cli.data.commands import list_encoded_parts
    from dsreason.tools.datasets.rendering import render_rows

    trainer = choose_trainer(folder / "run.toml", None, None)
    assert trainer.name == "toy"
    parts = list_encoded_parts(trainer, load_run(trainer, folder / "run.toml", None))
    result = {name: render_rows(name, dataset, encode, limit=None, workers=0) for name, dataset, encode in parts}
    assert result == {"training": (6, []), "validation": (2, [])}
