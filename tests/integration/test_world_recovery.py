"""World models on hosts with copies of the weights, runs whose ranks are killed, and long runs that are resumed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.distributed import run_on_ranks
from tests.integration.test_world import FLOW, FULL, RUN, exported, run_world, values

pytestmark = [pytest.mark.integration, pytest.mark.long]

SHORT: dict[str, Any] = {
    "train.max_steps": 2,
    "train.ema_decay": 0.5,
    "world.kl_coef": 0.1,
    "world.prompts_per_step": 4,
    "world.sampling_steps": 2,
    "validation.max_samples": 0,
    "checkpoint.every": 1,
    "checkpoint.keep_best": "false",
    "model.gradient_checkpointing": "false",
}
HOSTS = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 1000, "zero_hpz_partition_size": 2}}


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run `plain/` on four ranks; `copies/` on four ranks that act as two hosts, each with a copy of the weights; and
    `resumed/` from the first step of `copies/`."""
    folder = tmp_path_factory.mktemp("hosts")
    (folder / "run.toml").write_text(RUN)
    settings = folder / "copies.json"
    settings.write_text(json.dumps(HOSTS))
    copies = SHORT | {"deepspeed": json.dumps(str(settings))}
    run_on_ranks(run_world, 4, str(folder), "plain", None, SHORT)
    run_on_ranks(run_world, 4, str(folder), "copies", None, copies)
    run_on_ranks(run_world, 4, str(folder), "resumed", "copies/checkpoints/step_1", copies)
    return folder


@pytest.mark.nightly
def test_per_host_weight_copies_preserve_results(hosts: Path) -> None:
    """Include the reference of the KL term and the average, which temporarily replace the weights."""
    assert values(hosts / "copies") == values(hosts / "plain")
    assert values(hosts / "copies")[1]["policy/kl"] > 0
    plain, copies = exported(hosts / "plain", FULL), exported(hosts / "copies", FULL)
    assert all(copies[name].equal(value) for name, value in plain.items())


@pytest.mark.nightly
def test_run_with_copies_resumes_and_exports_exactly(hosts: Path, tmp_path: Path) -> None:
    from dsreason.cli.export import export

    assert values(hosts / "resumed") == values(hosts / "copies", after=1)
    full = exported(hosts / "copies", FULL)
    export(checkpoint=hosts / "resumed", output=tmp_path / "out", dtype="fp32")
    for result in (exported(hosts / "resumed", FULL), load_file(tmp_path / "out" / FULL)):
        assert result.keys() == full.keys()
        assert all(result[name].equal(value) for name, value in full.items())


SIX = FLOW | {
    "train.max_steps": 6,
    "world.optimizer_steps_per_rollout": 1,
    "world.window": 1,
    "world.trained_steps": "null",
}


@pytest.fixture(scope="module")
def six(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run `six/` on two ranks; from its third step, `resumed/` on two ranks and `alone/` on one; and `again/` on two ranks
    from the fifth step of `alone/`."""
    folder = tmp_path_factory.mktemp("six")
    (folder / "run.toml").write_text(RUN)
    run_on_ranks(run_world, 2, str(folder), "six", None, SIX | {"checkpoint.every": 3})
    run_on_ranks(run_world, 2, str(folder), "resumed", "six/checkpoints/step_3", SIX | {"checkpoint.every": 3})
    run_on_ranks(run_world, 1, str(folder), "alone", "six/checkpoints/step_3", SIX | {"checkpoint.every": 1})
    run_on_ranks(run_world, 2, str(folder), "again", "alone/checkpoints/step_5", SIX | {"checkpoint.every": 3})
    return folder


def test_interrupted_run_resumes_exactly(six: Path) -> None:
    assert values(six / "resumed") == values(six / "six", after=3)
    full, resumed = exported(six / "six", FULL), exported(six / "resumed", FULL)
    assert full.keys() == resumed.keys()
    assert all(full[name].equal(resumed[name]) for name in full)


@pytest.mark.parametrize(("name", "after"), [("alone", 3), ("again", 5)])
def test_run_resumes_on_different_number_of_ranks(name: str, after: int, six: Path) -> None:
    """Allow for rounding, because sums are computed in a different order."""
    full, result = values(six / "six", after=after), values(six / name)
    for item, two in zip(result, full, strict=True):
        for key in ("reward/mean", "clips/diversity", "policy/kl", "train/grad_norm"):
            assert item[key] == pytest.approx(two[key], rel=2e-3, abs=1e-7), (key, item["step"])
    expected = exported(six / "six", FULL)
    for key, value in exported(six / name, FULL).items():
        torch.testing.assert_close(value, expected[key], atol=2e-4, rtol=1e-2)
