"""GRPO on one real GPU: who of trainer and vLLM has its memory, how fast it changes hands, and that none is lost."""

from __future__ import annotations

import gc
import math
import multiprocessing as mp
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from dsreason.config.schema_grpo import OffloadMode
from dsreason.monitor.memory import GIB
from tests.integration.command import dsreason, metrics
from tests.integration.rows import write_mixed_rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]

TWO_BILLION = {"hidden_size": 2048, "num_layers": 34, "intermediate_size": 8192}
"""Sizes of a model with 2.01e9 parameters."""
UTILIZATION = 0.4
"""Share of the GPU that vLLM may use."""
SPACE = 40 * GIB
"""GPU memory that a policy of `TWO_BILLION` parameters and vLLM need together, in bytes."""
ALL_FITS = 75 * GIB
"""GPU memory that holds 34 GiB of training state, a margin of about 4 and vLLM's share."""
PER_PARAMETER = {"zero2.json": 12, "zero3.json": 16, "zero3_offload.json": 0}
"""Bytes that leave the GPU for each parameter: master weight and two moments, at stage 3 its gradient too."""

RUN = """
[model]
path = "{model}"
[data]
adapter = "jsonl"
path = "{rows}"
workers = 1
vision.fps = 4.0
[optim]
lr = 1e-4
[train]
epochs = 20
max_steps = 20
micro_batch_size = 8
[grpo]
prompts_per_step = 6
num_generations = 4
[rollout]
gpu_memory_utilization = 0.3
max_completion_length = 16
[reward.functions]
"rewards.py:vowels" = 1.0
[validation]
before_training = false
generate = false
[checkpoint]
every = 0
export = "none"
"""
REWARD = "def vowels(completion, sample):\n    return sum(letter in 'aeiou' for letter in completion)\n"


def in_own_process(fn: Callable[..., Any], *args: object) -> Any:
    """The result of `fn(*args)`. DeepSpeed's groups and vLLM's memory pool live as long as their process."""
    with ProcessPoolExecutor(1, mp_context=mp.get_context("spawn")) as pool:
        return pool.submit(fn, *args).result()


# ---------------------------------------------------------------- vLLM beside a policy


def hand_over(folder: Path, sizes: dict[str, int], mode: OffloadMode) -> dict[str, Any]:
    """Three rollouts' worth of handing memory to vLLM and back. Numbers of GiB are the driver's."""
    from dsreason.config.deepspeed import resolve_deepspeed
    from dsreason.config.schema import SFTConfig
    from dsreason.job.ranks import init_world, shutdown
    from dsreason.models.tiny import build_tiny
    from dsreason.monitor.memory import MemoryLedger, count_used_bytes
    from dsreason.rollout.vllm_arguments import VLLMSettings
    from dsreason.rollout.vllm_engine import VLLMEngine
    from dsreason.train.common.opening import build_policy_engine
    from dsreason.train.common.preflight import build_encoder
    from dsreason.train.common.sampler import BUCKET_MB, Sampler, open_offload

    world, config = init_world(), SFTConfig()
    build_tiny("qwen3_vl", folder, dtype=torch.bfloat16, **sizes)
    deepspeed = resolve_deepspeed("zero3.json", config, device=world.device.type, world_size=world.size)
    policy = build_policy_engine(config, deepspeed, folder)
    offload = open_offload(policy, mode, UTILIZATION, int(BUCKET_MB * 2**20), world.size)
    ledger = MemoryLedger(world.device)
    offload.offload()
    alone = count_used_bytes(world.device) / GIB
    engine = VLLMEngine(
        folder,
        build_encoder(config, folder).processor.tokenizer,
        world,
        VLLMSettings(max_model_len=1024, gpu_memory_utilization=UTILIZATION),
        dtype=torch.bfloat16,
    )
    offload.reload()
    sampler, result = Sampler(engine, policy, offload, ledger), []
    for version in range(3):  # the first one also warms up
        with sampler.awake(version):
            pass
        result.append(ledger.take())
    engine.shutdown()
    shutdown()
    return {
        "alone": alone,
        "moved": len(offload.host),
        "dropped": offload.amount.drop_gradients,
        "awake": [values["memory/generate/device_gib"] for values in result],
        "asleep": [values["memory/sleep/device_gib"] for values in result],
        "seconds": [values["memory/wake/seconds"] + values["memory/sync/seconds"] for values in result],
    }


