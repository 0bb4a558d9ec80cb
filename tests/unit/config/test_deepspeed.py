"""The DeepSpeed JSON: values that are filled in, contradictions, and keys that DeepSpeed no longer has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dsreason.config.deepspeed import resolve_deepspeed
from dsreason.config.schema import SFTConfig
from dsreason.errors import ConfigError


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def make(**sections: dict[str, Any]) -> SFTConfig:
    return SFTConfig.model_validate(sections)


def resolve(
    document: object, config: SFTConfig | None = None, *, world_size: int = 2, device: Any = "cpu"
) -> dict[str, Any]:
    Path("ds.json").write_text(document if isinstance(document, str) else json.dumps(document))
    return resolve_deepspeed(
        "ds.json", config or SFTConfig(), device=device, world_size=world_size, config_name="run.toml"
    )


def errors(document: object, config: SFTConfig | None = None, world_size: int = 2) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        resolve(document, config, world_size=world_size)
    assert caught.value.exit_code == 2
    lines = str(caught.value).splitlines()
    return lines if len(lines) == 1 else [line.strip() for line in lines[1:]]


ZERO3 = {"zero_optimization": {"stage": 3}}


@pytest.mark.parametrize(
    ("train", "world_size", "micro", "steps"),
    [
        ({"global_batch_size": 32, "micro_batch_size": 4}, 2, 4, 4),
        ({"global_batch_size": 8}, 4, 1, 2),
        ({"global_batch_size": 10, "micro_batch_size": 4}, 2, 4, 2),  # ceil(10 / 8)
        ({"global_batch_size": 2, "micro_batch_size": 8}, 4, 8, 1),
        ({"global_batch_size": 8, "max_tokens_per_micro_batch": 512}, 2, 1, 4),
    ],
)
def test_batch_sizes_are_derived_and_consistent(train: dict[str, int], world_size: int, micro: int, steps: int) -> None:
    result = resolve(ZERO3, make(train=train), world_size=world_size)
    assert result["train_micro_batch_size_per_gpu"] == micro
    assert result["gradient_accumulation_steps"] == steps
    assert result["train_batch_size"] == micro * steps * world_size


@pytest.mark.parametrize(("precision", "enabled"), [("bf16", True), ("fp32", False)])
def test_precision_clipping_and_gradient_dtype_follow_run(precision: str, enabled: bool) -> None:
    result = resolve(
        ZERO3 | {"bf16": {"enabled": "auto"}, "gradient_clipping": "auto"},
        make(train={"precision": precision}, optim={"max_grad_norm": 0.5}),
    )
    assert result["bf16"] == {"enabled": enabled}
    assert result["gradient_clipping"] == 0.5
    assert result["data_types"] == {"grad_accum_dtype": "fp32"}
    assert result["communication_data_type"] == "fp32"
    assert result["zero_allow_untested_optimizer"] is True
    assert result["zero_force_ds_cpu_optimizer"] is False


def test_auto_optimizer_and_scheduler_entries_are_removed() -> None:
    document = {
        "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": 5e7},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "torch_adam": True}},
        "scheduler": {"type": "WarmupCosineLR", "params": {"warmup_num_steps": "auto"}},
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "fp16": {"enabled": "auto"},
        "steps_per_print": 100,
    }
    result = resolve(document)
    assert "auto" not in json.dumps(result)
    assert {"optimizer", "scheduler"}.isdisjoint(result)
    assert result["steps_per_print"] == 100
    assert result["zero_optimization"]["stage3_prefetch_bucket_size"] == 50_000_000


def test_concrete_values_that_agree_are_accepted() -> None:
    document = ZERO3 | {
        "train_batch_size": 32,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 1,
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "betas": [0.9, 0.999], "weight_decay": 0.01}},
    }
    assert resolve(document, make(train={"micro_batch_size": 4}))["train_batch_size"] == 32


CONTRADICTIONS: list[tuple[dict[str, Any], str]] = [
    ({"train_batch_size": 64}, "train_batch_size (64) contradicts run.toml: train.global_batch_size is 32"),
    (
        {"train_micro_batch_size_per_gpu": 8},
        "train_micro_batch_size_per_gpu (8) contradicts run.toml: train.micro_batch_size is 4",
    ),
    (
        {"gradient_accumulation_steps": 3},
        (
            "gradient_accumulation_steps (3) contradicts run.toml: train.global_batch_size is 32 and "
            "train.micro_batch_size is 4, which results in 4 on 2 ranks"
        ),
    ),
    ({"gradient_clipping": 0.5}, "gradient_clipping (0.5) contradicts run.toml: optim.max_grad_norm is 1"),
    ({"bf16": {"enabled": False}}, "bf16.enabled (false) contradicts run.toml: train.precision is bf16"),
    ({"fp16": {"enabled": True}}, "fp16.enabled (true) contradicts run.toml: train.precision is bf16"),
    (
        {"torch_autocast": {"enabled": True}},
        "torch_autocast.enabled (true) contradicts run.toml: train.precision is bf16",
    ),
    (
        {"bf16": {"bf16_master_weights_and_grads": True}},
        (
            "bf16.bf16_master_weights_and_grads (true) contradicts the trainer: "
            "master weights and optimizer states are float32"
        ),
    ),
    (
        {"data_types": {"grad_accum_dtype": "bf16"}},
        'data_types.grad_accum_dtype ("bf16") contradicts the trainer: gradients are accumulated in fp32',
    ),
    (
        {"communication_data_type": "bf16"},
        'communication_data_type ("bf16") contradicts the trainer: gradients are reduced in fp32',
    ),
    ({"optimizer": {"params": {"lr": 1e-3}}}, "optimizer.params.lr (0.001) contradicts run.toml: optim.lr is 1e-05"),
    (
        {"optimizer": {"params": {"weight_decay": 0.1}}},
        "optimizer.params.weight_decay (0.1) contradicts run.toml: optim.weight_decay is 0.01",
    ),
    (
        {"optimizer": {"params": {"betas": [0.9, 0.95]}}},
        "optimizer.params.betas ([0.9, 0.95]) contradicts run.toml: optim.betas is [0.9, 0.999]",
    ),
    (
        {"optimizer": {"type": "Lion"}},
        'optimizer.type ("Lion") contradicts the trainer: the optimizer is AdamW',
    ),
    (
        {"scheduler": {"type": "WarmupCosineLR", "params": {"warmup_type": "log"}}},
        'scheduler.params.warmup_type ("log") contradicts the trainer: the warm-up is linear',
    ),
    ({"scheduler": {"type": "WarmupLR"}}, 'scheduler.type ("WarmupLR") contradicts run.toml: optim.schedule is cosine'),
    (
        {"checkpoint": {"writer": {"decoupled": True}}},
        (
            'checkpoint.writer ({"decoupled": true}) contradicts run.toml: checkpoint.background (true) determines whether '
            "checkpoints are written during training"
        ),
    ),
    (
        {"datastates_ckpt": 3},
        (
            "datastates_ckpt (3) contradicts run.toml: checkpoint.background (true) determines whether checkpoints are "
            "written during training"
        ),
    ),
    (
        {"checkpoint": {"load_universal": True}},
        (
            "checkpoint.load_universal (true) contradicts the trainer: checkpoints are converted "
            "automatically if the number of ranks changes"
        ),
    ),
    (
        {"sequence_parallel_size": 0},
        "sequence_parallel_size (0) contradicts the trainer: sequences are not split across ranks",
    ),
    (
        {"tensor_parallel": {"autotp_size": 2}},
        "tensor_parallel.autotp_size (2) contradicts the trainer: layers are not split across ranks",
    ),
    (
        {"data_types": {"param_dtype": "evil"}},
        'data_types.param_dtype ("evil") contradicts run.toml: train.precision is bf16',
    ),
]


@pytest.mark.parametrize(("document", "message"), CONTRADICTIONS)
def test_contradiction_error_names_both_keys_and_values(document: dict[str, Any], message: str) -> None:
    result = errors(ZERO3 | document, make(train={"micro_batch_size": 4}))
    assert result == [f'ds.json: {message}; set it to "auto" or remove it']


def test_null_section_is_not_passed_to_deepspeed() -> None:
    document = ZERO3 | {"datastates_ckpt": None, "checkpoint": {"load_universal": False, "writer": None}}
    result = resolve(document | {"sequence_parallel_size": 1})
    assert "datastates_ckpt" not in result  # DeepSpeed would treat null as a request, too


def test_sequence_parallel_ranks_count_as_one() -> None:
    config = make(train={"global_batch_size": 8, "sequence_parallel_size": 2})
    for document in (ZERO3, ZERO3 | {"sequence_parallel_size": 2}):
        result = resolve(document, config, world_size=4)
        assert (result["gradient_accumulation_steps"], result["train_batch_size"]) == (4, 16)
        assert "sequence_parallel_size" not in result  # with it, DeepSpeed would expect a different batch size
    assert errors(ZERO3 | {"sequence_parallel_size": 4}, config) == [
        (
            "ds.json: sequence_parallel_size (4) contradicts run.toml: train.sequence_parallel_size is 2; "
            'set it to "auto" or remove it'
        )
    ]


@pytest.mark.parametrize(
    ("train", "budget"),
    [
        ({"max_tokens_per_micro_batch": 512}, "train.max_tokens_per_micro_batch (512 tokens)"),
        ({"packing": False, "max_tokens_per_micro_batch": 512}, "train.max_tokens_per_micro_batch (512 tokens)"),
        ({}, "model.max_length (4096 tokens)"),
    ],
)
def test_micro_batch_size_rejected_under_token_budget(train: dict[str, Any], budget: str) -> None:
    assert errors(ZERO3 | {"train_micro_batch_size_per_gpu": 1}, make(train=train)) == [
        (
            "ds.json: train_micro_batch_size_per_gpu (1) contradicts run.toml: the samples per forward pass are limited "
            f'by {budget}; set it to "auto" or remove it'
        )
    ]


@pytest.mark.parametrize("train", [{"packing": False}, {"micro_batch_size": 1}])
def test_micro_batch_size_accepted_without_token_budget(train: dict[str, Any]) -> None:
    result = resolve(ZERO3 | {"train_micro_batch_size_per_gpu": 1}, make(train=train))
    assert result["train_micro_batch_size_per_gpu"] == 1


def test_all_contradictions_are_reported_at_once() -> None:
    document: dict[str, Any] = {}
    for part, _ in CONTRADICTIONS[:4]:
        document |= part
    assert len(errors(ZERO3 | document, make(train={"micro_batch_size": 4}))) == 4


@pytest.mark.parametrize(
    "key",
    [
        "elasticity",
        "nebula",
        "compression_training",
        "amp",
        "quantize_training",
        "sparse_gradients",
        "eigenvalue",
        "sparse_attention",
        "graph_harvesting",
        "curriculum_learning",
        "progressive_layer_drop",
    ],
)
def test_removed_block_is_reported_as_removed(key: str) -> None:
    (result,) = errors(ZERO3 | {key: {"enabled": False}})
    assert result.startswith(f"ds.json: {key}: is no longer supported by DeepSpeed; remove it (")


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"zero_optimisation": {}}, "zero_optimisation: DeepSpeed has no such key; did you mean zero_optimization?"),
        ({"qqq": 1}, "qqq: DeepSpeed has no such key; remove it"),
        (
            {"zero_optimization": {"stage": 4}},
            "zero_optimization.stage: is 4, but must be 1, 2 or 3; set one of them",
        ),
        ({}, "zero_optimization.stage: is missing, but must be 1, 2 or 3; set one of them"),
        (
            {"zero_optimization": {"stage": "auto"}},
            'zero_optimization.stage: is "auto", but must be 1, 2 or 3; set one of them',
        ),
        ({"zero_optimization": 3}, "zero_optimization: must be an object ({…}); got 3"),
        (
            {"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}},
            "zero_optimization.offload_param: requires stage 3 or higher, but stage is 2; increase it, or remove offload_param",
        ),
        (
            {"zero_optimization": {"stage": 3, "offload_param": "cpu"}},
            'zero_optimization.offload_param: must be an object such as {"device": "cpu"}; got "cpu"',
        ),
        (
            ZERO3 | {"optimizer": {"params": {"amsgrad": True}}},
            "optimizer.params.amsgrad: has no effect, because the run configuration sets the optimizer in [optim]; remove it",
        ),
        (
            ZERO3 | {"flops_profiler": {"profile_step": "x"}},
            'flops_profiler.profile_step: must be a number; got "x"',
        ),
        (
            ZERO3 | {"flops_profiler": {"enabled": "x"}},
            'flops_profiler.enabled: must be true or false; got "x"',
        ),
        (
            ZERO3 | {"log_level": "evil"},
            'log_level: must be one of debug, info, warning, error, critical; got "evil"',
        ),
        (ZERO3 | {"steps_per_print": 0}, "steps_per_print: must be greater than 0; got 0"),
        (
            ZERO3 | {"expert_parallel": {"enabled": True}},
            "expert_parallel: is not supported: the models have no experts; remove it",
        ),
    ],
)
def test_invalid_deepspeed_value_is_reported_with_key(document: dict[str, Any], message: str) -> None:
    assert errors(document, make(train={"precision": "fp32"})) == [f"ds.json: {message}"]


def test_partition_size_must_divide_rank_count() -> None:
    document = {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 3}}
    (error,) = errors(document, world_size=4)
    assert "zero_hpz_partition_size (3) does not divide the number of ranks (4)" in error
    assert "gradients and optimizer states remain partitioned" in error
    resolve(document, world_size=6)
    resolve(document, world_size=2)  # DeepSpeed assumes that all ranks are on one host


def test_zero_stage_0_is_rejected() -> None:
    (result,) = errors({"zero_optimization": {"stage": 0}})
    assert "stage: is 0, but must be 1, 2 or 3; set one of them" in result


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1,\n"b": }', "ds.json: line 2 is not valid JSON: Expecting value; correct the line"),
        ("[1]", "ds.json: the file must consist of sections with keys; got a list"),
        ('{"bf16": {}, "bf16": {}}', "ds.json: duplicate keys in the same section: bf16; keep one of each"),
    ],
)
def test_unreadable_json_is_reported_with_line(text: str, message: str) -> None:
    assert errors(text) == [message]


def test_deepspeed_file_must_be_json() -> None:
    Path("ds.toml").write_text("")
    with pytest.raises(ConfigError, match=r"ds\.toml is not a \.json file"):
        resolve_deepspeed("ds.toml", SFTConfig(), device="cpu", world_size=1)


@pytest.mark.parametrize("name", ["zero2.json", "zero3.json", "zero3_offload.json"])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_each_shipped_file_fits_cpu_and_gpu(name: str, precision: str) -> None:
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    config = make(train={"precision": precision})
    on_cpu = resolve_deepspeed(name, config, device="cpu", world_size=2)["zero_optimization"]
    on_gpu = resolve_deepspeed(name, config, device="cuda", world_size=2)["zero_optimization"]
    assert on_cpu["stage"] == on_gpu["stage"] == (2 if name == "zero2.json" else 3)
    assert on_cpu["overlap_comm"] is False
    assert DeepSpeedZeroConfig(**on_gpu).overlap_comm is True  # DeepSpeed's default, but only at stage 3
    for block in ("offload_optimizer", "offload_param"):
        if name == "zero3_offload.json":
            assert on_cpu[block] == {"device": "cpu", "pin_memory": False}
            assert on_gpu[block] == {"device": "cpu", "pin_memory": True}
        else:
            assert block not in on_cpu
