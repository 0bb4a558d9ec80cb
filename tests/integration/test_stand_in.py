"""Training on a stand-in for a GPU: no operation mixes devices, and the results equal those of the CPU.

DeepSpeed with its CUDA accelerator, the models and the runs are real; only tensors on the device are in host memory, and
reject operations with tensors on the CPU. Eager attention runs the same kernels on both devices, so all results must be equal
bit for bit.
"""

from __future__ import annotations

import linecache
import multiprocessing as mp
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from safetensors.torch import load_file

from tests.integration.rows import write_mixed_rows
from tests.stand_in import scenarios

pytestmark = [pytest.mark.integration, pytest.mark.long]

ALGORITHMS = [
    {"preset": "grpo", "correction": "none", "kl_coef": 0.1, "kl_estimator": "k1", "entropy_coef": 0.01},
    {"preset": "dr_grpo", "correction": "token_truncate", "kl_coef": 0.1, "kl_estimator": "k2"},
    {"preset": "dapo", "correction": "token_mask", "kl_coef": 0.1, "kl_estimator": "k3", "dual_clip": 3.0},
    {"preset": "gspo", "correction": "sequence_truncate", "kl_coef": 0.1, "kl_estimator": "bias_corrected_k3"},
    {"preset": "cispo", "correction": "sequence_mask", "kl_coef": 0.0},
    {"preset": "dapo", "correction": "geometric_mask", "kl_coef": 0.0},
]
SFT = """
[model]
path = "{model}"
[data]
adapter = "jsonl"
path = "{rows}"
workers = 0
validation = 2
vision.fps = 4.0
[optim]
lr = 3e-3
warmup = 0
[train]
max_steps = 2
epochs = 2
global_batch_size = 4
micro_batch_size = 2
precision = "fp32"
[validation]
before_training = false
max_completion_length = 6
[checkpoint]
every = 1
"""
GRPO = """
[model]
path = "{model}"
[data]
adapter = "jsonl"
path = "{rows}"
workers = 0
vision.fps = 4.0
[optim]
lr = 3e-3
warmup = 0
[train]
max_steps = 2
micro_batch_size = 6
precision = "fp32"
[grpo]
prompts_per_step = 4
num_generations = 3
optimizer_steps_per_rollout = 2
kl_coef = 0.05
reference_reset_every = 2
[rollout]
engine = "transformers"
max_completion_length = 6
temperature = 0.9
[reward.functions]
"rewards.py:vowels" = 1.0
[validation]
before_training = false
generate = false
[checkpoint]
every = 0
"""
FIRST = ("train/loss", "train/grad_norm")
"""Metrics compared in the first step; later steps also contain the effects of rounding."""
REWARDS = "def vowels(completion, sample):\n    return sum(letter in 'aeiou' for letter in completion)\n"


class Devices(NamedTuple):
    """The worker processes: one for each device."""

    stand_in: ProcessPoolExecutor
    cpu: ProcessPoolExecutor

    def on_both(self, scenario: Callable[..., Any], *args: Any) -> tuple[Any, Any]:
        """Return (result on the CPU, result on the stand-in); the stand-in must not have mixed devices."""
        expected = self.cpu.submit(scenario, *args)
        return expected.result(), self.on_stand_in(scenario, *args)

    def on_stand_in(self, scenario: Callable[..., Any], *args: Any) -> Any:
        result, mixed = self.stand_in.submit(scenarios.counted, scenario, *args).result()
        assert mixed == []
        return result


@pytest.fixture(scope="module")
def devices(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Devices]:
    def process(folder: Path | None) -> ProcessPoolExecutor:
        arguments = (None if folder is None else str(folder),)
        return ProcessPoolExecutor(
            1, mp_context=mp.get_context("spawn"), initializer=scenarios.start, initargs=arguments
        )

    with process(tmp_path_factory.mktemp("stand_in")) as stand_in, process(None) as cpu:
        yield Devices(stand_in, cpu)


@pytest.fixture(params=["qwen2_5_vl", pytest.param("qwen3_vl", marks=pytest.mark.nightly)])
def model(request: pytest.FixtureRequest) -> str:
    """Return the tiny model of each family.

    The fixture is parametrized in this file, because the session's `tiny` would restart the processes for each family.
    """
    return str(request.getfixturevalue(f"tiny_{request.param}"))


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mixed_rows(tmp_path_factory.mktemp("rows"))


def close(found: Any, expected: Any) -> bool:
    """Return whether all numbers in both nested results are equal up to rounding."""
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(close(found[key], expected[key]) for key in expected)
    if isinstance(expected, list | tuple):
        return len(found) == len(expected) and all(map(close, found, expected))
    return found == (pytest.approx(expected, rel=2e-3, abs=1e-5) if isinstance(expected, float) else expected)


@pytest.mark.long
def test_stand_in_rejects_exactly_what_gpu_rejects(devices: Devices) -> None:
    result = devices.stand_in.submit(scenarios.refused).result()
    accepted = [expression for expression, is_refused in result.items() if not is_refused]
    assert accepted == [
        *("here + 1", "here * cpu[2]", "here[place]", "here[at]", "here.to('cpu') + cpu", "here.cpu()[place]"),
        *("here.index_put((place,), cpu[2])", "here.clone().copy_(cpu)", "torch.cat([here, here])"),
    ]
    assert len(result) == len(accepted) + 12


