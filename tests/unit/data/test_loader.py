"""The loader's steps: each row is used once over all ranks, and workers and ranks agree on the micro-batches."""

from __future__ import annotations

import errno
import gc
import multiprocessing
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from dsreason import stopping
from dsreason.config.schema import SFTConfig
from dsreason.data import loader
from dsreason.data.collate import find_media_tokens
from dsreason.data.loader import StepBatches, StepLoader, assign, run_in_workers, take_group_values
from dsreason.data.sources import open_datasets
from dsreason.errors import DataError, DsReasonError, Stopped, StorageError
from dsreason.job import failures
from dsreason.train.common.global_batches import build_step_order
from dsreason.train.common.preflight import build_encoder
from tests.integration.rows import write_mixed_rows
from tests.unit.hostile.guard import guarded


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mixed_rows(tmp_path_factory.mktemp("rows"), 16)


def config(rows: Path, model: Path, **train: Any) -> SFTConfig:
    data = train.pop("data", {})
    sections = {"model": {"path": str(model), **train.pop("limits", {})}, "train": {"global_batch_size": 8, **train}}
    return SFTConfig.model_validate(
        {**sections, "data": {"adapter": "jsonl", "path": str(rows), "workers": 0, "vision": {"fps": 4.0}, **data}}
    )


def gathering(world_size: int) -> list[Callable[[Any], list[Any]]]:
    """Return one `exchange` per rank, for ranks that are threads."""
    barrier, values = threading.Barrier(world_size, timeout=60), [None] * world_size

    def exchange(rank: int, value: Any) -> list[Any]:
        values[rank] = value
        barrier.wait()
        result = list(values)
        barrier.wait()
        return result

    return [lambda value, rank=rank: exchange(rank, value) for rank in range(world_size)]


def all_steps(
    config: SFTConfig, world_size: int = 1, start_step: int = 0, ranks_per_row: int = 1
) -> list[list[StepBatches]]:
    """Return the batches of all steps; the first index is the rank, the second the step."""
    training, _ = open_datasets(config.data)
    encoder, order = build_encoder(config, Path(config.model.path)), build_step_order(training, config)

    def one_rank(rank: int, exchange: Callable[[Any], list[Any]]) -> list[StepBatches]:
        place = {"exchange": exchange, "rank": rank, "world_size": world_size, "ranks_per_row": ranks_per_row}
        return list(StepLoader(training, encoder, order, config, **place, start_step=start_step))

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(one_rank, range(world_size), gathering(world_size)))


def sample_ids(step: StepBatches) -> list[str]:
    return [name for batch in step.micro_batches for name in batch.ids if name]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "cut",
    [
        {},
        {"micro_batch_size": 2},
        {"max_tokens_per_micro_batch": 200},
        {"packing": False},
        {"packing": False, "micro_batch_size": 2},
        {"packing": False, "max_tokens_per_micro_batch": 200},
    ],
)
def test_ranks_share_batches_with_equal_forward_counts(rows, tiny_qwen2_5_vl, world_size, cut):
    ranks = all_steps(config(rows, tiny_qwen2_5_vl, **cut), world_size)
    for steps in zip(*ranks, strict=True):
        assert len({name for step in steps for name in sample_ids(step)}) == 8
        assert sum(len(sample_ids(step)) for step in steps) == 8
        for batches in zip(*(step.micro_batches for step in steps), strict=True):
            assert all(find_media_tokens(batch) for batch in batches)  # the vision tower always runs
        trained = sum(len(batch.targets) for step in steps for batch in step.micro_batches)
        assert {step.num_tokens for step in steps} == {trained}
        assert {step.num_samples for step in steps} == {8}


