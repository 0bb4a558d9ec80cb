"""Models that do not fit on one device give the same outputs as on one. As the tests have only one CPU, the remaining weights
stay in the files. For several GPUs, only the plan is tested; a GPU with files is tested in tests/gpu."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dsreason.config.schema import SFTConfig
from dsreason.data.chat import Encoder
from dsreason.families import get_family
from dsreason.models import placement
from dsreason.models.load import build_checked_model
from dsreason.models.placement import describe_placement, find_home, list_devices, load_where_it_fits, plan_devices
from dsreason.models.tiny import build_tiny
from dsreason.rollout.protocol import Sampling
from dsreason.rollout.transformers_engine import TransformersEngine, draw_tokens
from dsreason.train.common.preflight import build_encoder

CPU = torch.device("cpu")
Limit = Callable[[float], None]
Draws = list[tuple[list[int], list[float]]]


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl"])
def deep(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model whose layers are larger than its vision tower, as in real models."""
    return build_tiny(
        request.param, tmp_path_factory.mktemp("deep") / request.param, num_layers=4, intermediate_size=2048
    )


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch, deep: Path) -> Limit:
    """A function that limits the device's memory to this share of the model's weights in float32."""
    size = weight_bytes(deep)
    return lambda share: monkeypatch.setattr(placement, "compute_budget", lambda device: int(share * size))


def weight_bytes(folder: Path) -> int:
    model, _ = build_checked_model(folder, dtype=torch.float32)
    return sum(parameter.nbytes for parameter in model.parameters())


def drawn(model: Any, encoder: Encoder) -> Draws:
    """Return the completions sampled for three rows, two of which show the same image."""
    image, video = encoder.build_dummy("image"), encoder.build_dummy("video")
    steps = draw_tokens(
        model,
        [image, video, image],
        [0, 1, 2],
        Sampling(max_completion_length=2, seed=1),
        banned_ids=torch.tensor([5, 6]),
        stop_ids=torch.tensor([7]),
    )
    return [(token.tolist(), logprob.tolist()) for token, logprob in steps]


def in_files(model: Any) -> float:
    """Return the fraction of a model's values that are still in their files."""
    sizes = [(parameter.numel(), parameter.is_meta) for parameter in model.parameters()]
    return sum(size for size, meta in sizes if meta) / sum(size for size, _ in sizes)


@pytest.fixture(scope="module")
def whole(deep: Path) -> tuple[Encoder, Draws]:
    """The encoder, and the completions of the model that is entirely on one device."""
    encoder = build_encoder(SFTConfig(), deep)
    return encoder, drawn(load_where_it_fits(deep, dtype=torch.float32, device=CPU), encoder)


@pytest.mark.parametrize(("share", "least", "most"), [(0.0, 1, 1), (0.6, 0.2, 0.95)])
def test_answers_do_not_depend_on_weight_placement(
    deep: Path, whole: tuple[Encoder, Draws], limit: Limit, share: float, least: float, most: float
) -> None:
    encoder, expected = whole
    limit(share)
    model = load_where_it_fits(deep, dtype=torch.float32, device=CPU)
    assert least <= in_files(model) <= most
    assert drawn(model, encoder) == expected


@pytest.mark.parametrize("tied", [True, False])
def test_file_weights_are_converted_and_kept_tied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tied: bool) -> None:
    folder = build_tiny("qwen3_vl", tmp_path / "model", tie_embeddings=tied)
    encoder = build_encoder(SFTConfig(), folder)
    expected = drawn(load_where_it_fits(folder, dtype=torch.bfloat16, device=CPU), encoder)
    monkeypatch.setattr(placement, "compute_budget", lambda device: 0)
    model = load_where_it_fits(folder, dtype=torch.bfloat16, device=CPU)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert drawn(model, encoder) == expected


def test_evaluation_engine_reports_placement_of_large_model(
    deep: Path, limit: Limit, caplog: pytest.LogCaptureFixture
) -> None:
    encoder = build_encoder(SFTConfig(), deep)
    engine = TransformersEngine(deep, encoder.processor.tokenizer, dtype=torch.float32, device=CPU)
    engine.load(1)
    assert caplog.text == ""
    limit(0.5)
    with caplog.at_level(logging.WARNING, "dsreason"):
        engine.load(1)
    assert engine.model is not None and in_files(engine.model) > 0
    assert " and do not fit on cpu: " in caplog.text and " stay in their files" in caplog.text


# ---------------------------------------------------------------- several GPUs


def planned(folder: Path, *shares: float) -> tuple[Any, dict[str, int | str]]:
    """Return an empty model, and the placement of its modules on GPUs with memory for these shares of it."""
    model, _ = build_checked_model(folder, dtype=torch.float32)
    size = sum(parameter.nbytes for parameter in model.parameters())
    family = get_family(model.config.model_type)
    budgets: dict[int | str, int] = {number: int(share * size) for number, share in enumerate(shares)}
    return model, plan_devices(model, family, budgets)


@pytest.mark.parametrize(
    ("shares", "expected"), [((0.9, 0.9), {0, 1}), ((0.6, 0.5, 0.5), {0, 1, 2}), ((0.7,), {0, "disk"})]
)
def test_whole_layers_are_distributed_across_gpus(
    deep: Path, shares: tuple[float, ...], expected: set[int | str]
) -> None:
    model, device_map = planned(deep, *shares)
    homes = {name: find_home(name, device_map) for name, _ in model.named_parameters()}
    assert set(homes.values()) == expected
    layers = [f"model.language_model.layers.{i}." for i in range(model.config.text_config.num_hidden_layers)]
    for part in ("model.visual.", *layers):
        assert len({home for name, home in homes.items() if name.startswith(part)}) == 1, part


def test_inputs_are_moved_to_model_gpu(deep: Path) -> None:
    _, device_map = planned(deep, 0.0, 2.0)  # another program uses the memory of the first GPU
    assert set(device_map.values()) == {1}
    assert "" not in device_map  # accelerate would use it as the device of the inputs


@pytest.mark.parametrize(
    ("rank", "ranks", "expected"), [(0, 1, [0, 1, 2, 3]), (0, 2, [0, 2]), (1, 2, [1, 3]), (3, 4, [3])]
)
def test_host_gpus_are_divided_among_ranks(
    monkeypatch: pytest.MonkeyPatch, rank: int, ranks: int, expected: list[int]
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert list_devices(torch.device("cuda", rank)) == [torch.device("cuda", i) for i in expected]
    assert list_devices(CPU) == [CPU]


@pytest.mark.parametrize(
    ("ranks", "shares", "expected"),
    [
        (1, (0.9, 0.9), ["GiB are placed on cuda:0", "GiB are placed on cuda:1"]),
        (
            1,
            (0.7,),
            ["GiB are placed on cuda:0", "GiB stay in their files and are read again for every token, which is slow"],
        ),
        (
            4,
            (0.7,),
            [
                "GiB are placed on cuda:0",
                "GiB stay in",
                "use --nproc 1 to distribute a single copy of the model across all GPUs",
            ],
        ),
    ],
)
def test_weight_placement_is_described(
    deep: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, shares: tuple[float, ...], expected: list[str]
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    model, device_map = planned(deep, *shares)
    text = describe_placement(model, device_map, [torch.device("cuda", i) for i in range(len(shares))])
    head, *parts = text.replace("fit on cuda:0: ", "fit on cuda:0; ").split("; ")
    assert head == "the weights need 0.0 GiB and do not fit on cuda:0"
    assert len(parts) == len(expected)
    assert all(text in part for text, part in zip(expected, parts, strict=True))
