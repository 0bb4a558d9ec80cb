"""The GPU report's inspection of vLLM's memory and of the driver, tested with stand-ins for both."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.gpu_report.engines import count_unknown, fill_with_garbage
from benchmarks.gpu_report.environment import query_nvidia_smi
from dsreason.rollout.sleep_state import SleepState


def test_woken_pool_holds_garbage_until_written_back() -> None:
    remaining, forgotten, cached = (torch.full((4,), value, dtype=torch.uint8) for value in (1, 2, 3))
    saved = SleepState({"weights": [remaining]})
    state = SleepState({"weights": [remaining, forgotten], "kv_cache": [cached]})
    woken: list[str] = []
    llm = SimpleNamespace(wake_up=lambda tags: woken.extend(tags))
    saved.remember()
    with fill_with_garbage(llm, state, 127):
        llm.wake_up(tags=["weights"])
        assert [part.tolist() for part in (remaining, forgotten, cached)] == [[127] * 4, [127] * 4, [3] * 4]
        saved.write_back("weights")
        llm.wake_up(tags=["kv_cache"])
    llm.wake_up(tags=["weights"])
    assert [part.tolist() for part in (remaining, forgotten, cached)] == [[1] * 4, [127] * 4, [127] * 4]
    assert woken == ["weights", "kv_cache", "weights"]


def test_tensors_not_written_back_are_counted() -> None:
    remaining, forgotten, cached = (torch.zeros(4, dtype=torch.uint8) for _ in range(3))
    state = SleepState({"weights": [remaining, forgotten], "kv_cache": [cached]})
    assert count_unknown(state, SleepState({"weights": [remaining[:]]})) == 2
    assert count_unknown(state, state) == 0


def test_nvidia_smi_field_is_read_per_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert query_nvidia_smi("driver_version") == "unknown: nvidia-smi is missing"
    program = tmp_path / "nvidia-smi"
    program.write_text('#!/bin/sh\necho "$1 of card 0"\necho "$1 of card 1"\n')
    program.chmod(0o755)
    assert query_nvidia_smi("name", 1) == "--query-gpu=name of card 1"
    program.write_text("#!/bin/sh\nexit 9\n")
    assert query_nvidia_smi("driver_version") == "unknown: nvidia-smi failed"
