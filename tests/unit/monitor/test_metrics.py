import json
import shutil
import sys
import time
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dsreason.config.schema import MonitorConfig
from dsreason.errors import SaveError
from dsreason.monitor.metrics import Metrics, open_metrics
from dsreason.monitor.sinks import wandb as wandb_sink
from dsreason.world.video import encode_gif


def open_in(folder: Path, *, resume_step: int | None = None, **monitor: object) -> Metrics:
    config = MonitorConfig(**monitor)
    return open_metrics(folder, rank=0, resume_step=resume_step, config=config, run_config={"optim": {"lr": 1e-5}})


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def board(folder: Path) -> EventAccumulator:
    return EventAccumulator(str(folder / "tensorboard")).Reload()


def test_metrics_of_a_step_share_a_line(tmp_path: Path) -> None:
    with open_in(tmp_path) as metrics:
        metrics.log_scalars(1, {"train/loss": 2.5})
        metrics.log_scalars(1, {"val/loss": 2.25})
        metrics.log_scalars(2, {"train/loss": 2.0})
    assert lines(tmp_path) == [{"step": 1, "train/loss": 2.5, "val/loss": 2.25}, {"step": 2, "train/loss": 2.0}]


def test_every_call_is_written_before_it_returns(tmp_path: Path) -> None:
    metrics = open_in(tmp_path)
    metrics.log_scalars(1, {"train/loss": 2.125})
    assert lines(tmp_path) == [{"step": 1, "train/loss": 2.125}]
    metrics.log_scalars(1, {"train/loss": 2})  # a shorter line completely replaces the longer one
    assert lines(tmp_path) == [{"step": 1, "train/loss": 2.0}]
    metrics.close()


@pytest.mark.parametrize(("value", "name"), [(float("nan"), "nan"), (float("inf"), "inf"), (float("-inf"), "-inf")])
def test_nonfinite_values_are_null_and_named(tmp_path: Path, value: float, name: str) -> None:
    with open_in(tmp_path) as metrics:
        metrics.log_scalars(3, {"train/loss": value, "train/epoch": 0.5})
    text = (tmp_path / "metrics.jsonl").read_text()
    entry = json.loads(text, parse_constant=lambda constant: pytest.fail(f"{constant} is no JSON"))
    assert entry == {"step": 3, "train/loss": None, "train/epoch": 0.5, "nonfinite": {"train/loss": name}}


def test_value_replaced_by_number_is_not_nonfinite(tmp_path: Path) -> None:
    with open_in(tmp_path) as metrics:
        metrics.log_scalars(3, {"train/loss": float("nan"), "train/grad_norm": float("inf")})
        metrics.log_scalars(3, {"train/loss": 2.0})
    assert lines(tmp_path) == [
        {"step": 3, "train/loss": 2.0, "train/grad_norm": None, "nonfinite": {"train/grad_norm": "inf"}}
    ]


def test_resume_drops_metrics_after_the_checkpoint(tmp_path: Path) -> None:
    with open_in(tmp_path) as metrics:
        for step in (1, 2, 3, 4):
            metrics.log_scalars(step, {"train/loss": step})
    with open_in(tmp_path, resume_step=2) as metrics:
        metrics.log_scalars(3, {"train/loss": 30})
    assert [(entry["step"], entry["train/loss"]) for entry in lines(tmp_path)] == [(1, 1), (2, 2), (3, 30)]
    assert [(event.step, event.value) for event in board(tmp_path).Scalars("train/loss")] == [(1, 1), (2, 2), (3, 30)]


def test_resume_continues_line_of_resumed_step(tmp_path: Path) -> None:
    with open_in(tmp_path) as metrics:
        metrics.log_scalars(1, {"train/loss": 1})
        metrics.log_scalars(2, {"train/loss": 2})
    with open_in(tmp_path, resume_step=2) as metrics:
        metrics.log_scalars(2, {"val/loss": 5})
    assert lines(tmp_path) == [{"step": 1, "train/loss": 1}, {"step": 2, "train/loss": 2, "val/loss": 5}]


