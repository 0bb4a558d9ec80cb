"""The search for models and the loading of their components: layouts of real folders, and refused folders."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dsreason.errors import CheckpointError, ConfigError
from dsreason.world.context_parallel import check_sizes
from dsreason.world.families import FAMILIES, find_family
from dsreason.world.families.components import load_scheduler
from dsreason.world.models import (
    MODEL_FILES,
    build_empty_transformer,
    check_components,
    load_transformer,
    load_vae,
    resolve_world_model,
)
from dsreason.world.schema import WorldModelConfig

NAMES = tuple(FAMILIES)


@pytest.fixture
def folder(tiny_worlds: dict[str, Path], tmp_path: Path) -> Path:
    """A copy of the tiny Cosmos model that a test may change."""
    return shutil.copytree(tiny_worlds["cosmos_predict2_5"], tmp_path / "model")


def change(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


@pytest.mark.parametrize("name", NAMES)
def test_tiny_models_are_built_once(tmp_path: Path, name: str) -> None:
    world_model = resolve_world_model(WorldModelConfig(path=f"tiny:{name}"), tmp_path)
    assert find_family(world_model) is FAMILIES[name]
    (world_model / "mark").touch()
    assert (resolve_world_model(WorldModelConfig(path=f"tiny:{name}"), tmp_path) / "mark").exists()


@pytest.mark.parametrize("name", NAMES)
def test_model_weights_depend_only_on_seed(tiny_worlds: dict[str, Path], tmp_path: Path, name: str) -> None:
    torch.manual_seed(5)
    FAMILIES[name].build_tiny(tmp_path / "same")
    FAMILIES[name].build_tiny(tmp_path / "other", seed=1)
    weights = "transformer/diffusion_pytorch_model.safetensors"
    expected = (tiny_worlds[name] / weights).read_bytes()
    assert (tmp_path / "same" / weights).read_bytes() == expected
    assert (tmp_path / "other" / weights).read_bytes() != expected


def test_folder_path_resolves_to_itself(folder: Path, tmp_path: Path) -> None:
    assert resolve_world_model(WorldModelConfig(path=str(folder)), tmp_path) == folder


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("tiny:flux", "the tiny model must be one of tiny:cosmos_predict2_5, tiny:wan"),
        ("https://me:secret@example.org/model", r"https://\S*example\.org/model: URLs are not supported"),
        ("./nowhere", "the folder does not exist"),
    ],
)
def test_path_without_model_is_rejected(tmp_path: Path, path: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as error:
        resolve_world_model(WorldModelConfig(path=path), tmp_path)
    assert "secret" not in str(error.value)


def test_folder_without_model_index_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"model_index\.json: is missing; the folder must contain .*diffusers"):
        resolve_world_model(WorldModelConfig(path=str(tmp_path)), tmp_path)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (
            {"_class_name": "FluxPipeline"},
            r"FluxPipeline is not supported; use a model of Cosmos-Predict2\.5 \(Cosmos2_5",
        ),
        ({"_class_name": "Cosmos2VideoToWorldPipeline"}, "Cosmos2VideoToWorldPipeline is not supported"),
        (
            {"_class_name": "WanPipeline", "transformer_2": ["diffusers", "WanTransformer3DModel"]},
            "has two transformers",
        ),
        ({"_class_name": "WanPipeline", "boundary_ratio": 0.875}, "has two transformers"),
        ({"_class_name": "WanPipeline", "expand_timesteps": True}, "has a noise level per token"),
        ([], "is not a JSON object"),
    ],
)
def test_unsupported_pipeline_is_rejected(tmp_path: Path, index: Any, message: str) -> None:
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=message):
        find_family(tmp_path)


def test_published_wan_folders_are_supported(tmp_path: Path) -> None:
    """Include later exports of Wan 2.1, in which the settings that Wan 2.2 added are empty."""
    index = {
        "_class_name": "WanPipeline",
        "transformer_2": [None, None],
        "boundary_ratio": None,
        "expand_timesteps": False,
    }
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    assert find_family(tmp_path) is FAMILIES["wan"]


def test_model_revision_is_downloaded_without_pickles(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requested: list[Any] = []

    def download(path: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        requested.extend([path, revision, *allow_patterns])
        return str(folder)

    monkeypatch.setattr("dsreason.files.hub.snapshot_download", download)
    config = WorldModelConfig(path="nvidia/Cosmos-Predict2.5-2B", revision="diffusers/base/post-trained")
    assert resolve_world_model(config, tmp_path) == folder
    assert requested == [config.path, config.revision, *MODEL_FILES]
    assert not any("bin" in pattern or "pt" in pattern for pattern in MODEL_FILES)


def test_revision_without_diffusers_folder_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsreason.files.hub.snapshot_download", lambda *_, **__: str(tmp_path))
    with pytest.raises(
        CheckpointError, match=r"revision main has no model_index\.json.*model\.revision to one that is, such as diff"
    ):
        resolve_world_model(WorldModelConfig(path="nvidia/Cosmos-Predict2.5-2B"), tmp_path)


def test_folders_in_s3_are_copied_without_pickles(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected: list[str] = []

    def fetch_folder(address: str, want: Any) -> Path:
        names = ["model_index.json", "vae/config.json", "transformer/a.safetensors", "transformer/a.bin", "vae/b.pt"]
        expected.extend(filter(want, names))
        return folder

    monkeypatch.setattr("dsreason.models.folder.fetch_folder", fetch_folder)
    assert resolve_world_model(WorldModelConfig(path="s3://bucket/model"), tmp_path) == folder
    assert expected == ["model_index.json", "vae/config.json", "transformer/a.safetensors"]


def sharded(folder: Path, name: str) -> Path:
    import diffusers

    transformer = getattr(diffusers, FAMILIES[name].transformer).from_pretrained(folder / "transformer")
    shutil.rmtree(folder / "transformer")
    transformer.save_pretrained(folder / "transformer", max_shard_size="300KB")
    assert len(list((folder / "transformer").glob("*.safetensors"))) > 2
    return folder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_shards_are_loaded_as_diffusers_loads_them(
    tiny_worlds: dict[str, Path], tmp_path: Path, name: str, dtype: torch.dtype
) -> None:
    import diffusers

    folder = sharded(shutil.copytree(tiny_worlds[name], tmp_path / "model"), name)
    expected = getattr(diffusers, FAMILIES[name].transformer).from_pretrained(folder / "transformer").to(dtype)
    transformer = load_transformer(folder, dtype)
    assert {parameter.dtype for parameter in transformer.parameters()} == {dtype}
    assert transformer.state_dict().keys() == expected.state_dict().keys()
    for key, value in transformer.state_dict().items():
        assert torch.equal(value, expected.state_dict()[key])
    assert not any(tensor.is_meta for tensor in (*transformer.parameters(), *transformer.buffers()))
    assert all(buffer.dtype != torch.bfloat16 for buffer in transformer.buffers())


def test_missing_weights_are_listed(folder: Path) -> None:
    change(folder / "transformer" / "config.json", num_layers=3)
    with pytest.raises(CheckpointError, match=r"do not match config.json(.|\n)*missing: transformer_blocks\.2\."):
        load_transformer(folder, torch.float32)


def test_transformer_of_wrong_class_is_rejected(folder: Path) -> None:
    change(folder / "transformer" / "config.json", _class_name="WanTransformer3DModel")
    with pytest.raises(
        CheckpointError, match=r"describes a WanTransformer3DModel, but Cosmos-Predict2\.5 needs a Cosmos"
    ):
        load_transformer(folder, torch.float32)


def test_unbuildable_configuration_is_rejected(folder: Path) -> None:
    change(folder / "transformer" / "config.json", attention_head_dim="wide")
    with pytest.raises(CheckpointError, match=r"config\.json: the transformer cannot be built from it"):
        load_transformer(folder, torch.float32)


def test_cosmos_transformer_without_text_layer_is_rejected(folder: Path) -> None:
    change(folder / "transformer" / "config.json", use_crossattn_projection=False)
    with pytest.raises(CheckpointError, match=r"config\.json: use_crossattn_projection is false"):
        check_components(folder)


@pytest.mark.parametrize("name", NAMES)
def test_missing_config_keys_use_class_defaults(tiny_worlds: dict[str, Path], tmp_path: Path, name: str) -> None:
    """Check that reading tolerates missing keys, as diffusers does when it builds the model."""
    (tmp_path / "transformer").mkdir()
    text: dict[str, Any] = {"use_crossattn_projection": True} if name == "cosmos_predict2_5" else {}
    file = tmp_path / "transformer" / "config.json"
    file.write_text(json.dumps({"_class_name": FAMILIES[name].transformer, "num_layers": 1, **text}))
    shutil.copy(tiny_worlds[name] / "model_index.json", tmp_path)
    built = dict(build_empty_transformer(tmp_path).config)
    config = FAMILIES[name].read_transformer_config(tmp_path)
    assert config["num_layers"] == 1
    check_sizes(config, (16, 3, 4, 4), 4)
    for projected in (False, True):
        assert FAMILIES[name].text_width(config, projected) == FAMILIES[name].text_width(built, projected)


class Trap:
    """An object that writes a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