@pytest.mark.parametrize(
    "deepspeed",
    ["zero3.json", *(pytest.param(f"{other}.json", marks=pytest.mark.nightly) for other in ("zero2", "zero3_offload"))],
)
def test_policy_computes_only_on_device(model: str, devices: Devices, deepspeed: str) -> None:
    expected, result = devices.on_both(scenarios.policy, model, "eager", deepspeed)
    assert result.pop("device") == "cuda" and expected.pop("device") == "cpu"
    assert result.pop("moved") > 0 and expected.pop("moved") == 0
    assert result.pop("buffers") == ["cuda torch.float32"] and expected.pop("buffers") == ["cpu torch.float32"]
    assert result["same fingerprints"]
    assert result["reference"] == result["first"] != result["second"]
    assert result == expected


def test_sdpa_policy_matches_eager_policy(model: str, devices: Devices) -> None:
    expected = devices.on_stand_in(scenarios.policy, model, "eager")
    assert close(devices.on_stand_in(scenarios.policy, model, "sdpa"), expected)


def test_sampling_on_device_matches_cpu(model: str, devices: Devices) -> None:
    expected, result = devices.on_both(scenarios.drawing, model, "eager")
    assert result == expected
    assert close(devices.on_stand_in(scenarios.drawing, model, "sdpa"), expected)


@pytest.mark.nightly
def test_weights_on_disk_do_not_change_samples(model: str, devices: Devices) -> None:
    expected = devices.on_stand_in(scenarios.drawing, model, "sdpa")
    assert devices.on_stand_in(scenarios.drawing, model, "sdpa", 0.8) == expected


def test_grpo_update_on_device_matches_cpu(model: str, devices: Devices, rows: Path) -> None:
    expected, result = devices.on_both(scenarios.update, model, "eager", str(rows), ALGORITHMS)
    assert result == expected
    # The last two algorithms mask tokens for which the made-up log-probabilities of the engine deviate too much.
    assert min(metrics["norm"] for metrics in result[:4]) > 1e-4
    assert close(devices.on_stand_in(scenarios.update, model, "sdpa", str(rows), ALGORITHMS), expected)


def test_objectives_on_device_match_cpu(devices: Devices) -> None:
    expected, result = devices.on_both(scenarios.objectives)
    assert len(result) == 5 * 6 * 4
    assert result == expected


@pytest.mark.parametrize("command", [pytest.param("sft", marks=pytest.mark.nightly), "grpo"])
def test_complete_runs_on_device_match_cpu(
    model: str, devices: Devices, rows: Path, tmp_path: Path, command: str
) -> None:
    (tmp_path / "sft.toml").write_text(SFT.format(model=model, rows=rows))
    (tmp_path / "grpo.toml").write_text(GRPO.format(model=model, rows=rows))
    (tmp_path / "rewards.py").write_text(REWARDS)

    def measured(lines: list[dict[str, float]]) -> list[dict[str, float]]:
        rooms = ("train/", "val/", "policy/", "reward/", "mismatch/")
        return [{name: value for name, value in line.items() if name.startswith(rooms)} for line in lines]

    eager, sdpa = (["model.attention=" + name, "model.fused_kernels=false"] for name in ("eager", "sdpa"))
    expected = measured(devices.cpu.submit(scenarios.run, str(tmp_path), command, "cpu", eager).result())
    result = measured(devices.on_stand_in(scenarios.run, str(tmp_path), command, "eager", eager))
    assert len(result) >= 2
    assert result == expected
    exported, reference = (load_file(tmp_path / run / "export/final/model.safetensors") for run in ("eager", "cpu"))
    assert exported.keys() == reference.keys()
    assert all(exported[name].equal(reference[name]) for name in reference)
    first, *_ = measured(devices.on_stand_in(scenarios.run, str(tmp_path), command, "sdpa", sdpa))
    assert close([first[name] for name in FIRST], [result[0][name] for name in FIRST])


@pytest.mark.parametrize(
    ("fault", "scenario", "file", "line"),
    [
        ("buffers stay behind", scenarios.policy, "modeling_", "inv_freq"),
        ("a tensor made without a device", scenarios.update, "losses/", ""),
    ],
)
def test_planted_fault_is_reported_with_source_line(
    model: str, devices: Devices, rows: Path, fault: str, scenario: Callable[..., Any], file: str, line: str
) -> None:
    args = (str(rows), ALGORITHMS[:1]) if scenario is scenarios.update else ()
    error = devices.stand_in.submit(scenarios.plant, fault, scenario, model, "eager", *args).result()
    place, _, text = error.partition(": ")
    name, _, number = place.rpartition(":")
    assert file in name and line in linecache.getline(name, int(number))
    assert text.startswith("aten::") and "mixes cuda:0 with tensors of the CPU of shape [" in text
