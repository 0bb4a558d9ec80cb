"""Recomputing activations, or keeping them on the host, changes no gradient, under ZeRO-3 and with Qwen3-VL's deepstack."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.autograd.graph import save_on_cpu

from tests.distributed import run_on_ranks

pytestmark = pytest.mark.integration

FAMILIES = ("qwen2_5_vl", "qwen3_vl")
DS_CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 1,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 100},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}


def inputs_of(folder: Path) -> dict[str, Any]:
    from dsreason.models.processors.loading import load_processor

    random = np.random.default_rng(0)
    metadata = {"fps": 1.0, "total_num_frames": 4, "duration": 4.0, "frames_indices": [0, 1, 2, 3]}
    image, video = (f"<|vision_start|><|{kind}_pad|><|vision_end|>" for kind in ("image", "video"))
    encoded = load_processor(folder)(
        text=[f"{image}{video}which one falls?"],
        images=[random.integers(0, 256, (64, 96, 3), dtype=np.uint8)],
        videos=[random.integers(0, 256, (4, 64, 64, 3), dtype=np.uint8)],
        video_metadata=[metadata],
        do_sample_frames=False,
        return_tensors="pt",
    )
    return {key: value for key, value in encoded.items() if isinstance(value, torch.Tensor)}


class Recorded(save_on_cpu):
    """A `save_on_cpu` context that records the shapes of the tensors that it moves."""

    moved: list[tuple[int, ...]] = []  # noqa: RUF012 (of all of them)

    def __init__(self, pin_memory: bool) -> None:
        super().__init__(pin_memory)
        pack = self.pack_hook

        def record(tensor: torch.Tensor) -> Any:
            self.moved.append(tuple(tensor.shape))
            return pack(tensor)

        self.pack_hook = record


def gradients(
    folder: Path, *, checkpointing: bool, offload: bool = False, frozen: tuple[str, ...] = ()
) -> dict[str, np.ndarray]:
    import deepspeed
    from deepspeed.utils import safe_get_full_grad

    from dsreason.models import policy
    from dsreason.models.freeze import freeze
    from dsreason.models.load import load_model
    from dsreason.models.policy import enable_gradient_checkpointing

    policy.save_on_cpu = Recorded  # type: ignore[misc]
    Recorded.moved.clear()

    model = load_model(folder, dtype=torch.float32, deepspeed=DS_CONFIG)
    freeze(model, frozen)
    if checkpointing:
        enable_gradient_checkpointing(model, offload=offload)
    tower = []
    model.model.visual.register_forward_hook(lambda module, args, output: tower.append(output.last_hidden_state))
    runs = dict.fromkeys(("text", "vision"), 0)

    def count(part: str) -> None:
        runs[part] += 1

    model.model.language_model.layers[0].register_forward_pre_hook(lambda *_: count("text"))
    model.model.visual.blocks[0].register_forward_pre_hook(lambda *_: count("vision"))
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(trained.values()), config=DS_CONFIG)
    inputs = inputs_of(folder)
    loss = engine(**inputs, labels=inputs["input_ids"], use_cache=False).loss
    engine.backward(loss)
    assert all(output.requires_grad != bool(frozen) for output in tower)  # a frozen tower needs no backward pass
    second = 2 if checkpointing else 1
    # The tower processes images and videos separately.
    assert runs == {"text": second, "vision": 2 * (1 if frozen else second)}
    # These are the inputs of all layers with a gradient. Weights are not among them, because ZeRO-3 gathers and
    # releases weights.
    text, vision = model.config.text_config, model.config.vision_config
    of_media = (
        [] if frozen else [(len(inputs[name]), vision.hidden_size) for name in ("pixel_values", "pixel_values_videos")]
    )
    expected = [shape for shape in of_media for _ in range(vision.depth)]
    expected += [(1, inputs["input_ids"].shape[1], text.hidden_size)] * text.num_hidden_layers
    assert Recorded.moved == (expected if offload else []), (Recorded.moved, expected)
    return {name: safe_get_full_grad(p).float().numpy().copy() for name, p in trained.items()}


def check_family(folder: str) -> dict[str, float]:
    """Return the largest difference between gradients, relative to the tensor's norm, and the number of tensors without a
    gradient."""
    result = {}
    for label, frozen in (("all", ()), ("tower frozen", ("visual",))):
        plain = gradients(Path(folder), checkpointing=False, frozen=frozen)
        second = gradients(Path(folder), checkpointing=True, frozen=frozen)
        elsewhere = gradients(Path(folder), checkpointing=True, offload=True, frozen=frozen)
        assert plain.keys() == second.keys() == elsewhere.keys()
        assert all(np.array_equal(elsewhere[name], second[name]) for name in second)
        norms = {name: np.linalg.norm(gradient) for name, gradient in plain.items()}
        result[label] = float(max(np.linalg.norm(second[name] - plain[name]) / (norms[name] + 1e-12) for name in plain))
        result[f"{label}, zero"] = int(sum(norm < 1e-9 for norm in norms.values()))
    return result


def check_families(root: str) -> dict[str, dict[str, float]]:
    from dsreason.job.ranks import init_world

    init_world()
    return {family: check_family(str(Path(root, family))) for family in FAMILIES}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, float]]]:
    from dsreason.models.tiny import build_tiny

    root = tmp_path_factory.mktemp("models")
    for family in FAMILIES:
        build_tiny(family, root / family, vision_depth=3)
    return run_on_ranks(check_families, 2, str(root))


@pytest.mark.parametrize("family", FAMILIES)
def test_gradient_checkpointing_does_not_change_gradients(
    ranks: list[dict[str, dict[str, float]]], family: str
) -> None:
    for rank in ranks:
        result = rank[family]
        assert result["all"] < 1e-5
        assert result["tower frozen"] < 1e-5
        assert result["all, zero"] == result["tower frozen, zero"] == 0