@pytest.mark.parametrize("component", ["transformer", "vae", "text_encoder"])
def test_pickled_weights_are_refused(folder: Path, tmp_path: Path, component: str) -> None:
    mark = tmp_path / "unpickled"
    for weights in list((folder / component).glob("*.safetensors")):
        torch.save(Trap(mark), weights.with_suffix(".bin"))
        torch.save(Trap(mark), folder / component / "pytorch_model.bin")
        weights.unlink()
    with pytest.raises(CheckpointError, match=component):
        if component == "transformer":
            load_transformer(folder, torch.float32)
        elif component == "vae":
            load_vae(folder, "cpu", torch.float32)
        else:
            find_family(folder).encode_text(folder, ["a"], 64, "cpu", torch.float32)
    assert not mark.exists()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"_class_name": "EDMEulerScheduler"}, "EDMEulerScheduler is not supported"),
        ({"use_flow_sigmas": False}, "use_flow_sigmas must be true .*got False"),
        ({"prediction_type": "epsilon"}, "prediction_type 'flow_prediction'.* and 'epsilon'"),
    ],
)
def test_scheduler_without_rectified_flow_is_rejected(folder: Path, values: dict[str, Any], message: str) -> None:
    change(folder / "scheduler" / "scheduler_config.json", **values)
    with pytest.raises(CheckpointError, match=message):
        load_scheduler(folder)


