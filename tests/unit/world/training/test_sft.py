"""SFT steps on real clips, some of which are unusable; every rank learns of the bad clips of the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsreason.errors import DataError, DsReasonError, StorageError
from dsreason.world.schema import WorldConfig
from dsreason.world.training import sft
from dsreason.world.training.clips import ClipShare

BAD = DataError("clip.mp4: is no video")
CLIP = torch.zeros(3, 5, 16, 16, dtype=torch.uint8)
VALIDATION: Any = [None]


def failing(*given: Any) -> Any:
    raise StorageError("no room")


def make_maker(**functions: Callable[..., Any]) -> Any:
    """Build the clip maker of the second of two ranks, which owns the row if there is only one."""
    config = {"world": {"algorithm": "sft"}, "data": {"on_bad_row": "skip"}, "train": {"global_batch_size": 1}}
    encode = functions.get("encode", lambda clip: torch.zeros(1, 4, 2, 2, 2))
    return SimpleNamespace(
        config=WorldConfig.model_validate(config),
        share=ClipShare(1, 2),
        inputs=SimpleNamespace(
            size=None,
            latents=SimpleNamespace(encode=encode),
            make_real_batch=functions.get("real_batch", lambda places, counted, *rest: (places, counted)),
        ),
    )


def next_batches(maker: Any, clips: Iterator[Any], num_rows: int = 1) -> Any:
    """Return the batches of step 7."""
    dataset: Any = None
    return sft.read_next_batches(maker, dataset, range(num_rows), clips, 7)


@pytest.fixture(autouse=True)
def told(monkeypatch: pytest.MonkeyPatch) -> list[DsReasonError]:
    """A list of the errors that are sent to other ranks."""
    errors: list[DsReasonError] = []

    @contextmanager
    def errors_on_all_ranks() -> Iterator[None]:
        try:
            yield
        except DsReasonError as error:
            errors.append(error)
            raise

    monkeypatch.setattr(sft, "share_errors", errors_on_all_ranks)
    monkeypatch.setattr(sft, "gather_objects", lambda value: [(0, []), value])
    return errors


def test_step_without_usable_clips_reports_first_error() -> None:
    """Use a bad clip on a rank other than the first."""
    with pytest.raises(
        DataError, match="none of the 1 clips of step 7 can be used; first error: clip.mp4: is no video"
    ):
        next_batches(make_maker(), iter([[BAD]]))


def test_validation_without_clips_has_no_loss(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sft, "read_clips", lambda *given: [BAD])
    assert sft.measure_held_out_loss(make_maker(), VALIDATION) is None
    assert "none of the 1 held-out clips can be used; first error: clip.mp4: is no video" in caplog.text


@pytest.mark.parametrize(
    ("maker", "clips"),
    [
        (make_maker(), (failing() for _ in range(1))),
        (make_maker(encode=failing), iter([[CLIP]])),
        (make_maker(real_batch=failing), iter([[CLIP]])),
    ],
    ids=["a dead worker", "a full disk", "a cleared cache"],
)
def test_error_on_one_rank_reaches_all_ranks(maker: Any, clips: Iterator[Any], told: list[DsReasonError]) -> None:
    with pytest.raises(StorageError, match="no room"):
        next_batches(maker, clips)
    assert [str(error) for error in told] == ["no room"]


def test_validation_error_reaches_all_ranks(monkeypatch: pytest.MonkeyPatch, told: list[DsReasonError]) -> None:
    monkeypatch.setattr(sft, "read_clips", failing)
    with pytest.raises(StorageError, match="no room"):
        sft.measure_held_out_loss(make_maker(), VALIDATION)
    assert [str(error) for error in told] == ["no room"]


def test_bad_clip_is_skipped_or_fatal(told: list[DsReasonError]) -> None:
    maker = make_maker()
    batches, skipped = next_batches(maker, iter([[BAD, CLIP]]), num_rows=4)
    (((place,), counted),) = batches[1:]
    assert (place.prompt, counted) == (3, True)
    assert skipped == [str(BAD)]
    maker.config = WorldConfig.model_validate({"world": {"algorithm": "sft"}})
    with pytest.raises(DataError, match="clip.mp4: is no video"):
        next_batches(maker, iter([[BAD, CLIP]]), num_rows=4)
    assert told == [BAD]
