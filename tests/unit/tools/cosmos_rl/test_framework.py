"""The conversion of cosmos-framework configurations: published values, batches, schedules, adapters and refusals."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from dsreason.cli.job import find_trainers
from dsreason.config.load import read_values
from dsreason.engine.schedule import compute_lr_factor
from dsreason.errors import ConfigError
from dsreason.tools.cosmos_rl.convert import Imported, convert, is_importable
from dsreason.tools.cosmos_rl.keys.framework import GENERATOR, REASONER
from dsreason.tools.cosmos_rl.parts.framework_world import compute_last_decay
from tests.unit.tools.cosmos_rl.test_convert import document

SHARED = Path(__file__).parents[4] / "../shared/cosmos3_configs"
needs_configs = pytest.mark.skipif(
    not SHARED.is_dir(), reason="cosmos-framework's configurations (../shared/cosmos3_configs) are not here"
)
REASONER_FILE = """
[job]
task = "vlm"
experiment = "mine"
[model.backbone]
model_name = "Qwen/Qwen3-VL-4B-Instruct"
[model.parallelism]
data_parallel_shard_degree = 4
[optimizer]
lr = 1e-5
weight_decay = 0.1
[scheduler]
warm_up_steps = [10]
cycle_lengths = [100]
f_start = [0.1]
f_min = [0.5]
[trainer]
max_iter = 100
[dataloader_train]
max_samples_per_batch = 2
max_sequence_length = 8192
"""
GENERATOR_FILE = """
[job]
task = "vfm"
experiment = "vision"
[optimizer]
lr = 1e-4
weight_decay = 0
[scheduler]
warm_up_steps = [50]
[trainer]
max_iter = 500
"""


@pytest.fixture(autouse=True)
def without_data_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VIDEOPHYSICS_ROOT", raising=False)


def load(result: Imported) -> Any:
    result.check("cosmos.toml")
    return read_values(find_trainers()[result.trainer].schema, result.config, "cosmos.toml")


def imported(text: str, *accepted: str, **changes: Any) -> Any:
    return load(convert(document(text, **changes), accepted))


def note(text: str, key: str, *accepted: str, **changes: Any) -> tuple[str, str]:
    findings = convert(document(text, **changes), accepted).findings
    return next((finding.verdict, finding.text) for finding in findings if finding.key == key)


VIDEOPHY2 = {
    "optim.lr": 1e-6,
    "optim.betas": (0.9, 0.95),
    "optim.weight_decay": 0.1,
    "optim.warmup": 5,
    "optim.warmup_start": 0.05,
    "optim.schedule": "cosine",
    "optim.min_lr_share": 0.1,
    "optim.schedule_steps": None,
    "optim.lr_multipliers": {},
    "optim.max_grad_norm": 1.0,
    "train.max_steps": 50,
    "train.global_batch_size": 8 * 1 * 8,
    "train.max_tokens_per_micro_batch": 16000,
    "train.precision": "bf16",
    "model.max_length": 16000,
    "data.vision.fps": 2,
    "data.path": "videophy2_train",
    "checkpoint.every": 100,
}
VISION = {
    "optim.lr": 1e-4,
    "optim.betas": (0.9, 0.95),
    "optim.eps": 1e-6,
    "optim.weight_decay": 0,
    "optim.warmup": 50,
    "optim.warmup_start": 0,
    "optim.schedule": "cosine",
    "optim.min_lr_share": 0,
    "optim.schedule_steps": 1000,
    "optim.max_grad_norm": 0.1,
    "train.max_steps": 500,
    "train.global_batch_size": 8 * 2,
    "train.ema_decay": 0.9843,
    "train.context_parallel_size": 1,
    "model.max_prompt_length": 2048,
    "lora.rank": 0,
}
PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    "videophy2_sft_nano": (
        "sft",
        VIDEOPHY2
        | {"model.path": "nvidia/Cosmos3-Nano", "model.freeze": (r"visual\.(?!(merger|deepstack_merger_list)\.)",)},
    ),
    "videophy2_sft_edge": (
        "sft",
        VIDEOPHY2
        | {
            "model.path": "nvidia/Cosmos3-Edge",
            "model.freeze": (r"visual\.",),
            "data.template_arguments": {"enable_thinking": False},
        },
    ),
    "llava_ov": (
        "sft",
        VIDEOPHY2
        | {
            "model.path": "Qwen/Qwen3-VL-8B-Instruct",
            "model.freeze": (),
            "optim.lr": 1e-5,
            "optim.warmup": 1000,
            "optim.min_lr_share": 0.5,
            "optim.schedule_steps": 1000,
            "optim.lr_multipliers": {r"model\.visual": 0.1},
            "train.max_steps": 500,
            "train.global_batch_size": 8,
            "data.path": "lmms-lab/LLaVA-OneVision-Data",
            "data.vision.fps": None,
        },
    ),
    "vision_sft_nano": ("world", VISION),
    "vision_sft_edge": ("world", VISION),
    "vision_sft_super": (
        "world",
        VISION
        | {
            "optim.lr": 5e-4,
            "train.ema_decay": None,
            "train.context_parallel_size": 2,
            "train.global_batch_size": 4 * 2,
            "lora.rank": 16,
            "lora.alpha": 32,
            "lora.targets": ("to_q", "to_k", "to_v", "to_out.0"),
        },
    ),
}
"""Command and values of the published recipes."""


@needs_configs
@pytest.mark.parametrize("name", PUBLISHED)
def test_imported_file_has_published_values(name: str) -> None:
    command, expected = PUBLISHED[name]
    result = convert(tomllib.loads((SHARED / f"{name}.toml").read_text()), ["job.task"] if command == "world" else [])
    config = load(result)
    assert (result.trainer, result.num_gpus) == (command, 8)
    values = dict.fromkeys(expected, config)
    for key in expected:
        for part in key.split("."):
            values[key] = getattr(values[key], part)
    assert values == expected


@needs_configs
@pytest.mark.parametrize("name", PUBLISHED)
def test_every_key_in_file_is_reported_once(name: str) -> None:
    text = (SHARED / f"{name}.toml").read_text()
    written = {line.partition("=")[0].strip() for line in text.splitlines() if "=" in line and not line.startswith("#")}
    findings = convert(tomllib.loads(text)).findings
    assert len({finding.key for finding in findings}) == len(findings)
    assert {finding.key.rpartition(".")[2] for finding in findings} == {name for name in written if name.isidentifier()}
    assert not [finding.key for finding in findings if finding.verdict == "not read"]


def test_file_is_recognised_by_its_content() -> None:
    assert is_importable(tomllib.loads(REASONER_FILE))
    assert is_importable({"model": {"parallelism": {"context_parallel_shard_degree": 2}}})
    assert not is_importable({"model": {"path": "tiny:qwen3_vl"}, "optim": {"lr": 1e-5}})


def test_reasoner_becomes_sft_configuration() -> None:
    config = imported(REASONER_FILE, model__precision="float32", model__activation_checkpointing={"mode": "none"})
    assert (config.train.precision, config.model.gradient_checkpointing) == ("fp32", False)
    assert (config.train.global_batch_size, config.model.max_length) == (4 * 2, 8192)
    assert config.train.on_nonfinite == "stop"


def test_context_parallel_ranks_share_a_row() -> None:
    result = convert(document(REASONER_FILE, model__parallelism__context_parallel_shard_degree=2))
    config = load(result)
    assert (result.num_gpus, config.train.sequence_parallel_size, config.train.global_batch_size) == (8, 2, 8)


def test_launcher_determines_the_number_of_gpus() -> None:
    key = "model.parallelism.data_parallel_shard_degree"
    verdict, text = note(
        REASONER_FILE, key, model__parallelism={"data_parallel_shard_degree": -1, "context_parallel_shard_degree": 2}
    )
    assert verdict == "differs"
    assert "taken as 8: train.global_batch_size = 8;" in text  # 4 ranks x 2 samples


def test_learning_rate_follows_the_framework_schedule() -> None:
    """The framework's factor in step n is 0.1 + 0.9 n / 10, and then 0.5 + 0.25 (1 + cos(pi (n - 10) / 90)).

    Here the peak is reached one step earlier.
    """
    optim = imported(REASONER_FILE).optim
    factors = [compute_lr_factor(step, 100, optim) for step in (0, 9, 10, 55, 100)]
    assert factors == pytest.approx([0.1, 1.0, 1.0, 0.75, 0.5])


def test_run_shorter_than_cycle_ends_within_it() -> None:
    optim = imported(GENERATOR_FILE, "job.task", scheduler__cycle_lengths=[950]).optim
    assert compute_lr_factor(500, 500, optim) == pytest.approx(0.5)  # halfway from step 50 to step 950


def test_peak_factor_scales_learning_rate() -> None:
    optim = imported(REASONER_FILE, scheduler__f_max=[2.0], scheduler__f_start=[0.5], scheduler__f_min=[0.2]).optim
    assert (optim.lr, optim.warmup_start, optim.min_lr_share) == pytest.approx((2e-5, 0.25, 0.1))


def test_multipliers_become_patterns() -> None:
    """The framework multiplies the learning rate of `model.visual` by 0.1 unless the file says otherwise."""
    key = "optimizer__lr_multipliers"
    assert imported(REASONER_FILE).optim.lr_multipliers == {r"model\.visual": 0.1}
    assert imported(REASONER_FILE, **{key: {"model.visual": 1.0}}).optim.lr_multipliers == {}
    given = {"model.visual": 0.5, "lm_head": 2}
    assert imported(REASONER_FILE, **{key: given}).optim.lr_multipliers == {r"model\.visual": 0.5, "lm_head": 2.0}


def test_default_multiplier_requires_a_trained_tower() -> None:
    assert imported(REASONER_FILE, optimizer__keys_to_select=["lm_head"]).optim.lr_multipliers == {}
    assert imported(REASONER_FILE, model__lora_enabled=True).optim.lr_multipliers == {}


def test_generator_multipliers_are_refused() -> None:
    with pytest.raises(ConfigError, match="Cosmos 3's parameters have other names here"):
        imported(GENERATOR_FILE, "job.task", optimizer__lr_multipliers={"action": 5})


def test_selected_keys_become_freeze_pattern() -> None:
    (pattern,) = imported(REASONER_FILE, optimizer__keys_to_select=["merger", "lm_head"]).model.freeze
    assert pattern == "^(?!.*(merger|lm_head))"


def test_reasoner_adapters_are_imported() -> None:
    changes = {"lora_enabled": True, "lora_rank": 8, "lora_alpha": 16, "lora_target_modules": "q_proj, v_proj"}
    model = document(REASONER_FILE)["model"] | changes
    config = imported(REASONER_FILE, model=model, job__experiment="videophy2_lora")
    assert (config.lora.rank, config.lora.alpha, config.lora.targets) == (8, 16, ("q_proj", "v_proj"))
    assert config.model.freeze == ()


def test_data_root_comes_from_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VIDEOPHYSICS_ROOT", "/data/physics")
    config = imported(REASONER_FILE, job__experiment="videophy2_sft_small")
    assert config.data.path == "/data/physics/videophy2_train"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"optimizer__learning_rate": 1e-5}, "optimizer.learning_rate: it is not in cosmos-framework's schema"),
        ({"trainer__max_itr": 5}, "did you mean trainer.max_iter?"),
        ({"model__ema": {"enabled": True}}, "only dsreason world keeps a moving average"),
        ({"optimizer__lr_multipliers": {"visual": 0}}, "must be greater than 0; got 0 for 'visual'"),
        ({"checkpoint__load_path": "/runs/iter_100"}, "distributed checkpoints cannot be read"),
        ({"scheduler__f_start": []}, "scheduler.f_start: must have a value; the list is empty"),
        ({"job__wandb_mode": "on"}, "job.wandb_mode: must be online, offline or disabled; got 'on'"),
        ({"optimizer__lr": "fast"}, "optimizer.lr: must be a number; got 'fast'"),
        ({"job__upload_reproducible_setup": True}, "set checkpoint.upload in the imported file"),
    ],
)
def test_unusable_key_is_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        imported(REASONER_FILE, **changes)
    assert text in str(caught.value)


def test_missing_samples_per_row_are_refused() -> None:
    file = document(REASONER_FILE)
    del file["dataloader_train"]["max_samples_per_batch"]
    with pytest.raises(ConfigError, match="a packed row has as many samples as fit"):
        load(convert(file))


def test_refused_generator_error_lists_supported_models() -> None:
    with pytest.raises(ConfigError) as caught:
        imported(GENERATOR_FILE)
    assert "job.task: Cosmos 3's generator is not supported; dsreason world trains Cosmos-Predict2.5" in str(
        caught.value
    )
    assert imported(GENERATOR_FILE, "job.task").model.path == "nvidia/Cosmos-Predict2.5-2B"


def test_unknown_task_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"job.task: must be vlm \(reasoner\) or vfm \(generator\); got 'vla'"):
        imported(GENERATOR_FILE, job__task="vla")


def test_other_generator_weights_are_refused() -> None:
    with pytest.raises(ConfigError, match="only the whole transformer can be trained, not action_proj_in"):
        imported(GENERATOR_FILE, "job.task", optimizer__keys_to_select=["moe_gen", "action_proj_in"])


def test_unset_value_is_reported_and_ignored() -> None:
    assert note(REASONER_FILE, "checkpoint.load_path", checkpoint__load_path="???")[0] == "left out"


def test_omitted_learning_rate_is_reported() -> None:
    file = document(REASONER_FILE)
    del file["optimizer"]["lr"]
    findings = convert(file).findings
    assert [finding.text for finding in findings if finding.key == "optimizer.lr"] == [
        "2e-06: the file leaves it to the experiment's Python file; correct it if that sets another "
        "(cosmos-framework's default)"
    ]


def test_last_decay_follows_from_average_width() -> None:
    """An average with weights t^7 has the relative width sqrt(8 / (81 · 10)), and its last decay is (T / (T + 1))^8."""
    assert compute_last_decay((8 / 810) ** 0.5, 99) == pytest.approx(0.99**8)


def test_reasoner_and_generator_have_equal_keys() -> None:
    assert REASONER.keys() == GENERATOR.keys()