def test_conditioning_frames_require_initial_noise(tiny_worlds: dict[str, Path]) -> None:
    from dsreason.world.types import Conditioning

    conditioning = Conditioning(torch.zeros(1, 16, 3, 4, 4), torch.zeros(1, 1, 3, 1, 1))
    x, s = torch.zeros(1, 16, 3, 4, 4), torch.tensor([0.5])
    for name, width, message in (
        ("cosmos_predict2_5", 128, "requires initial_noise"),
        ("wan", 32, "do not accept given frames"),
    ):
        transformer = load_transformer(tiny_worlds[name], torch.float32)
        with pytest.raises(ValueError, match=message):
            FAMILIES[name].velocity(transformer, x, s, torch.zeros(1, 8, width), conditioning)


COSMOS: dict[str, Any] = {
    "_class_name": "CosmosTransformer3DModel",
    "in_channels": 17,
    "out_channels": 16,
    "attention_head_dim": 128,
    "mlp_ratio": 4.0,
    "text_embed_dim": 1024,
    "adaln_lora_dim": 256,
    "max_size": [128, 240, 240],
    "patch_size": [1, 2, 2],
    "rope_scale": [1.0, 3.0, 3.0],
    "concat_padding_mask": True,
    "extra_pos_embed_type": None,
    "use_crossattn_projection": True,
    "crossattn_proj_in_channels": 100352,
    "encoder_hidden_states_channels": 1024,
}
WAN: dict[str, Any] = {"_class_name": "WanTransformer3DModel", "patch_size": [1, 2, 2], "attention_head_dim": 128}


