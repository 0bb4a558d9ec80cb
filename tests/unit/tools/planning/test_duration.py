"""Predicted step times, compared with hand-computed values and with measurements on an H200."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dsreason.monitor.flops import Work
from dsreason.tools.planning.duration.estimate import (
    Duration,
    FlopsModel,
    Load,
    compute_exchange_seconds,
    estimate_duration,
    time_optimizer_step,
)
from dsreason.tools.planning.duration.rates import CARDS, GB, H200, find_card
from dsreason.tools.planning.plan import plan_run
from dsreason.tools.planning.request import Machine, PlanRequest
from tests.unit.tools.planning.made_requests import grpo, sft

TWO = "nvidia/Cosmos-Reason2-2B"


def on_h200(request: PlanRequest, load: Load, gpus: int = 1) -> Duration:
    request.machine = Machine(gpus, 141.0)
    return estimate_duration(plan_run(request), H200, load)


def sft_2b(gpus: int = 1, ds_config: str = "zero3.json", **train: Any) -> PlanRequest:
    settings = {"global_batch_size": 64 * gpus, "max_tokens_per_micro_batch": 16_384} | train
    return sft(TWO, gpus, ds_config, train=settings, model={"max_length": 2048})


@pytest.mark.parametrize(
    ("ds_config", "tokens_per_sample", "measured"),
    [("zero3.json", 273, 1.37), ("zero2.json", 432, 1.16)],  # 17,500 and 27,641 tokens per step
)
def test_sft_step_time_is_close_to_measurement(ds_config: str, tokens_per_sample: int, measured: float) -> None:
    duration = on_h200(sft_2b(ds_config=ds_config), Load(tokens_per_sample, media_share=0.1))
    assert duration.seconds == pytest.approx(measured, rel=0.25)
    assert duration.tokens == 64 * tokens_per_sample


def test_grpo_step_time_is_close_to_measurement() -> None:
    request = grpo(
        TWO,
        1,
        model={"max_length": 2048},
        train={"max_tokens_per_micro_batch": 16_384},
        grpo={"prompts_per_step": 16, "num_generations": 8, "kl_coef": 0.0},
        rollout={"gpu_memory_utilization": 0.4, "max_completion_length": 256, "offload": "always"},
    )
    duration = on_h200(request, Load(200))
    assert duration.seconds == pytest.approx(5.65, rel=0.25)  # 5.8 and 5.5 s
    seconds = {phase.name: phase.seconds for phase in duration.phases}
    assert seconds["offload and reload"] == pytest.approx(1.0, rel=0.2)
    assert seconds["rollout: completions"] == pytest.approx(1.65, rel=0.2)


def test_reference_logprobs_take_an_extra_forward() -> None:
    with_kl, without = (
        on_h200(grpo(TWO, 1, grpo={"kl_coef": kl, "prompts_per_step": 8}, model={"max_length": 2048}), Load(200))
        for kl in (0.1, 0.0)
    )
    extra = [phase.name for phase in with_kl.phases if phase not in without.phases]
    assert extra == ["log-probabilities before training"]


def test_planned_flops_match_flops_used_for_mfu() -> None:
    """Use samples without media: 6 FLOPs per matrix value and token, plus a second forward pass for recomputation."""
    request = sft_2b()
    model = FlopsModel(request)
    work = model.build_work(4096, 1024, Load(1024, media_share=0.0))
    assert work == Work([(1024, 0)] * 4, 4096, [])
    assert model.compute_training_flops(work) == pytest.approx(model.whole.step(work) * 4 / 3)


@pytest.mark.parametrize("gpus", [2, 8])
def test_gpus_of_a_host_share_the_work(gpus: int) -> None:
    item, several = (on_h200(sft_2b(count), Load(273), count) for count in (1, gpus))
    assert 1.7 * gpus / 2 <= several.tokens_per_second / item.tokens_per_second <= 1.1 * gpus


def test_slow_network_limits_training_on_many_hosts() -> None:
    fast, slow = (on_h200(sft_2b(1024), Load(273, network=rate * GB), 1024) for rate in (50, 0.5))
    assert fast.slowest_phase.limit != "network" and slow.slowest_phase.limit == "network"
    assert slow.seconds > 5 * fast.seconds


def test_exchange_gathers_twice_and_reduces_once() -> None:
    """Use 2 GPUs at 1 GB/s, each of which sends half of the data: 2 x 2 bytes per weight and 4 per gradient."""
    request = sft_2b(2)
    numel = request.parameters.numel
    seconds = compute_exchange_seconds(request, replace(H200, between_gpus=GB), Load(273))
    assert seconds == pytest.approx(8 * numel / 2 / GB)


def test_offloaded_optimizer_waits_for_host_memory() -> None:
    request = sft_2b(ds_config="zero3_offload.json")
    step = time_optimizer_step(request, replace(H200, host_update=30 * GB))
    assert (step.seconds, step.limit) == (pytest.approx(request.parameters.num_trained / GB), "host memory")


@pytest.mark.parametrize(
    ("train", "rows", "steps"), [({"max_steps": 10}, None, 10), ({"epochs": 3}, 130, 9), ({}, None, None)]
)
def test_run_length_requires_number_of_steps(train: dict[str, Any], rows: int | None, steps: int | None) -> None:
    duration = on_h200(sft_2b(**train), Load(273, num_samples=rows))
    assert duration.steps == steps
    assert duration.hours == (None if steps is None else pytest.approx(steps * duration.seconds / 3600))


@pytest.mark.parametrize(
    ("name", "memory", "card"),
    [
        ("NVIDIA H200", 141, "h200"),
        ("NVIDIA H100 80GB HBM3", 80, "h100"),
        ("", 80, "h100"),
        ("", 48, "l40s"),
        ("", 192, "b200"),
    ],
)
def test_card_is_found_by_name_or_memory(name: str, memory: float, card: str) -> None:
    assert find_card(name, memory) == card and card in CARDS
