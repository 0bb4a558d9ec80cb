"""The self-test at the start: a healthy engine passes at both sleep levels, and every fault is reported on every rank.

This file tests the transformers engine; `test_vllm_engine.py` tests vLLM in the same way.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.distributed import run_on_ranks

pytestmark = pytest.mark.integration

NORM = "model.language_model.norm.weight"


@pytest.fixture(scope="module")
def found(tiny_qwen3_vl: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_on_ranks(explore, 2, tiny_qwen3_vl, tmp_path_factory.mktemp("self_test"))


# ---------------------------------------------------------------- on the ranks


def explore(path: Path, folder: Path) -> dict[str, Any]:
    from dsreason.config.schema import SFTConfig
    from dsreason.job.ranks import init_world
    from dsreason.models.load import load_model
    from dsreason.rollout.transformers_engine import TransformersEngine
    from dsreason.train.common.preflight import build_encoder
    from tests.integration.test_vllm_engine import make_prompts

    world = init_world()
    encoder = build_encoder(SFTConfig(), path)
    prompts = make_prompts(encoder, folder / f"media_{world.rank}")
    model = load_model(path, dtype=torch.float32)
    engine = TransformersEngine(path, encoder.processor.tokenizer, dtype=torch.float32, device=world.device)
    inv_freq = "model.language_model.rotary_emb.inv_freq"
    return explore_self_test(
        engine,
        lambda: iter(model.named_parameters()),
        [prompts["text"], prompts["image"]],
        norm=lambda: engine.model.get_parameter(NORM),
        buffer=lambda: engine.model.get_buffer(inv_freq),
        faulty=world.rank == 1,
    )


def explore_self_test(
    engine: Any,
    weights: Callable[[], Iterator[tuple[str, Tensor]]],
    prompts: list[Any],
    *,
    norm: Callable[[], Tensor],
    buffer: Callable[[], Tensor],
    faulty: bool,
) -> dict[str, Any]:
    """Return the results of self-tests of healthy engines, and the errors of faulty engines.

    The faults: nothing is synced, or `norm` or `buffer` is not restored. In one case only the `faulty` rank has the fault.
    """
    from dsreason.rollout.protocol import Sampling
    from dsreason.rollout.self_test import run_self_test
    from tests.integration.test_vllm_engine import failure, generators

    def test() -> Any:
        tested = run_self_test(engine, weights, prompts, max_completion_length=8)
        return tested.completions, sum(map(len, tested.tensors))

    def after(method: str, call: int, change: Callable[[], Any]) -> tuple[str, str]:
        """Return the self-test's report if `change` runs after each call of the engine's given method."""
        original, calls = getattr(engine, method), []

        def changed(*args: Any, **kwargs: Any) -> None:
            original(*args, **kwargs)
            calls.append(args)
            if len(calls) == call:
                with torch.no_grad():
                    change()

        with mock.patch.object(engine, method, changed):
            return failure(test)

    def stamp(sent: Iterator[tuple[str, Tensor]], version: int) -> None:
        for _ in sent:
            pass
        engine.version = version

    before = generators()
    result: dict[str, Any] = {"sound": test(), "keeps weights": engine.keeps_weights}
    result["leaves the trainer's state"] = before == generators()
    result["asks for it"] = failure(lambda: engine.generate(prompts, Sampling(), version=0))
    with mock.patch.object(engine, "sync", stamp):
        result["only stamped"] = failure(test)
    result["stuck"] = after("sync", 3, lambda: norm().mul_(0.5).add_(0.01))
    result["one rank"] = after("sync", 3, lambda: norm().mul_(0.5 if faulty else 1))
    result["buffer"] = after("wake", 3, lambda: buffer().mul_(0.5))
    engine.wake()
    buffer().mul_(2)
    engine.sleep()
    if engine.keeps_weights:
        result["forgotten"] = after("wake", 4, lambda: norm().zero_())
    return result | {"mended": test()}


# ---------------------------------------------------------------- what must hold of either engine


def check_sound(rank: dict[str, Any]) -> None:
    from dsreason.rollout.self_test import compute_largest_difference

    (sound, num_tensors), (mended, _) = rank["sound"], rank["mended"]
    assert num_tensors > 50
    assert all(len(completion.ids) > 1 for completion in sound)
    assert compute_largest_difference(sound, mended) <= 1e-6
    assert rank["leaves the trainer's state"]
    assert rank["asks for it"][0] == "StaleWeightsError"


def check_faults(rank: dict[str, Any], *, buffer: str) -> None:
    assert all(rank[fault][0] == "SyncError" for fault in ("only stamped", "stuck", "one rank", "buffer"))
    match = re.search(r"a sync of changed weights left (\d+) of (\d+) tensors unchanged: ", rank["only stamped"][1])
    assert match and match[1] == match[2] and "model.visual.patch_embed.proj.weight" in rank["only stamped"][1]
    when = "after perturbing, sleeping, waking and syncing, 1 tensors changed: "
    assert f"{when}{NORM}" in rank["stuck"][1]
    assert f"{when}{NORM}" in rank["one rank"][1]
    assert f"1 tensors changed: {buffer}" in rank["buffer"][1]
    if rank["keeps weights"]:
        assert rank["forgotten"][0] == "SyncError"
        assert f"after sleeping and waking without a sync, 1 tensors changed: {NORM}" in rank["forgotten"][1]


# ---------------------------------------------------------------- tests


def test_healthy_engine_passes_self_test_and_stays_asleep(found: list[dict[str, Any]]) -> None:
    for rank in found:
        check_sound(rank)
        assert rank["keeps weights"]
        assert rank["asks for it"][1].endswith("the engine holds no weights; call sync before generate")


def test_every_fault_is_reported_on_every_rank(found: list[dict[str, Any]]) -> None:
    for rank in found:
        check_faults(rank, buffer="model.language_model.rotary_emb.inv_freq")
        assert rank["stuck"][1].endswith("(rank 0, 1)")
        assert rank["one rank"][1].endswith("(rank 1)")