def cosmos_parameters(heads: int, layers: int) -> int:
    """Count the parameters by hand from the architecture: width d, 1024 text features, modulations of rank 256."""
    d = 128 * heads
    modulations = 3 * (d * 256 + 256 * 3 * d)
    self_attention = 4 * d * d + 2 * 128
    cross_attention = 2 * d * d + 2 * 1024 * d + 2 * 128
    feed_forward = 2 * d * 4 * d
    patches = (17 + 1) * 4 * d + d * 16 * 4
    times = d * d + d * 3 * d + d
    last_modulation = d * 256 + 256 * 2 * d
    text = 100352 * 1024 + 1024
    return (
        layers * (modulations + self_attention + cross_attention + feed_forward)
        + patches
        + times
        + last_modulation
        + text
    )


@pytest.mark.parametrize(
    ("name", "values", "parameters"),
    [
        ("cosmos_predict2_5", COSMOS | {"num_attention_heads": 16, "num_layers": 28}, cosmos_parameters(16, 28)),
        ("cosmos_predict2_5", COSMOS | {"num_attention_heads": 40, "num_layers": 36}, cosmos_parameters(40, 36)),
        # What the published folders hold: Wan2.1-T2V-1.3B-Diffusers and Wan2.1-T2V-14B-Diffusers
        ("wan", WAN | {"num_attention_heads": 12, "num_layers": 30, "ffn_dim": 8960}, 1_418_996_800),
        ("wan", WAN | {"num_attention_heads": 40, "num_layers": 40, "ffn_dim": 13824}, 14_288_491_584),
    ],
    ids=["Cosmos 2B", "Cosmos 14B", "Wan 1.3B", "Wan 14B"],
)
def test_published_configurations_are_built_without_allocating_memory(
    tiny_worlds: dict[str, Path], tmp_path: Path, name: str, values: dict[str, Any], parameters: int
) -> None:
    """Compare with Cosmos' parameter counts, computed by hand: 2,059,174,912 and 14,368,047,104."""
    (tmp_path / "transformer").mkdir()
    shutil.copy(tiny_worlds[name] / "model_index.json", tmp_path)
    (tmp_path / "transformer" / "config.json").write_text(json.dumps(values))
    transformer: nn.Module = build_empty_transformer(tmp_path)
    assert all(parameter.is_meta for parameter in transformer.parameters())
    assert sum(parameter.numel() for parameter in transformer.parameters()) == parameters


@pytest.mark.parametrize(
    ("size", "shape", "message"),
    [
        (3, (16, 24, 88, 160), r"context_parallel_size \(3\) does not divide the model's 16 attention heads"),
        (
            16,
            (16, 3, 4, 4),
            r"context_parallel_size \(16\) does not divide a clip's 12 tokens \(3 x 2 x 2\); change data",
        ),
    ],
)
def test_indivisible_context_parallel_size_is_rejected(size: int, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_sizes(COSMOS | {"num_attention_heads": 16}, shape, size)


def test_published_clip_size_divides_among_eight_ranks() -> None:
    check_sizes(COSMOS | {"num_attention_heads": 16}, (16, 24, 88, 160), 8)


@pytest.mark.parametrize("name", NAMES)
def test_lora_targets_are_linear_layers(tiny_worlds: dict[str, Path], name: str) -> None:
    modules = dict(load_transformer(tiny_worlds[name], torch.float32).named_modules())
    for target in FAMILIES[name].lora_targets:
        matches = [module for key, module in modules.items() if key.endswith(f".{target}")]
        assert matches
        assert all(isinstance(module, nn.Linear) for module in matches)
