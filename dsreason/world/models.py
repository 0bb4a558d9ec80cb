"""Functions that load a world model's components from `model.path`; the diffusers pipeline itself is never built."""

from __future__ import annotations

import fnmatch
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dsreason.errors import CheckpointError, ConfigError
from dsreason.models.folder import MODEL_FILES, build_tiny_folder, download_folder, fetch_model_folder, find_folder
from dsreason.models.load import check_weights, map_parameters
from dsreason.models.weights import find_weights
from dsreason.world.base import add_base
from dsreason.world.data import builtin
from dsreason.world.families import FAMILIES, find_family
from dsreason.world.families.components import WEIGHTS, read_json
from dsreason.world.families.cosmos_predict2_5 import COSMOS_PREDICT2_5
from dsreason.world.latents import LatentCodec, LinearCodec, WanCodec
from dsreason.world.schema import WorldModelConfig
from dsreason.world.types import ClipSize

SQUARES_SIZE = ClipSize(9, 32, 32, 16.0)
SQUARES_CLIPS = 512
"""Number of clips that the codec of `tiny:squares` is fitted to."""
SQUARES_LAYERS = 4


def build_squares(folder: Path) -> None:
    """Build `tiny:squares`, which learns the built-in clips within a minute on a CPU.

    It is a small Cosmos-Predict2.5 folder, with a linear codec instead of the autoencoder, which would take hours to train.
    """
    COSMOS_PREDICT2_5.build_tiny(folder, num_layers=SQUARES_LAYERS)
    squares = [builtin.draw_square(0, number)[0] for number in range(SQUARES_CLIPS)]
    clips = torch.stack([builtin.draw_clip(square, SQUARES_SIZE) for square in squares])
    shutil.rmtree(folder / "vae")
    LinearCodec.fit(clips.float() / 127.5 - 1).save(folder / "vae")


TINY_MODELS: dict[str, Callable[[Path], None]] = {
    **{name: family.build_tiny for name, family in FAMILIES.items()},
    "squares": build_squares,
}
TINY_VERSION = 1
"""Version in the cached folder's name; increment it whenever the models that `build_tiny` creates change."""


def check_installed() -> None:
    """Raise ConfigError if a package that only world models need is not installed."""
    try:
        import diffusers  # noqa: F401
        import peft  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"world models require diffusers and peft ({error}); install them with: pip install 'dsreason[world]'"
        ) from error


def resolve_world_model(model: WorldModelConfig, cache: Path) -> Path:
    """Return the local folder of `model.path`, which may be a folder, a `tiny:` model (built in `cache`), or a model in S3 or
    on the Hub. If it is a dsreason export, the returned folder also links to its base model's components.

    Several ranks may call this at the same time.

    Raises:
        CheckpointError: the model cannot be found, or its family or a component is not supported.
    """
    folder = find_folder(
        model.path,
        tiny=lambda name: make_tiny_world_model(name, cache),
        fetch=lambda: fetch_model_folder(model.path, is_model_file, "a model folder in diffusers' format"),
        download=lambda: download(model),
    )
    folder = add_base(folder, cache, lambda base: resolve_world_model(base, cache))
    find_family(folder)
    return folder


def make_tiny_world_model(name: str, cache: Path) -> Path:
    return build_tiny_folder(name, TINY_MODELS, TINY_VERSION, cache)


def is_model_file(name: str) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in MODEL_FILES)


def download(model: WorldModelConfig) -> Path:
    folder = download_folder(model.path, model.revision, MODEL_FILES)
    if not (folder / "model_index.json").is_file():
        raise CheckpointError(
            f"model.path {model.path}: revision {model.revision or 'main'} has no model_index.json, so it is not in diffusers' "
            "format; set model.revision to one that is, such as diffusers/base/post-trained of Cosmos-Predict2.5"
        )
    return folder


COMPONENTS = (
    "scheduler/scheduler_config.json",
    "text_encoder/config.json",
    "tokenizer/tokenizer_config.json",
    "vae/config.json",
)


