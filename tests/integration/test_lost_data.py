"""Rows whose media are lost during a run: the last finished step is saved before the error ends it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed import run_on_ranks
from tests.integration.rows import write_mixed_rows

pytestmark = [pytest.mark.integration, pytest.mark.long]

CONFIG = """
[model]
path = "{model}"
[data]
adapter = "jsonl"
path = "{rows}"
workers = 1
prefetch = 1
shuffle = false
vision.fps = 4.0
on_bad_row = "error"
[train]
epochs = 9
max_steps = 9
global_batch_size = 4
micro_batch_size = 2
precision = "fp32"
[validation]
generate = false
[checkpoint]
every = 0
"""


def run_sft(folder: str) -> None:
    """Run `dsreason sft` as one of its ranks does; rank 1 deletes the images once the curves have begun."""
    from dsreason.cli.job import TrainingCommand, find_trainers, load_job
    from dsreason.train.common.run import TrainingRun

    count_step = TrainingRun.count_step

    def lose_images(run: TrainingRun[object], **arguments: object) -> None:
        count_step(run, **arguments)
        for file in Path(folder).glob("data/*.png"):
            file.unlink(missing_ok=True)

    TrainingRun.count_step = lose_images  # type: ignore[assignment, method-assign]
    trainer = find_trainers()["sft"]
    trainer.run(load_job(TrainingCommand(trainer, Path(folder) / "run.toml")), Path(folder) / "run", None)


def test_last_step_is_saved_before_data_error(tmp_path: Path, tiny_qwen2_5_vl: Path) -> None:
    rows = write_mixed_rows(tmp_path / "data", 16)
    (tmp_path / "run.toml").write_text(CONFIG.format(model=tiny_qwen2_5_vl, rows=rows))
    with pytest.raises(AssertionError, match=r"DataError.*rows.jsonl, row \d+.*\.png") as caught:
        run_on_ranks(run_sft, 2, str(tmp_path), timeout=280)
    (marker,) = tmp_path.glob("run/checkpoints/*/COMPLETE")
    step = marker.parent.name.removeprefix("step_")
    assert f"The last finished step, {step}, is saved; continue with --resume auto" in str(caught.value)
