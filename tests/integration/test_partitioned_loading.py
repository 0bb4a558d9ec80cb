"""Loading on real ranks: ZeRO-3 partitions contain the checkpoint's values, and no rank ever holds the entire model."""

from __future__ import annotations

import hashlib
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tests.distributed import run_on_ranks

pytestmark = pytest.mark.integration


@dataclass(frozen=True)
class Case:
    family: str
    tied: bool
    dtype: torch.dtype
    stage: int = 3
    offload: bool = False

    @property
    def name(self) -> str:
        tied = "tied" if self.tied else "untied"
        return f"{self.family}-{tied}-{self.dtype}-zero{self.stage}{'-offload' if self.offload else ''}"


CASES = (
    Case("qwen2_5_vl", tied=True, dtype=torch.float32),
    Case("qwen2_5_vl", tied=False, dtype=torch.bfloat16, offload=True),
    Case("qwen2_5_vl", tied=True, dtype=torch.bfloat16, stage=2),
    Case("qwen3_vl", tied=True, dtype=torch.bfloat16),
    Case("qwen3_vl", tied=False, dtype=torch.float32, offload=True),
)
WORLD_SIZE = 3  # most tensors do not divide evenly by 3


def ds_config(dtype: torch.dtype, stage: int = 3, offload: bool = False) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": stage}
    if stage == 3:
        zero["stage3_param_persistence_threshold"] = 100  # norms and biases persist, matrices do not
    if offload:
        zero |= {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "bf16": {"enabled": dtype == torch.bfloat16},
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }


def digests(model: nn.Module) -> dict[str, str]:
    """Return the type, shape and a hash of the values of every parameter and buffer."""
    tensors = {name: t.detach() for name, t in [*model.named_parameters(), *model.named_buffers()]}
    return {
        name: f"{t.dtype} {tuple(t.shape)} {hashlib.sha256(t.float().numpy().tobytes()).hexdigest()}"
        for name, t in tensors.items()
    }


def load_and_digest(root: str) -> dict[str, dict[str, str]]:
    """Compute the digests of each case's parameters on this rank, after loading and after `deepspeed.initialize`."""
    from dsreason.job.ranks import init_world

    init_world()
    import deepspeed

    from dsreason.models.load import load_model

    result = {}
    for case in CASES:
        config = ds_config(case.dtype, case.stage, case.offload)
        model = load_model(Path(root, case.name), dtype=case.dtype, deepspeed=config)
        assert all(p.numel() == 0 for p in model.parameters()) == (case.stage == 3)
        with deepspeed.zero.GatheredParameters(list(model.parameters()), enabled=case.stage == 3):
            result[f"{case.name} loaded"] = digests(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        with deepspeed.zero.GatheredParameters(list(model.parameters()), enabled=case.stage == 3):
            result[f"{case.name} initialized"] = digests(model)
    return result


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, dict[str, str]]]]:
    from dsreason.models.tiny import build_tiny

    root = tmp_path_factory.mktemp("models")
    for case in CASES:
        build_tiny(case.family, root / case.name, tie_embeddings=case.tied, max_shard_bytes=1 << 20)
    return root, run_on_ranks(load_and_digest, WORLD_SIZE, str(root))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_ranks_load_same_values_as_from_pretrained(
    loaded: tuple[Path, list[dict[str, dict[str, str]]]], case: Case
) -> None:
    """Include buffers: rotary frequencies stay float32 in a bfloat16 model, also after `deepspeed.initialize`."""
    from transformers import AutoModelForImageTextToText

    root, ranks = loaded
    assert len(list((root / case.name).glob("*.safetensors"))) > 1
    expected = digests(AutoModelForImageTextToText.from_pretrained(root / case.name, dtype=case.dtype))
    for rank in ranks:
        assert rank[f"{case.name} loaded"] == expected
        assert rank[f"{case.name} initialized"] == expected


def anonymous_bytes() -> int:
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) * 1024