def check_components(folder: Path) -> list[str]:
    """Check a model's folder without reading any weights; return the names of the transformer's linear layers.

    Raises:
        CheckpointError: a component is missing, or the transformer's weights do not match its configuration.
    """
    for name in COMPONENTS:
        read_json(folder / name)
    transformer = build_empty_transformer(folder)
    check_weights(transformer, find_weights(folder / "transformer", str, WEIGHTS))
    return [name for name, module in transformer.named_modules() if isinstance(module, torch.nn.Linear)]


def build_empty_transformer(folder: Path) -> Any:
    """Build the transformer in a model's folder without allocating its parameters; only its buffers have values."""
    import diffusers
    from accelerate import init_empty_weights
    from diffusers.models.modeling_utils import no_init_weights

    family, file = find_family(folder), folder / "transformer" / "config.json"
    config = family.read_transformer_config(folder)
    if config.get("_class_name") != family.transformer:
        raise CheckpointError(
            f"{file}: describes a {config.get('_class_name')}, but {family.name} needs a {family.transformer}"
        )
    if problem := family.unsupported_transformer(config):
        raise CheckpointError(f"{file}: {problem}")
    try:
        with no_init_weights(), init_empty_weights(include_buffers=False):
            transformer = getattr(diffusers, family.transformer).from_config(config)
    except Exception as error:  # for example, a size is negative, too large or of the wrong type
        raise CheckpointError(
            f"{file}: the transformer cannot be built from it: {type(error).__name__}: {error}"
        ) from error
    family.accept_projected(transformer)
    return transformer


def load_transformer(
    folder: Path,
    dtype: torch.dtype,
    deepspeed: dict[str, Any] | None = None,
    device: torch.device | str = "cpu",
) -> Any:
    """Load the transformer onto `device`, or partition it if `deepspeed` (a complete configuration) sets ZeRO-3.

    Under ZeRO-3, every rank copies only its own part of each parameter from the memory-mapped files, so no rank holds the
    full model. All ranks must call this together, after `init_distributed`. All parameters get `dtype`, including those that
    diffusers would keep in float32 (in Wan, the time embedding, the modulation tables and some norms), so bfloat16 clips
    differ slightly from the pipeline's.

    Raises:
        CheckpointError: tensors are missing, unexpected or have the wrong shape; the message lists them.
    """
    transformer = build_empty_transformer(folder)
    weights = find_weights(folder / "transformer", str, WEIGHTS)
    check_weights(transformer, weights)
    map_parameters(transformer, weights)
    if deepspeed is not None and deepspeed.get("zero_optimization", {}).get("stage") == 3:
        from dsreason.models.partition import partition_model  # late, because importing DeepSpeed sets its device

        partition_model(transformer, dtype, deepspeed)
    else:
        for parameter in transformer.parameters():
            parameter.data = parameter.data.to(device, dtype, copy=True)
    place_buffers(transformer, device)
    return transformer.train()


def place_buffers(model: Any, device: torch.device | str) -> None:
    """Move the model's buffers to `device` and keep them in float32.

    The buffers contain positions, which no weight file stores. Without the list that this function sets, DeepSpeed would
    convert them to bfloat16.
    """
    model._keep_in_fp32_modules_strict = {name for name, _ in model.named_buffers()}
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module.register_buffer(name, buffer.to(device), persistent=False)


def load_vae(folder: Path, device: torch.device | str, dtype: torch.dtype) -> LatentCodec:
    """Load the frozen codec from a model's folder. Wan's codec and linear codecs compute in float32 regardless of `dtype`."""
    file = folder / "vae" / "config.json"
    kind = read_json(file).get("_class_name")
    if kind == "LinearCodec":
        return LinearCodec.load(folder / "vae", device)
    if kind != "AutoencoderKLWan":
        raise CheckpointError(f"{file}: _class_name must be AutoencoderKLWan or LinearCodec; got {kind}")
    from diffusers import AutoencoderKLWan

    if dtype != torch.float32 and find_family(folder).float32_vae:
        dtype = torch.float32
    try:
        vae = AutoencoderKLWan.from_pretrained(
            folder / "vae", torch_dtype=dtype, use_safetensors=True, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # diffusers' errors for missing, damaged or pickled weights have no common base class
        raise CheckpointError(f"{folder / 'vae'}: the autoencoder cannot be loaded: {error}") from error
    return WanCodec.wrap(vae.to(device))
