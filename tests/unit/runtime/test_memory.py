import pytest
import torch

from dsreason.runtime.memory import GIB, MemoryLedger

CPU = torch.device("cpu")
SIZE = 64 * 2**20  # bytes


def test_a_phase_reports_what_it_holds_and_held_at_most() -> None:
    ledger = MemoryLedger(CPU)
    with ledger.phase("before"):
        pass
    with ledger.phase("hold"):
        kept = torch.ones(SIZE, dtype=torch.uint8)
    values = ledger.take()
    grown = values["memory/hold/allocated_gib"] - values["memory/before/allocated_gib"]
    assert grown == pytest.approx(kept.nbytes / GIB, rel=0.2)
    assert values["memory/hold/peak_gib"] >= values["memory/hold/allocated_gib"]
    assert ledger.take() == {}


def test_a_phase_reports_what_it_freed() -> None:
    ledger = MemoryLedger(CPU)
    held = [torch.ones(SIZE, dtype=torch.uint8)]
    with ledger.phase("sleep"):
        held.clear()
    assert ledger.take()["memory/sleep/freed_gib"] == pytest.approx(SIZE / GIB, rel=0.2)
