"""A run that is interrupted and resumed ends like an uninterrupted run, on the same and on a different number of ranks."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.integration.command import dsreason, metrics
from tests.integration.rows import write_mixed_rows

pytestmark = pytest.mark.integration

CONFIG = """
[model]
path = "{model}"
{trained}
[data]
adapter = "jsonl"
path = "{rows}"
workers = 1
vision.fps = 4.0
[optim]
lr = 1e-3
lr_multipliers = {{'layers\.0' = 0.5}}
[train]
epochs = 3
global_batch_size = 4
micro_batch_size = 2
precision = "fp32"
[checkpoint]
every = 3
keep = -1
"""


TRAINED = {
    "all but the vision tower": 'freeze = ["visual"]',
    "adapters": "[lora]\nrank = 4\nvision = true",
    "adapters beside 4 bits": 'quantize = "nf4"\n[lora]\nrank = 4',
}
OTHERS = [
    pytest.param("adapters", marks=pytest.mark.nightly),
    pytest.param("adapters beside 4 bits", marks=pytest.mark.nightly),
]


@pytest.fixture(scope="module", params=["all but the vision tower", *OTHERS])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tiny_qwen2_5_vl: Path) -> Path:
    """Return a folder with a finished run in `whole/`: six steps on 2 ranks, checkpoints after steps three and six.

    The embeddings are tied.
    """
    folder = tmp_path_factory.mktemp("resume")
    rows = write_mixed_rows(folder / "data")
    (folder / "run.toml").write_text(CONFIG.format(model=tiny_qwen2_5_vl, rows=rows, trained=TRAINED[request.param]))
    train(folder, "whole", ranks=2)
    return folder


def train(folder: Path, name: str, *, ranks: int, resume: str | None = None) -> Path:
    options = [] if resume is None else ["--resume", resume]
    ended = dsreason("sft", "--config", "run.toml", "--output-dir", name, "--nproc", ranks, *options, cwd=folder)
    assert ended.returncode == 0, ended.stderr
    return folder / name


def last_losses(run: Path) -> list[float]:
    return [line["train/loss"] for line in metrics(run) if line["step"] > 3]


def test_resumed_run_matches_full_run_exactly(folder):
    resumed = train(folder, "resumed", ranks=2, resume="whole/checkpoints/step_3")
    assert len(last_losses(resumed)) == 3  # both runs train all rows of every epoch
    assert last_losses(resumed) == last_losses(folder / "whole")
    expected, result = (load_file(run / "export/final/model.safetensors") for run in (folder / "whole", resumed))
    assert expected.keys() == result.keys()
    assert all(expected[name].equal(result[name]) for name in expected)


def test_learning_rates_are_logged(folder):
    lines = metrics(folder / "whole")
    assert [line["train/learning_rate_x0.5"] for line in lines] == [0.5 * line["train/learning_rate"] for line in lines]
    table = (folder / "whole" / "logs" / "rank_0.log").read_text().split("learning rates by module:")[1]
    assert "model.language_model.layers.0 " in table


@pytest.mark.nightly
def test_losses_match_when_resumed_on_fewer_ranks(folder):
    """Resume on one rank; test_checkpoint.py also resumes on four, but without the command."""
    resumed = train(folder, "on_1", ranks=1, resume="whole/checkpoints/step_3")
    assert last_losses(resumed) == pytest.approx(last_losses(folder / "whole"), rel=1e-5, abs=1e-5)


@pytest.mark.nightly
def test_resuming_finished_run_only_restores_missing_export(folder):
    before, export = metrics(folder / "whole"), folder / "whole" / "export" / "final"
    expected = load_file(export / "model.safetensors")
    shutil.rmtree(export)  # this simulates a run that was interrupted before its export
    train(folder, "whole", ranks=2, resume="auto")
    assert metrics(folder / "whole") == before
    file = load_file(export / "model.safetensors")
    assert all(expected[name].equal(file[name]) for name in expected)