def test_resume_tolerates_a_truncated_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "train/loss": 1.0}\n{"step": 2, "trai')
    with open_in(tmp_path, resume_step=2) as metrics:
        metrics.log_scalars(3, {"train/loss": 3})
    assert [entry["step"] for entry in lines(tmp_path)] == [1, 3]
    assert "metrics.jsonl: damaged lines are left out: line 2" in caplog.text


def test_fresh_start_discards_run_without_checkpoint(tmp_path: Path) -> None:
    with open_in(tmp_path) as metrics:
        metrics.log_scalars(0, {"val/loss": 9})
        metrics.log_scalars(1, {"train/loss": 9})
    with open_in(tmp_path) as metrics:
        metrics.log_scalars(1, {"train/loss": 1})
    assert lines(tmp_path) == [{"step": 1, "train/loss": 1}]
    assert [event.value for event in board(tmp_path).Scalars("train/loss")] == [1]


def test_steps_that_go_backwards_are_refused(tmp_path: Path) -> None:
    with open_in(tmp_path) as metrics:
        metrics.log_scalars(2, {"train/loss": 1})
        with pytest.raises(ValueError, match="step 1 were logged after those of step 2"):
            metrics.log_scalars(1, {"train/loss": 1})


def test_tensorboard_shows_scalars_text_images_and_histograms(tmp_path: Path) -> None:
    with open_in(tmp_path) as metrics:
        metrics.log_scalars(1, {"train/loss": 2.5})
        metrics.log_text(1, "val/answers", "Q: <video> which way?\nA: left")
        metrics.log_images(1, "val/frames", [Image.new("L", (8, 6))])
        metrics.log_histogram(1, "train/lengths", np.array([1, 2, 3]))
    tags = board(tmp_path).Tags()
    assert tags["scalars"] == ["train/loss"]
    assert tags["images"] == ["val/frames/0"]
    assert tags["histograms"] == ["train/lengths"]
    assert tags["tensors"] == ["config/text_summary", "val/answers/text_summary"]
    text = board(tmp_path).Tensors("val/answers/text_summary")[0].tensor_proto.string_val[0].decode()
    assert text == "    Q: <video> which way?\n    A: left\n"


def test_tensorboard_receives_a_clip_as_gif(tmp_path: Path) -> None:
    """Check that the clip is stored as an animated GIF with its size, which requires no package for videos."""
    clip = np.random.default_rng(0).integers(0, 255, (3, 5, 16, 24), dtype=np.uint8)
    made = encode_gif(clip, 8.0)
    with open_in(tmp_path) as metrics:
        metrics.log_video(3, "clips/0", made)
    (event,) = board(tmp_path).Images("clips/0")
    assert (event.step, event.width, event.height, event.encoded_image_string) == (3, 24, 16, made)
    assert Image.open(BytesIO(event.encoded_image_string)).n_frames == 5


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    metrics = open_metrics(tmp_path, rank=1, resume_step=None, config=MonitorConfig(), run_config={})
    assert type(metrics) is Metrics
    with metrics:
        metrics.log_scalars(1, {"train/loss": 1})
        metrics.log_text(1, "a", "b")
        metrics.log_images(1, "a", [])
        metrics.log_histogram(1, "a", np.zeros(1))
        metrics.log_video(1, "a", b"")
    assert list(tmp_path.iterdir()) == []


def test_wandb_run_continues_only_when_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []

    def init(**settings: Any) -> SimpleNamespace:
        begun.append(settings["id"])
        return SimpleNamespace(define_metric=lambda *_, **__: None)

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    monkeypatch.setattr(wandb_sink, "check_wandb", lambda config: None)
    for resumed in (False, True, False):
        wandb_sink.open_wandb(tmp_path, MonitorConfig(wandb=True), {}, resumed=resumed)
    first, second, fresh = begun
    assert first == second != fresh


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # from the library's thread
def test_deleted_folder_is_named_in_error(tmp_path: Path) -> None:
    message = r"run/tensorboard: the curves cannot be written \(.*\); the folder must exist"
    with pytest.raises(SaveError, match=message), open_in(tmp_path / "run") as writer:
        shutil.rmtree(tmp_path / "run")
        for step in range(1, 1000):
            writer.log_scalars(step, {"train/loss": 1.0})
            time.sleep(0.01)