@pytest.fixture(scope="module", params=["always", "auto"])
def handed_over(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    total = torch.cuda.get_device_properties(0).total_memory
    if total < SPACE:
        pytest.skip(f"a model of 2e9 parameters and vLLM need {SPACE / GIB:.0f} GiB, the GPU has {total / GIB:.0f}")
    folder = tmp_path_factory.mktemp("large") / "model"
    return in_own_process(hand_over, folder, TWO_BILLION, request.param) | {"mode": request.param, "total": total}


def test_sleeping_engine_releases_gpu_memory(handed_over: dict[str, Any]) -> None:
    total = torch.cuda.get_device_properties(0).total_memory / GIB
    for awake, asleep in zip(handed_over["awake"], handed_over["asleep"], strict=True):
        held = awake - handed_over["alone"]
        assert held > 0.5 * UTILIZATION * total
        assert awake - asleep >= 0.9 * held


def test_only_needed_state_leaves_the_gpu(handed_over: dict[str, Any]) -> None:
    if handed_over["mode"] == "auto" and handed_over["total"] < ALL_FITS:
        pytest.skip(f"training state and vLLM's share need {ALL_FITS / GIB:.0f} GiB")
    moves = handed_over["mode"] == "always"
    assert bool(handed_over["moved"]) is moves
    assert handed_over["dropped"] is moves


def test_engine_wakes_and_syncs_within_two_seconds(handed_over: dict[str, Any]) -> None:
    assert min(handed_over["seconds"]) < 2.0, handed_over["seconds"]


# ---------------------------------------------------------------- the optimizer's state


def there_and_back(deepspeed: str) -> dict[str, Any]:
    """Bytes and bits around one trip of the state of a trained stack of matrices."""
    from dsreason.config.deepspeed import resolve_deepspeed
    from dsreason.config.schema import SFTConfig
    from dsreason.engine.engine import build_engine, get_grad_norm
    from dsreason.engine.offload import StateOffload
    from dsreason.job.ranks import init_world, shutdown
    from dsreason.monitor.memory import count_used_bytes

    world, config = init_world(), SFTConfig()
    model = torch.nn.Sequential(*(torch.nn.Linear(4096, 4096) for _ in range(8)))
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    ds_config = resolve_deepspeed(deepspeed, config, device=world.device.type, world_size=world.size)
    engine = build_engine(model, config.optim, ds_config)

    def step() -> float:
        rows = torch.randn(4, 4096, device=world.device, dtype=torch.bfloat16)
        engine.set_gradient_accumulation_boundary(True)
        engine.backward(engine(rows).float().square().mean(), scale_wrt_gas=False)
        engine.step()
        return get_grad_norm(engine)

    def bytes_held() -> tuple[int, int]:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated(), count_used_bytes(world.device)

    step()
    step()
    offload = StateOffload(engine)
    state = [*offload.list_masters(), *offload.list_moments()]
    bits, announced, before = (
        [tensor.cpu().clone() for tensor in state],
        sum(offload.measure_sizes().values()),
        bytes_held(),
    )
    offload.offload()
    away = bytes_held()
    offload.reload()
    after = bytes_held()
    same = [torch.equal(tensor.cpu(), remaining) for tensor, remaining in zip(state, bits, strict=True)]
    result = {
        "num_parameters": num_parameters,
        "announced": announced,
        "freed": before[0] - away[0],
        "freed on the device": before[1] - away[1],
        "grown": after[0] - before[0],
        "same": same,
        "line": offload.describe(),
        "norm": step(),
    }
    shutdown()
    return result


@pytest.mark.parametrize("deepspeed", list(PER_PARAMETER))
def test_offloaded_state_is_restored_exactly(deepspeed: str) -> None:
    result = in_own_process(there_and_back, deepspeed)
    assert result["freed"] >= PER_PARAMETER[deepspeed] * result["num_parameters"]
    assert result["freed"] == pytest.approx(result["announced"], rel=0.01)
    assert result["freed on the device"] >= 0.9 * result["announced"]
    assert abs(result["grown"]) < 2**20
    assert all(result["same"])
    assert math.isfinite(result["norm"])
    assert ("already on the host" in result["line"]) == (deepspeed == "zero3_offload.json")


# ---------------------------------------------------------------- a run


def test_memory_stops_growing_after_eight_steps(tmp_path: Path, tiny_qwen3_vl: Path) -> None:
    rows = write_mixed_rows(tmp_path / "data")
    (tmp_path / "run.toml").write_text(RUN.format(model=tiny_qwen3_vl, rows=rows))
    (tmp_path / "rewards.py").write_text(REWARD)
    ended = dsreason("grpo", "--config", "run.toml", "--nproc", 1, "--output-dir", "D", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    steps = [line for line in metrics(tmp_path / "D") if "memory/train/allocated_gib" in line]
    assert len(steps) == 20
    for name, margin in (("allocated", 8 / 1024), ("device", 0.25)):
        held = [line[f"memory/train/{name}_gib"] for line in steps]
        assert max(held[12:]) <= max(held[2:8]) + margin, (name, held)