def load_and_watch_memory(folder: str, dtype: torch.dtype) -> dict[str, int]:
    """Return the growth of this rank's anonymous memory while it loads: the maximum (sampled every millisecond) and the final
    value."""
    from dsreason.job.ranks import init_world

    init_world()
    import dsreason.models.partition  # noqa: F401  what is imported does not count as loading
    from dsreason.models.load import load_model

    recorded, stop = [anonymous_bytes()], threading.Event()

    def watch() -> None:
        while not stop.wait(0.001):
            recorded.append(anonymous_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    model = load_model(Path(folder), dtype=dtype, deepspeed=ds_config(dtype))
    stop.set()
    watcher.join()
    total = sum(p.ds_numel * p.element_size() for p in model.parameters())
    return {
        "model": total,
        "samples": len(recorded),
        "peak": max(recorded) - recorded[0],
        "end": anonymous_bytes() - recorded[0],
    }


class Moves(TorchFunctionMode):
    """A recorder of the sizes of all tensors that are moved to a device."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device, self.sizes = device, []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.to and args[1] == self.device:
            self.sizes.append(args[0].numel())
        return func(*args, **(kwargs or {}))


def partition_as_for_a_gpu() -> dict[str, tuple[bool, frozenset[int]]]:
    """Return, for each case, whether this rank's parts are correct, and the sizes of the tensors moved to its device."""
    from deepspeed.accelerator import get_accelerator

    from dsreason.job.ranks import init_world
    from dsreason.models.partition import partition_model

    rank, accelerator, result = init_world().rank, get_accelerator(), {}
    cases = (("same type", torch.float32, 1), ("converted", torch.bfloat16, 1), ("hpZ", torch.bfloat16, 2))
    for case, dtype, group in cases:
        torch.manual_seed(0)
        model = nn.Linear(5, 7)
        full = {name: parameter.detach().clone().to(dtype).flatten() for name, parameter in model.named_parameters()}
        config = ds_config(dtype)
        config["zero_optimization"] |= {"stage3_param_persistence_threshold": 0, "zero_hpz_partition_size": group}
        with mock.patch.object(accelerator, "device_name", lambda *_: "cpu:0"), Moves(torch.device("cpu:0")) as moves:
            partition_model(model, dtype, config)
        right = all(
            is_part(parameter.ds_tensor, full[name], rank)
            and (group == 1 or is_part(parameter.ds_secondary_tensor, full[name], rank % group))
            for name, parameter in model.named_parameters()
        )
        result[case] = (right, frozenset(moves.sizes))
    return result


def is_part(tensor: Tensor, whole: Tensor, number: int) -> bool:
    part = whole[number * tensor.numel() :][: tensor.numel()]
    return torch.equal(tensor[: len(part)], part)


def test_gpu_never_receives_entire_parameter() -> None:
    for on_rank in run_on_ranks(partition_as_for_a_gpu, 4):
        assert set(on_rank.values()) == {(True, frozenset({0}))}  # parameters are empty when they are moved


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a Qwen3-VL of 1 GB in float32, with a realistic vocabulary."""
    from transformers import AutoModelForImageTextToText

    from dsreason.models.load import read_model_config
    from dsreason.models.tiny import build_tiny

    folder = tmp_path_factory.mktemp("large") / "model"
    build_tiny("qwen3_vl", folder, hidden_size=1024, intermediate_size=4096, num_layers=8)
    config = read_model_config(folder)
    config.text_config.vocab_size = 151936
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    model.to_empty(device="cpu").tie_weights()
    for parameter in model.parameters():
        torch.nn.init.uniform_(parameter.data)
    model.save_pretrained(folder, max_shard_size="10GB")
    return folder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_peak_memory_of_loading_stays_below_half_model(large: Path, dtype: torch.dtype) -> None:
    """Include float32 files that must be converted. Half of the model is a single embedding."""
    for rank in run_on_ranks(load_and_watch_memory, 4, str(large), dtype):
        assert rank["model"] > 1.0e9 / 4 * dtype.itemsize
        assert rank["samples"] > 20
        # A rank keeps a quarter of the model, so the measurement includes its partition.
        assert rank["end"] > rank["model"] / 5
        assert rank["peak"] < rank["model"] / 2
