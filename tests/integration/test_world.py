"""Training of world models on real ranks: runs resume exactly on any number of ranks, and diffusers loads the exports."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file

from tests.distributed import run_on_ranks
from tests.integration.command import metrics

pytestmark = pytest.mark.integration

RUN = """
[model]
path = "tiny:cosmos_predict2_5"
max_prompt_length = 64
[data]
frames = 9
height = 32
width = 32
limit = 24
validation = 4
[optim]
lr = 1e-3
schedule = "constant"
warmup = 0
[train]
max_steps = 4
precision = "fp32"
micro_batch_size = 2
[world]
prompts_per_step = 3
num_generations = 2
sampling_steps = 3
schedule = "linear"
[reward.functions]
brightness = 1.0
[validation]
max_samples = 3
show = 1
[checkpoint]
every = 2
keep = -1
export_dtype = "fp32"
"""
FLOW = {
    "train.ema_decay": 0.5,
    "world.kl_coef": 0.1,
    "world.kl": '"mean"',
    "world.sde": '"cps"',
    "world.noise_level": 0.8,
    "world.trained_steps": "[0, 1]",
    "world.guidance_scale": 2.0,
    "world.conditional_frames": "[0, 1]",
    "world.optimizer_steps_per_rollout": 2,
}
NFT = {
    "world.algorithm": '"nft"',
    "world.num_generations": 3,  # 9 clips on two ranks, so one rank computes a dummy clip
    "world.kl_coef": 0.1,
    "world.nft_decay": '"slow"',
    "lora.rank": 4,
    "lora.alpha": 16.0,
}

SFT = {
    "world.algorithm": '"sft"',
    "model.freeze_text_projection": "true",
    "world.conditional_frames": "[0, 2]",
    "train.global_batch_size": 5,
    "train.ema_decay": 0.9,
    "train.ema_every": 2,
    "checkpoint.best_metric": '"val/loss"',
    "reward.functions": "{}",
}
DDRL = {"world.algorithm": '"ddrl"', "world.data_noise": '"fresh"', "world.data_coef": 0.5, "train.max_steps": 1}


def run_world(folder: str, name: str, resume: str | None, changes: dict[str, Any]) -> None:
    """Run a world model the way a rank of `dsreason world` does."""
    from dsreason.cli.job import TrainingCommand, find_trainers, load_job

    trainer = find_trainers()["world"]
    overrides = tuple(f"{key}={value}" for key, value in changes.items())
    config = load_job(TrainingCommand(trainer, Path(folder) / "run.toml", overrides=overrides))
    trainer.run(config, Path(folder) / name, None if resume is None else str(Path(folder) / resume))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("world")
    (folder / "run.toml").write_text(RUN)
    return folder


@pytest.fixture(scope="module")
def flow(folder: Path) -> Path:
    """Run `flow/` on two ranks, `flow_resumed/` from its second step, `flow_alone/` on one rank with another micro-batch size,
    and `flow_together/` on two ranks that compute each clip together."""
    start = partial(run_on_ranks, run_world)
    start(2, str(folder), "flow", None, FLOW)
    start(2, str(folder), "flow_resumed", "flow/checkpoints/step_2", FLOW)
    start(1, str(folder), "flow_alone", None, FLOW | {"train.micro_batch_size": 5})
    start(2, str(folder), "flow_together", None, FLOW | {"train.context_parallel_size": 2})
    return folder


@pytest.fixture(scope="module")
def nft(folder: Path) -> Path:
    """Run `nft/` on two ranks, `nft_resumed/` from its second step, and `nft_alone/` from that step on one rank."""
    start = partial(run_on_ranks, run_world)
    start(2, str(folder), "nft", None, NFT)
    start(2, str(folder), "nft_resumed", "nft/checkpoints/step_2", NFT)
    start(1, str(folder), "nft_alone", "nft/checkpoints/step_2", NFT | {"train.micro_batch_size": 3})
    return folder


@pytest.fixture(scope="module")
def clips(folder: Path) -> Path:
    """Train on real clips: `sft/` on two ranks, `sft_alone/` on one rank from its second step, and `ddrl/` on one rank."""
    start = partial(run_on_ranks, run_world)
    start(2, str(folder), "sft", None, SFT)
    start(1, str(folder), "sft_alone", "sft/checkpoints/step_2", SFT | {"train.micro_batch_size": 3})
    start(1, str(folder), "ddrl", None, DDRL)
    return folder


FULL, ADAPTER = "transformer/diffusion_pytorch_model.safetensors", "pytorch_lora_weights.safetensors"
TIMES = ("time/", "perf/", "memory/")


def exported(run: Path, file: str) -> dict[str, torch.Tensor]:
    return load_file(run / "export/final" / file)


def values(run: Path, after: int = 0) -> list[dict[str, float]]:
    lines = [line for line in metrics(run) if line["step"] > after]
    return [{name: value for name, value in line.items() if not name.startswith(TIMES)} for line in lines]


@pytest.mark.parametrize(("runs", "file"), [("flow", FULL), ("nft", ADAPTER)])
def test_resumed_run_continues_bit_for_bit(runs: str, file: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(runs)
    assert values(folder / runs, after=2) == values(folder / f"{runs}_resumed")
    full, resumed = exported(folder / runs, file), exported(folder / f"{runs}_resumed", file)
    assert full.keys() == resumed.keys()
    assert all(full[name].equal(resumed[name]) for name in full)


@pytest.mark.parametrize(
    ("runs", "other", "file"), [("flow", "alone", FULL), ("flow", "together", FULL), ("nft", "alone", ADAPTER)]
)
def test_single_rank_matches_two_ranks(runs: str, other: str, file: str, request: pytest.FixtureRequest) -> None:
    """Compare clips, rewards and gradients, which differ only in the order of sums."""
    folder = request.getfixturevalue(runs)
    alone = values(folder / f"{runs}_{other}")
    for item, two in zip(alone, values(folder / runs, after=alone[0]["step"] - 1), strict=True):
        assert item.keys() == two.keys()
        for name in ("reward/mean", "reward/std", "clips/diversity", "policy/kl", "train/grad_norm"):
            assert item[name] == pytest.approx(two[name], rel=2e-3, abs=1e-7), (name, item["step"])
    two_ranks, one_rank = exported(folder / runs, file), exported(folder / f"{runs}_{other}", file)
    for name, value in two_ranks.items():
        torch.testing.assert_close(one_rank[name], value, atol=2e-4, rtol=1e-2)


@pytest.mark.parametrize("name", ["flow", "flow_alone", "flow_together"])
def test_sampling_matches_training_and_policy_changes(name: str, flow: Path) -> None:
    result = values(flow / name)
    on_policy = [line for line in result if line["step"] % 2 == 1]  # every rollout is used for two optimizer steps
    assert [line["policy/ratio_error"] for line in on_policy] == [0.0, 0.0]
    assert all(line["train/grad_norm"] > 0 for line in on_policy)
    assert all(line["policy/ratio_error"] > 0 for line in result if line["step"] % 2 == 0)
    assert result[0]["policy/kl"] == 0.0  # the policy is still the initial model
    assert result[-1]["policy/kl"] > 0


def test_flow_matching_does_not_depend_on_ranks(clips: Path) -> None:
    two, item = values(clips / "sft", after=2), values(clips / "sft_alone")
    for a, b in zip(two, item, strict=True):
        for name in ("train/loss", "train/grad_norm", *(["val/loss"] if a["step"] == 4 else [])):
            assert a[name] == pytest.approx(b[name], rel=1e-4), name
    for name, value in exported(clips / "sft", FULL).items():
        torch.testing.assert_close(exported(clips / "sft_alone", FULL)[name], value, atol=2e-4, rtol=1e-2)
    displayed = metrics(clips / "sft")
    assert displayed[-1]["val/loss"] < displayed[0]["val/loss"]
    assert "val/reward/mean" not in displayed[0]


def test_frozen_projection_is_exported_unchanged(clips: Path) -> None:
    base = load_file(Path(str(run_facts(clips / "sft")["model_path"])) / FULL)
    result = exported(clips / "sft", FULL)
    assert result.keys() == base.keys()
    same = {name for name, value in result.items() if value.equal(base[name])}
    assert {"crossattn_proj.0.weight", "crossattn_proj.0.bias"} <= same
    assert len(same) < len(base) / 2


def test_ddrl_adds_flow_matching_loss_on_real_clips(clips: Path) -> None:
    (result,) = values(clips / "ddrl")
    assert result["policy/ratio_error"] == 0.0
    assert result["policy/data_loss"] > 0.5  # the model has learned nothing yet
    assert result["train/loss"] == pytest.approx(result["policy/loss"] + 0.5 * result["policy/data_loss"])


def test_curves_reveal_reward_hacking(flow: Path) -> None:
    expected = {"reward/brightness/mean", "reward/zero_std_fraction", "clips/diversity", "clips/brightness"}
    assert expected <= values(flow / "flow")[0].keys()
    displayed = metrics(flow / "flow")
    assert [line["step"] for line in displayed if "val/reward/mean" in line] == [0, 4]
    assert (flow / "flow/validation/step_4/0.mp4").is_file()
    assert "step 4" in (flow / "flow/world.html").read_text()
    assert len((flow / "flow/validation/step_4.jsonl").read_text().splitlines()) == 3


def test_diffusers_loads_exported_transformer(flow: Path) -> None:
    from diffusers import CosmosTransformer3DModel

    folder = flow / "flow/export/final"
    model, report = CosmosTransformer3DModel.from_pretrained(folder / "transformer", output_loading_info=True)
    assert not any(report.values())
    expected = exported(flow / "flow", FULL)
    assert all(value.equal(expected[name]) for name, value in model.state_dict().items())
    assert (folder / "model_index.json").is_file()
    assert not (folder / "vae").exists()


def test_export_contains_averaged_weights(flow: Path) -> None:
    """Compare the export with the average, which lags behind the trained weights because its decay is 0.5."""
    average = load_file(flow / "flow/checkpoints/step_4/average_ema_rank_0.safetensors")
    name = next(name for name, value in exported(flow / "flow", FULL).items() if value.ndim == 2)
    share = average[name].flatten()
    assert share.equal(exported(flow / "flow", FULL)[name].flatten()[: len(share)])


def test_diffusers_loads_exported_adapter_exactly(nft: Path) -> None:
    from dsreason.world.families import FAMILIES
    from dsreason.world.lora import load_lora
    from dsreason.world.models import load_transformer

    base = Path(str(run_facts(nft / "nft")["model_path"]))
    transformer = load_transformer(base, torch.float32)
    load_lora(transformer, nft / "nft/export/final")
    assert transformer.peft_config["default"].lora_alpha == 16
    x, text = torch.ones(1, 16, 3, 4, 4), torch.ones(1, 4, 128)
    with torch.no_grad():
        changed = FAMILIES["cosmos_predict2_5"].velocity(transformer, x, torch.tensor([0.5]), text)
        transformer.disable_adapters()
        assert not changed.equal(FAMILIES["cosmos_predict2_5"].velocity(transformer, x, torch.tensor([0.5]), text))


@pytest.mark.parametrize(("runs", "file"), [("flow", FULL), ("nft", ADAPTER)])
def test_checkpoint_export_equals_export_of_run(
    runs: str, file: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    from dsreason.cli.export import export

    folder = request.getfixturevalue(runs)
    export(checkpoint=folder / runs, output=tmp_path / "out", dtype="fp32")
    result, expected = load_file(tmp_path / "out" / file), exported(folder / runs, file)
    assert result.keys() == expected.keys()
    assert all(value.equal(expected[name]) for name, value in result.items())


def run_facts(run: Path) -> dict[str, Any]:
    from dsreason.config.output import read_record

    return read_record(run)


def test_frozen_weights_are_not_in_checkpoint(nft: Path) -> None:
    checkpoint = nft / "nft/checkpoints/step_4"
    state = torch.load(checkpoint / "zero_pp_rank_0_mp_rank_00_model_states.pt", weights_only=False)
    assert not state["frozen_param_fragments"]
    assert state["param_shapes"]
    assert all(".lora_" in name for group in state["param_shapes"] for name in group)
    assert set(load_file(checkpoint / "average_old_rank_0.safetensors")) == {
        n for g in state["param_shapes"] for n in g
    }


def weights_on_ranks(group: int) -> list[NDArray[np.float32]]:
    """Return outputs of a small network under ZeRO-3: after training, with the weights averaged halfway, and after training
    again.

    Each `group` of ranks shares one copy of the weights.
    """
    from dsreason.config.schema import OptimConfig
    from dsreason.engine.average import WeightAverage
    from dsreason.engine.engine import build_engine
    from dsreason.job.ranks import init_world

    init_world()
    torch.manual_seed(0)
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 1000},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    settings["zero_optimization"]["zero_hpz_partition_size"] = group
    engine = build_engine(torch.nn.Linear(3, 5), OptimConfig(lr=0.5, weight_decay=0), settings)
    x = torch.ones(1, 3)

    def output() -> NDArray[np.float32]:
        with torch.no_grad():
            return engine(x).clone().numpy()

    average, result = WeightAverage(engine), [output()]
    engine.backward(engine(x).sum())
    engine.step()
    result.append(output())
    average.update(0.5)
    with average.in_place():
        result.append(output())
    result.append(output())
    full = {name: value.clone().numpy() for name, value in average.iter_full()}
    result.append(x.numpy() @ full["weight"].T + full["bias"])
    return result


@pytest.mark.parametrize(("ranks", "group"), [(2, 1), pytest.param(4, 2, marks=pytest.mark.nightly)])
def test_averaged_weights_are_swapped_and_restored_exactly(ranks: int, group: int) -> None:
    """Cover hosts with separate copies of the weights, which must not be used while other weights are loaded."""
    for before, after, half, back, full in run_on_ranks(weights_on_ranks, ranks, group):
        assert np.abs(after - before).min() > 0.1
        np.testing.assert_allclose(half, (before + after) / 2, atol=1e-6)
        np.testing.assert_array_equal(back, after)
        np.testing.assert_allclose(full, half, atol=1e-6)