def test_ranks_sharing_rows_count_as_one_rank(rows, tiny_qwen2_5_vl):
    settings = config(rows, tiny_qwen2_5_vl, max_tokens_per_micro_batch=400)
    ranks, alone = all_steps(settings, 4, ranks_per_row=2), all_steps(settings, 2)
    for rank, steps in enumerate(ranks):
        for step, expected in zip(steps, alone[rank // 2], strict=True):
            for name in ("num_tokens", "num_input_tokens", "num_samples", "skipped"):
                assert getattr(step, name) == getattr(expected, name)
            for batch, item in zip(step.micro_batches, expected.micro_batches, strict=True):
                length = item.input_ids.shape[1]
                assert batch.ids == item.ids and torch.equal(batch.input_ids[:, :length], item.input_ids)
                half = (length + 1) // 2
                assert (batch.part.start, batch.part.end) == (rank % 2 * half, (rank % 2 + 1) * half)


def test_mismatched_rows_within_rank_group_are_rejected():
    skipped = [(), (), (), ("row 7: is empty",)]
    assert take_group_values([1, 1, 2, 2], skipped, 2) == [1, 2]
    expected = (
        r"ranks 2 and 3 compute the same packed rows .*size is 2\) .* rank 2 skips nothing, but rank 3 skips row 7: is"
    )
    with pytest.raises(DataError, match=expected):
        take_group_values([1, 1, 2, 3], skipped, 2)


@pytest.mark.parametrize("packing", [True, False])
def test_token_budget_does_not_count_dummy_tokens(rows, tiny_qwen2_5_vl, packing):
    [steps] = all_steps(config(rows, tiny_qwen2_5_vl, max_tokens_per_micro_batch=200, packing=packing))
    batches = [batch for step in steps for batch in step.micro_batches]
    assert max(len(batch.ids) for batch in batches) > 1
    assert all(batch.input_ids.numel() <= 200 + 3 * len(batch.ids) for batch in batches)


def test_sample_over_token_budget_is_rejected(rows, tiny_qwen2_5_vl):
    with pytest.raises(DataError, match=r"sample '\d+' has \d+ tokens.*is 20 \(train\.max_tokens_per_micro_batch\)"):
        all_steps(config(rows, tiny_qwen2_5_vl, max_tokens_per_micro_batch=20))


def same(a: StepBatches, b: StepBatches) -> bool:
    pairs = list(zip(a.micro_batches, b.micro_batches, strict=True))
    return all(
        x.ids == y.ids
        and torch.equal(x.input_ids, y.input_ids)
        and all(torch.equal(x.mm_kwargs[key], y.mm_kwargs[key]) for key in x.mm_kwargs)
        for x, y in pairs
    )


def test_workers_do_not_change_the_batches(rows, tiny_qwen2_5_vl):
    [alone] = all_steps(config(rows, tiny_qwen2_5_vl))
    [helped] = all_steps(config(rows, tiny_qwen2_5_vl, data={"workers": 2, "prefetch": 3}))
    assert all(same(a, b) for a, b in zip(alone, helped, strict=True))


def test_loading_continues_at_the_start_step(rows, tiny_qwen2_5_vl):
    settings = config(rows, tiny_qwen2_5_vl, epochs=2)
    [full], [remainder] = all_steps(settings), all_steps(settings, start_step=3)
    assert [step.step for step in remainder] == [3]
    assert same(remainder[0], full[3])


@pytest.fixture
def spoiled(tmp_path: Path) -> Path:
    """Eight rows, the fourth (an image row) without its file's content."""
    path = write_mixed_rows(tmp_path)
    next(tmp_path.glob("3_*.png")).write_bytes(b"no image")
    return path


@pytest.mark.parametrize("workers", [0, 1])
def test_bad_row_error_names_row_and_file(spoiled, tiny_qwen2_5_vl, workers):
    with pytest.raises(DataError, match=r"rows\.jsonl.*4.*3_\d\.png"):
        all_steps(config(spoiled, tiny_qwen2_5_vl, data={"workers": workers}))


def test_bad_row_is_skipped_and_reported(spoiled, tiny_qwen2_5_vl):
    [[step]] = all_steps(config(spoiled, tiny_qwen2_5_vl, data={"on_bad_row": "skip"}))
    assert sorted(sample_ids(step)) == ["0", "1", "2", "4", "5", "6", "7"]
    assert step.num_samples == 7
    assert len(step.skipped) == 1
    assert "3_" in step.skipped[0]


def test_step_with_only_skipped_rows_trains_nothing(spoiled, tiny_qwen2_5_vl):
    steps = all_steps(config(spoiled, tiny_qwen2_5_vl, global_batch_size=1, data={"on_bad_row": "skip"}), 2)
    [empty] = [i for i, step in enumerate(steps[0]) if step.skipped]
    for rank in steps:
        assert len(rank) == 8
        assert (rank[empty].num_samples, rank[empty].num_tokens) == (0, 0)
        [batch] = rank[empty].micro_batches
        assert len(batch.targets) == 0


@pytest.mark.parametrize("on_too_long", ["error", "skip"])
def test_too_long_samples_are_skipped_or_rejected(rows, tiny_qwen2_5_vl, on_too_long):
    settings = config(rows, tiny_qwen2_5_vl, limits={"max_length": 45, "on_too_long": on_too_long})
    if on_too_long == "error":
        with pytest.raises(DataError, match="45"):
            all_steps(settings)
    else:
        [steps] = all_steps(settings)
        assert sum(len(step.skipped) for step in steps) > 0


@pytest.mark.parametrize(
    ("lengths", "ranks", "same_count", "expected"),
    [
        ([8, 7, 6, 5, 4], 2, False, [[0, 3, 4], [1, 2]]),
        ([9, 1, 1, 1, 1], 2, False, [[0], [1, 2, 3, 4]]),
        ([9, 1, 1, 1], 2, True, [[0, 3], [1, 2]]),
        ([3], 3, True, [[0], [], []]),
        ([9, 1, 1, 1, 1, 1, 1], 3, True, [[0, 6], [1, 3, 5], [2, 4]]),  # not 1, 3 and 3 of them
    ],
)
def test_lengths_are_balanced_over_ranks(lengths, ranks, same_count, expected):
    assert assign(lengths, ranks, same_count=same_count) == expected


@pytest.mark.parametrize("workers", [0, 1])
def test_worker_error_is_raised_unchanged(workers: int) -> None:
    def refused(task: int) -> int:
        if task == 1:
            raise StorageError("s3://b/k: Forbidden", status=403)
        return task

    result = run_in_workers(refused, [0, 1], workers=workers)
    assert next(result) == 0
    with pytest.raises(StorageError) as caught:
        next(result)
    assert (str(caught.value), caught.value.status) == ("s3://b/k: Forbidden", 403)


def test_dead_worker_is_reported() -> None:
    def deadly(task: int) -> int:
        os.kill(os.getpid(), signal.SIGKILL)
        return task

    with pytest.raises(DsReasonError, match="a data worker died"):
        next(run_in_workers(deadly, [0], workers=1))


def test_worker_that_never_starts_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a fork stopped by another thread's lock: not even a signal ends the process."""

    def never_start(started: Any, number: int) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(300)

    monkeypatch.setattr(loader, "start_worker", never_start)
    monkeypatch.setattr(loader, "START_SECONDS", 0.5)
    with pytest.raises(DsReasonError, match="a data worker did not start within 0.5 s|a data worker died"):
        next(run_in_workers(str, [0], workers=2))
    for _ in range(100):
        if not multiprocessing.active_children():
            break
        time.sleep(0.05)
    assert multiprocessing.active_children() == []


def test_stop_request_ends_wait_for_hanging_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopping, "_requests", [])

    def hang(task: int) -> int:
        time.sleep(300 if task > 1 else 0.25)
        return task

    results = run_in_workers(hang, range(9), workers=3, ahead=1)
    assert [next(results), next(results)] == [
        0,
        1,
    ]  # the delay exceeds the loader's interval for checking stop requests
    stopping.request_stop("SIGTERM")
    begin = time.monotonic()
    with pytest.raises(Stopped):
        next(results)
    del results
    gc.collect()
    assert time.monotonic() - begin < 2
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("method", ["_find_unmeasured_rows", "_encode_share"])
def test_error_of_one_rank_is_raised_on_all(
    rows: Path, tiny_qwen2_5_vl: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """Check errors before and after the exchange of the rows' lengths: the ranks then wait in different exchanges."""
    original = getattr(StepLoader, method)

    def fail(*_: object) -> Iterator[list[int]]:
        raise DsReasonError("only on rank 1")
        yield []

    def fail_on_rank_1(self: StepLoader) -> Any:
        if self.rank != 1:
            return original(self)
        return fail() if method == "_find_unmeasured_rows" else lambda task: next(fail())

    monkeypatch.setattr(StepLoader, method, fail_on_rank_1)
    with pytest.raises(DsReasonError, match="^only on rank 1$"):
        all_steps(config(rows, tiny_qwen2_5_vl), world_size=2)


def test_workers_have_a_separate_process_group() -> None:
    assert next(run_in_workers(lambda task: os.getpgrp(), [0], workers=1)) != os.getpgrp()


def test_unpicklable_worker_result_is_reported() -> None:
    """Simulate a full /dev/shm: Python's queue drops the item, so the trainer would wait for it forever."""

    def wait() -> None:
        next(run_in_workers(lambda task: threading.Lock(), [0], workers=1))

    with pytest.raises(DsReasonError, match="a data worker died"):
        guarded(wait)


def test_worker_ends_quietly_after_trainer_exits() -> None:
    """Check that no error reaches the trainer; torch would raise one at an arbitrary point of its code."""
    assert loader.end_worker(BrokenPipeError(errno.EPIPE, "Broken pipe"), "a batch") is None


def test_dead_worker_message_mentions_small_shared_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert "shm" not in failures.describe_dead_worker()
    monkeypatch.setattr(failures, "SMALL_SHARED_MEMORY", 2**60)
    assert re.search(
        r"; /dev/shm has only \d+ MiB \(start the container with --shm-size=16g\)", failures.describe_dead_worker()
    )
    full = failures.convert_disk_error(OSError(errno.ENOSPC, "No space left on device"))
    assert str(full).startswith("perhaps /dev/shm has ")
    read_only = failures.convert_disk_error(OSError(errno.EROFS, "Read-only file system"))
    assert str(read_only).startswith("Read-only")
    disk_error_as_save_error = failures.convert_disk_error(OSError(errno.ENOSPC, "No space left on device", "/data/a"))
    assert str(disk_error_as_save_error).startswith("/data/a: No space")
    monkeypatch.setattr(failures, "SHARED_MEMORY", tmp_path / "none")
    assert "shm" not in failures.describe_dead_worker()
