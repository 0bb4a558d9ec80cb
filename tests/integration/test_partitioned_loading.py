"""Loading on real ranks: ZeRO-3 partitions hold the checkpoint's values, and no rank ever holds the model."""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed import run_on_ranks

pytestmark = pytest.mark.integration

FAMILIES = ("qwen2_5_vl", "qwen3_vl")


def ds_config(world_size: int, *, bf16: bool = False, offload: bool = False, stage: int = 3) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": stage}
    if stage == 3:
        zero["stage3_param_persistence_threshold"] = 100  # norms and biases persist, matrices do not
    if offload:
        zero |= {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}
    return {
        "train_batch_size": world_size,
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": bf16},
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }


def digest(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)} {hashlib.sha256(tensor.float().numpy().tobytes()).hexdigest()}"


def expected_digests(folder: Path, dtype: torch.dtype) -> dict[str, str]:
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype)
    return {name: digest(t.detach()) for name, t in [*model.named_parameters(), *model.named_buffers()]}


def load_and_digest(folder: str, dtype: torch.dtype, config: dict[str, Any], initialize: bool) -> dict[str, str]:
    from dsreason.runtime.world import init_world

    init_world()
    import deepspeed

    from dsreason.models.load import load_model

    model = load_model(Path(folder), dtype=dtype, deepspeed=config)
    stage = config["zero_optimization"]["stage"]
    assert all(p.numel() == 0 for p in model.parameters()) == (stage == 3)
    if initialize:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    with deepspeed.zero.GatheredParameters(list(model.parameters()), enabled=stage == 3):
        return {name: digest(t.detach()) for name, t in [*model.named_parameters(), *model.named_buffers()]}


@pytest.mark.parametrize(
    ("family", "tied", "bf16", "offload"),
    [
        ("qwen2_5_vl", True, False, False),
        ("qwen2_5_vl", False, True, True),
        ("qwen3_vl", True, True, False),
        ("qwen3_vl", False, False, True),
    ],
)
def test_zero3_partitions_hold_what_from_pretrained_loads(
    tmp_path: Path, family: str, tied: bool, bf16: bool, offload: bool
) -> None:
    from dsreason.models.tiny import build_tiny

    folder = build_tiny(family, tmp_path / "model", tie_embeddings=tied, max_shard_bytes=1 << 20)
    dtype = torch.bfloat16 if bf16 else torch.float32
    config = ds_config(3, bf16=bf16, offload=offload)  # 3 ranks: most tensors do not divide evenly
    expected = expected_digests(folder, dtype)
    assert len(list(folder.glob("*.safetensors"))) > 1
    for rank in run_on_ranks(load_and_digest, 3, str(folder), dtype, config, True):
        assert rank == expected


def test_zero2_keeps_values_and_rotary_frequencies_in_float32(tmp_path: Path) -> None:
    from dsreason.models.tiny import build_tiny

    folder = build_tiny("qwen2_5_vl", tmp_path / "model")
    expected = expected_digests(folder, torch.bfloat16)
    config = ds_config(2, bf16=True, stage=2)
    assert run_on_ranks(load_and_digest, 2, str(folder), torch.bfloat16, config, True) == [expected] * 2


def anonymous_bytes() -> int:
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) * 1024


def load_and_watch_memory(folder: str, dtype: torch.dtype, world_size: int) -> dict[str, int]:
    """Growth of this rank's anonymous memory while it loads: the highest seen (sampled every ms) and at the end."""
    from dsreason.runtime.world import init_world

    init_world()
    import dsreason.models.partition  # noqa: F401  what is imported does not count as loading
    from dsreason.models.load import load_model

    seen, stop = [anonymous_bytes()], threading.Event()

    def watch() -> None:
        while not stop.wait(0.001):
            seen.append(anonymous_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    model = load_model(Path(folder), dtype=dtype, deepspeed=ds_config(world_size, bf16=dtype == torch.bfloat16))
    stop.set()
    watcher.join()
    total = sum(p.ds_numel * p.element_size() for p in model.parameters())
    return {
        "model": total,
        "samples": len(seen),
        "peak": max(seen) - seen[0],
        "end": anonymous_bytes() - seen[0],
    }


def test_no_rank_grows_by_half_of_a_1_gb_model_while_loading(tmp_path: Path) -> None:
    from dsreason.models.tiny import build_tiny

    folder = build_tiny("qwen3_vl", tmp_path / "model", hidden_size=2048, intermediate_size=8192, num_layers=4)
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    assert size > 0.9e9
    for rank in run_on_ranks(load_and_watch_memory, 4, str(folder), torch.float32, 4):
        print(rank)
        assert rank["model"] > 0.9e9
        assert rank["samples"] > 20
        assert rank["end"] > rank["model"] / 5  # a quarter is there: the measure sees the partitions
        assert rank["peak"] < rank["model"] / 2
