"""Peak memory of an export.

The memory is measured in a separate process, because a process that ran other tests has freed memory that it can reuse.
"""

from __future__ import annotations

import multiprocessing as mp
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch

from dsreason.checkpoints.export import write_model_folder
from dsreason.monitor.memory import read_status_bytes

pytestmark = [pytest.mark.integration, pytest.mark.long]

TENSORS, ELEMENTS = 6, 9_000_000
# Each tensor has this size in bytes; the allocator returns blocks of more than 32 MiB to the kernel when they are freed.
SIZE = 4 * ELEMENTS


def test_export_holds_less_than_two_shards(tmp_path: Path) -> None:
    with ProcessPoolExecutor(1, mp_context=mp.get_context("spawn")) as pool:
        held = pool.submit(bytes_held_at_most, tmp_path).result()
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == TENSORS // 2
    assert 2 * SIZE <= held < 4 * SIZE


def bytes_held_at_most(folder: Path) -> int:
    """Return the largest number of bytes of tensors that exist at the same time while a model is written to `folder`/out.

    The model has `TENSORS` tensors, two per shard.
    """
    source = folder / "base"
    source.mkdir()
    (source / "config.json").write_text('{"model_type": "qwen3"}')
    recorded: list[int] = []

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for i in range(TENSORS):
            recorded.append(read_status_bytes("RssAnon"))
            yield f"layer.{i}", torch.full((ELEMENTS,), float(i))
            recorded.append(read_status_bytes("RssAnon"))

    write_model_folder(tensors(), source, folder / "out", dtype="fp32", max_shard_size="75MB")
    return max(recorded) - min(recorded)
