import mmap
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import psutil
import pytest
import torch

from dsreason.monitor.memory import GIB, MemoryLedger, count_available_bytes

CPU = torch.device("cpu")
SIZE = 64 * 2**20  # bytes


def touched_pages() -> mmap.mmap:
    """Allocate memory from the kernel, because the allocator may have enough free memory left from earlier tests."""
    pages = mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for start in range(0, SIZE, mmap.PAGESIZE):
        pages[start] = 1
    return pages


def test_phase_reports_held_and_peak_memory() -> None:
    ledger = MemoryLedger(CPU)
    with ledger.track_phase("before"):
        pass
    with ledger.track_phase("hold"):
        remaining = touched_pages()
    values = ledger.take()
    grown = values["memory/hold/allocated_gib"] - values["memory/before/allocated_gib"]
    assert grown == pytest.approx(len(remaining) / GIB, rel=0.2)
    assert values["memory/hold/peak_gib"] >= values["memory/hold/allocated_gib"]
    assert ledger.take() == {}


def test_phase_reports_freed_memory() -> None:
    ledger = MemoryLedger(CPU)
    held = touched_pages()
    with ledger.track_phase("sleep"):
        held.close()
    assert ledger.take()["memory/sleep/freed_gib"] == pytest.approx(SIZE / GIB, rel=0.2)


def test_seconds_accumulate_until_taken_and_in_totals() -> None:
    ticks = iter([0.0, 1.5, 10.0, 12.0, 20.0, 20.5])
    ledger = MemoryLedger(CPU, clock=lambda: next(ticks))
    for _ in range(2):
        with ledger.track_phase("train"):
            pass
    assert ledger.take()["memory/train/seconds"] == 3.5
    with ledger.track_phase("train"):
        pass
    assert ledger.take()["memory/train/seconds"] == 0.5
    assert (ledger.totals["train"].times, ledger.totals["train"].seconds) == (3, 4.0)


def test_table_has_row_for_each_phase() -> None:
    ticks = (float(second**2) for second in count())
    ledger = MemoryLedger(CPU, clock=lambda: next(ticks))
    for name in ("train", "sleep", "train"):
        with ledger.track_phase(name):
            pass
        ledger.take()
    ledger.totals["train"].gib = {"allocated": 1.0, "peak": 2.5, "freed": 0.125}
    rows = [line.replace("│", " ").split() for line in ledger.report().splitlines()]
    assert ["train", "2", "10.0", "5.000", "1.00", "2.50", "0.12"] in rows
    assert ["sleep", "1", "5.0", "5.000"] in [row[:4] for row in rows]
    headings = next(line for line in ledger.report().splitlines() if "phase" in line and "runs" in line)
    assert headings.replace("┃", " ").split() == ["phase", "runs", "seconds", "mean", "allocated", "peak", "freed"]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """A simulated GPU of 80 GiB: the bytes that the driver and torch count as used."""
    used = {"driver": 60 * GIB, "torch": 50 * GIB, "peak": 55 * GIB}
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (80 * GIB - used["driver"], 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: used["torch"])
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: used["peak"])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    return used


def test_gpu_driver_reports_memory_freed_by_engine(gpu: dict[str, int]) -> None:
    ledger = MemoryLedger(torch.device("cuda"))
    with ledger.track_phase("sleep"):
        gpu["driver"] = 20 * GIB  # vLLM unmaps its memory, but torch still counts it
    values = ledger.take()
    assert values.pop("memory/sleep/seconds") < 60
    assert values == {
        "memory/sleep/allocated_gib": 50,
        "memory/sleep/peak_gib": 55,
        "memory/sleep/freed_gib": 40,
        "memory/sleep/device_gib": 20,
    }
    assert "device" in ledger.report()


def test_higher_peak_of_repeated_phase_counts(gpu: dict[str, int]) -> None:
    ledger = MemoryLedger(torch.device("cuda"))
    for peak in (55, 70, 60):
        with ledger.track_phase("train"):
            gpu["peak"] = peak * GIB
    assert ledger.take()["memory/train/peak_gib"] == 70
    with ledger.track_phase("train"):
        gpu["driver"] = 61 * GIB  # vLLM holds more than before
    values = ledger.take()
    assert (values["memory/train/peak_gib"], values["memory/train/freed_gib"]) == (60, 0)
    assert ledger.totals["train"].gib == {"allocated": 50, "peak": 70, "freed": 0, "device": 61}


@pytest.mark.parametrize(
    ("line", "folder", "limit", "used", "cached"),
    [
        ("0::/job/step\n", "job", "memory.max", "memory.current", "inactive_file"),
        (
            "3:cpuset:/\n4:memory:/job/step\n0::/\n",
            "memory/job",
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
            "total_inactive_file",
        ),
    ],
    ids=["version 2", "version 1"],
)
def test_available_memory_is_limit_minus_uncached_usage(
    tmp_path: Path, line: str, folder: str, limit: str, used: str, cached: str
) -> None:
    local, group = tmp_path / "own", tmp_path / "groups" / folder
    (group / "step").mkdir(parents=True)
    local.write_text(line)
    (group / used).write_text("7000\n")
    (group / "memory.stat").write_text(f"anon 1\n{cached} 500\n")
    (group / limit).write_text("10000\n")
    assert count_available_bytes(tmp_path / "groups", local) == 3500
    (group / limit).write_text("6000\n")
    assert count_available_bytes(tmp_path / "groups", local) == 0


def test_available_memory_is_free_memory_without_limit(tmp_path: Path) -> None:
    (tmp_path / "own").write_text("0::/job\n")
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "memory.max").write_text("max\n")
    for local in ("own", "absent"):
        assert count_available_bytes(tmp_path, tmp_path / local) == pytest.approx(
            psutil.virtual_memory().available, rel=0.2
        )
