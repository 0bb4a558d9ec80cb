"""Training state moves to the host and back on real ranks, and training continues as if nothing had happened."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.distributed import run_on_ranks
from tests.integration.test_engine import TinyLM, ds_config, run_step, samples

pytestmark = pytest.mark.integration

CASES = (
    *(("zero1", True), ("zero2", False), ("zero3", False), ("zero3", True)),
    *(("zero3_offload", True), ("zero3_offload_optimizer", True)),
)
"""DeepSpeed file, and whether bf16 is used. On a CPU, the state that `zero3_offload` keeps on the host is moved as well."""
WITH_GRADIENTS = {"zero1", "zero3", "zero3_offload", "zero3_offload_optimizer"}
"""DeepSpeed files with which gradient buffers persist between steps."""


def build(name: str, bf16: bool) -> Any:
    from dsreason.config.schema import OptimConfig
    from dsreason.engine.engine import build_engine

    config = ds_config("zero2" if name == "zero1" else name, bf16=bf16, clip=0.1)
    config["zero_optimization"] |= {"reduce_bucket_size": 1000} | ({"stage": 1} if name == "zero1" else {})
    if name == "zero3_offload_optimizer":
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    return build_engine(TinyLM(), OptimConfig(lr=0.01), config)


def train(engine: Any, world: Any, num_steps: int) -> list[float]:
    from dsreason.engine.engine import get_grad_norm

    norms = []
    for _ in range(num_steps):
        run_step(engine, world, samples(), 1)
        engine.step()
        norms.append(get_grad_norm(engine))
    return norms


def bits(tensors: list[Tensor]) -> list[np.ndarray]:
    return [
        tensor.detach().clone().view(torch.uint8).numpy() for tensor in tensors
    ]  # memory that a numpy array refers to cannot be freed


def weights(engine: Any, master: bool = False) -> list[np.ndarray]:
    from dsreason.engine.engine import iter_full_parameters

    return [bits([tensor])[0] for _, tensor in iter_full_parameters(engine, master=master)]


def same(a: list[np.ndarray], b: list[np.ndarray]) -> bool:
    return len(a) == len(b) and all(map(np.array_equal, a, b))


AMOUNTS = {"nothing": (False, 0), "gradients": (True, 0), "one moment": (True, 1), "everything": (True, 2**40)}
"""Name → whether gradient buffers are dropped, and the number of bytes that must move."""


def train_with_trips(case: tuple[str, bool], world: Any, amount: tuple[bool, int]) -> dict[str, Any]:
    """Train three steps, with a rollout after each of them."""
    from dsreason.engine.offload import StateOffload
    from dsreason.engine.rollout_memory import OffloadAmount

    engine = build(*case)
    offload = StateOffload(engine, "cpu", OffloadAmount(*amount))
    measured: dict[str, Any] = {"norms": [], "line": offload.describe(), "same bits": True}
    for _ in range(3):
        measured["norms"] += train(engine, world, 1)
        state = [*offload.list_moments(), *offload.list_masters()]
        before = bits(state)
        offload.offload()
        measured["away"] = [tensor.untyped_storage().nbytes() == 0 for tensor in state]
        measured["gradients away"] = [tensor.untyped_storage().nbytes() == 0 for tensor in offload.list_gradients()]
        offload.reload()
        measured["same bits"] &= same(bits(state), before)
    return measured | {"num moments": len(offload.list_moments()), "weights": weights(engine, master=True)}


def there_and_back(engine: Any) -> dict[str, Any]:
    """Measure two offloads with reloads, as for rollouts, during which only the weights are read."""
    from dsreason.engine.offload import StateOffload

    offload = StateOffload(engine, device_type="cpu")
    remaining, gradients = [*offload.list_masters(), *offload.list_moments()], offload.list_gradients()
    before, policy = bits(remaining), weights(engine)
    result: dict[str, Any] = {
        "announced": sum(offload.measure_sizes().values()),
        "freed": sum(tensor.nbytes for tensor in [*remaining, *gradients]),
        "copied": sum(tensor.nbytes for tensor in remaining),
        "same bits": [],
        "gradients": [],
        "host memory": set(),
    }
    for _ in range(2):
        offload.offload()
        offload.offload()
        result["bytes left"] = sum(tensor.untyped_storage().nbytes() for tensor in [*remaining, *gradients])
        result["weights readable"] = same(weights(engine), policy)
        pieces = [piece for buffer in offload.host.values() for piece in buffer.pieces]
        result["host memory"].add((sum(piece.nbytes for piece in pieces), *(piece.data_ptr() for piece in pieces)))
        offload.reload()
        offload.reload()
        result["same bits"].append(same(bits(remaining), before))
        result["gradients"].append([float(tensor.abs().max()) for tensor in gradients])
    return result


def lines(engine: Any) -> dict[str, str]:
    """Return the offload message of a run on a CPU, on a GPU whose entire state is moved, and when no state is on the GPU."""
    from dsreason.engine.offload import StateOffload

    with mock.patch.object(engine, "device", torch.device("cuda")):
        elsewhere = StateOffload(engine).describe()
    return {
        "CPU": StateOffload(engine).describe(),
        "all moves": StateOffload(engine, device_type="cpu").describe(),
        "all elsewhere": elsewhere,
    }


def explore() -> dict[tuple[str, bool], dict[str, Any]]:
    from deepspeed.utils import safe_get_full_optimizer_state

    from dsreason.engine.offload import StateOffload
    from dsreason.job.ranks import init_world

    world, result = init_world(), {}
    for case in CASES:
        engine, other = build(*case), build(*case)
        trips, norms = [], []
        for _ in range(3):  # the optimizer has no moments yet when the first of these offloads happens
            trips.append(there_and_back(engine))
            norms += train(engine, world, 2)
        expected = train(other, world, 6)
        moments = [  # DeepSpeed's functions return the moments in this form
            [bits([safe_get_full_optimizer_state(e.module.up.weight, name)])[0] for name in ("exp_avg", "exp_avg_sq")]
            for e in (engine, other)
        ]
        on_cpu = StateOffload(other)
        on_cpu.offload()
        moved_on_cpu = len(on_cpu.away)
        on_cpu.reload()
        result[case] = {
            "trips": trips,
            "norms": (norms, expected),
            "weights": same(weights(engine, master=True), weights(other, master=True)),
            "moments": same(*moments),
            "moved on a CPU": moved_on_cpu,
            "lines": lines(engine),
            "amounts": {name: train_with_trips(case, world, amount) for name, amount in AMOUNTS.items()},
        }
    return result


@pytest.fixture(scope="module")
def found() -> list[dict[tuple[str, bool], dict[str, Any]]]:
    return run_on_ranks(explore, 2)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_offload_frees_all_and_restores_exact_bits(found: Any, case: tuple[str, bool]) -> None:
    for measured in found:
        for trip in measured[case]["trips"]:
            assert trip["bytes left"] == 0
            assert trip["weights readable"] and trip["same bits"] == [True, True]
            assert len(trip["host memory"]) == 1  # the second offload reuses the same host memory


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradient_buffers_are_zeroed_without_host_copy(found: Any, case: tuple[str, bool]) -> None:
    for measured in found:
        for trip in measured[case]["trips"]:
            assert all(largest == 0.0 for trip_gradients in trip["gradients"] for largest in trip_gradients)
            assert bool(trip["gradients"][0]) == (case[0] in WITH_GRADIENTS)
            assert {size for size, *_ in trip["host memory"]} == {trip["copied"]}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_offload_between_steps_does_not_change_training(found: Any, case: tuple[str, bool]) -> None:
    for measured in found:
        norms, expected = measured[case]["norms"]
        assert norms == expected
        assert len(set(norms)) == 6
        assert measured[case]["weights"] and measured[case]["moments"]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_announced_sizes_equal_moved_sizes(found: Any, case: tuple[str, bool]) -> None:
    for measured in found:
        for trip in measured[case]["trips"][1:]:  # at the first offload, there are no moments yet
            assert trip["announced"] == trip["freed"]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_run_reports_offloaded_and_remaining_state(found: Any, case: tuple[str, bool]) -> None:
    assert found[0][case]["moved on a CPU"] == 0
    message = found[0][case]["lines"]
    assert message["CPU"] == "offload during rollouts: none, because training runs on CPU"
    gradients = (
        "; freed until the next step: gradient buffers 0.00 GiB"
        if case[0] in WITH_GRADIENTS
        else "moments 0.00 GiB; remaining"
    )
    for text in ("master weights 0.00 GiB", "moments 0.00 GiB", gradients, "remaining on the GPU: weights 0.00 GiB"):
        assert text in message["all moves"]
    assert "nothing; already on the host: master weights, moments" in message["all elsewhere"]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("amount", [name for name in AMOUNTS if name != "everything"])
def test_partial_offload_trains_like_full_offload(found: Any, case: tuple[str, bool], amount: str) -> None:
    for measured in found:
        partial, full = measured[case]["amounts"][amount], measured[case]["amounts"]["everything"]
        assert partial["norms"] == full["norms"]
        assert same(partial["weights"], full["weights"])
        assert partial["same bits"] and full["same bits"]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_partial_offload_moves_entire_tensors_in_order(found: Any, case: tuple[str, bool]) -> None:
    for measured in found:
        amounts = measured[case]["amounts"]
        num_tensors = len(amounts["everything"]["away"])
        assert amounts["nothing"]["away"] == amounts["gradients"]["away"] == [False] * num_tensors
        assert amounts["one moment"]["away"] == [True] + [False] * (num_tensors - 1)
        assert amounts["everything"]["away"] == [True] * num_tensors
        assert not any(amounts["nothing"]["gradients away"])
        assert all(amounts["gradients"]["gradients away"])


def test_partial_offload_reports_remaining_state(found: Any) -> None:
    """Compare only names, because TinyLM's master weights on one of two ranks take only a few hundred bytes."""
    amounts = found[0]["zero3", True]["amounts"]
    assert "pinned host memory: nothing; remaining on the GPU: weights" in amounts["nothing"]["line"]
    assert "gradient buffers" in amounts["nothing"]["line"].partition("remaining on the GPU")[2]
    assert "pinned host memory: moments" in amounts["one moment"]["line"]
    assert "gradient buffers" not in amounts["one moment"]["line"].partition("remaining on the GPU")[2]
