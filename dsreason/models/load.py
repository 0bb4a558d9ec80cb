"""Functions that load `model.path`: its folder, configuration and weights. Under ZeRO-3, no rank ever holds all weights."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from dsreason.config.schema import ModelConfig
from dsreason.errors import CheckpointError
from dsreason.families import FAMILIES, get_family
from dsreason.families.layer_types import has_delta_nets
from dsreason.models.attention import check_attention, use_segments
from dsreason.models.folder import (
    MODEL_FILES,
    build_tiny_folder,
    check_sizes,
    download_folder,
    explain_custom_code,
    fetch_model_folder,
    find_folder,
    find_weight_folders,
)
from dsreason.models.generation import read_generation_config
from dsreason.models.layers.delta_net import separate_samples
from dsreason.models.layers.fused_kernels import use_fused_kernels
from dsreason.models.media_features import patch_vision
from dsreason.models.nf4.layers import NF4Linear, convert_to_nf4, quantize_weight
from dsreason.models.weights import WeightFiles, find_weights
from dsreason.problems import join_first

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TINY_VERSION = 2
"""Version number in the names of cached tiny models; increment it whenever `build_tiny` builds different models."""
MAX_BUFFER = 10_000_000
"""Maximum number of values in a buffer; for comparison, the buffer of rotary frequencies has half as many values as a head."""
TRAINABLE = ("F64", "F32", "F16", "BF16")


def resolve_model(config: ModelConfig, cache: Path) -> Path:
    """Return the local folder of `model.path`.

    The result is the folder itself, a `tiny:` model built under `cache`, a copy of an S3 folder, or a download from the Hub.
    Several ranks may call this function at the same time. If the model is missing, a CheckpointError says what was searched for,
    and where.
    """
    folder = find_folder(
        config.path,
        tiny=lambda name: build_tiny_model(name, cache),
        fetch=lambda: fetch_model(config),
        download=lambda: download_model(config),
    )
    if not (folder / "config.json").is_file():
        raise CheckpointError(
            f"model.path {config.path}: has no config.json; set model.path to a Hugging Face model folder"
        )
    return folder


def build_tiny_model(family: str, cache: Path) -> Path:
    from dsreason.models.tiny import build_tiny  # imported on demand, because only this function trains a tokenizer

    return build_tiny_folder(family, {name: partial(build_tiny, name) for name in FAMILIES}, TINY_VERSION, cache)


def fetch_model(config: ModelConfig) -> Path:
    """Copy a model folder from S3 and return the local copy; of subfolders, copy only the weights that the model needs."""
    patterns = list_file_patterns(config)

    def is_beside_config(name: str) -> bool:
        return "/" not in name and any(fnmatch.fnmatch(name, pattern) for pattern in patterns)

    def is_needed(name: str) -> bool:
        return is_beside_config(name) or (name.rpartition("/")[0] in subfolders and name.endswith(".safetensors"))

    folder = fetch_model_folder(config.path, is_beside_config, "a Hugging Face model folder")
    if not (subfolders := find_weight_folders(folder)):
        return folder
    return fetch_model_folder(config.path, is_needed, "a Hugging Face model folder")


def download_model(config: ModelConfig) -> Path:
    """Download a model from the Hub and return its local folder; of the weights in subfolders, only those that it needs."""
    folder = download_folder(config.path, config.revision, list_file_patterns(config), ignored=["*/*.safetensors"])
    if weights := [f"{name}/*.safetensors" for name in find_weight_folders(folder)]:
        download_folder(config.path, folder.name, weights)  # the snapshot's folder is named after its commit
    return folder


def list_file_patterns(config: ModelConfig) -> list[str]:
    return [*MODEL_FILES, *(["*.py"] if config.trust_remote_code else [])]


def read_model_config(path: Path, *, dtype: torch.dtype | None = None, trust_remote_code: bool = False) -> Any:
    """Read the transformers config of a model folder; raise CheckpointError if it is unreadable or the model is unsupported.

    `dtype` is the dtype in which the model will be loaded, on which positions depend; None means the dtype in config.json.
    """
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:  # transformers' errors for invalid values have no common base class
        problem = explain_custom_code(path, error, "AutoConfig")
        raise CheckpointError(
            f"{path}: config.json cannot be read: {problem or str(error) or type(error).__name__}"
        ) from error
    try:
        get_family(config.model_type)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    if config.to_dict().get("quantization_config"):
        raise CheckpointError(
            f"{path}: the weights are quantised, so they cannot be trained; use the unquantised model"
        )
    check_sizes(path, config.to_dict())
    check_fixed_settings(path, config)
    if not isinstance(config.dtype, torch.dtype | None):
        raise CheckpointError(
            f"{path}: config.json has dtype {config.dtype!r:.100}, which torch does not support; restore the original config.json"
        )
    if dtype is not None:
        config.dtype = dtype
    return config


def check_fixed_settings(path: Path, config: Any) -> None:
    """Raise CheckpointError if config.json has a value that vLLM would use, but transformers would ignore."""
    text = config.get_text_config().to_dict()
    for name, value in get_family(config.model_type).fixed_settings:
        if text.get(name, value) != value:
            raise CheckpointError(
                f"{path}: config.json has text_config.{name} = {text[name]}, but transformers supports only {value}, so training "
                "and vLLM would compute different models; use a model that was trained with that value"
            )


def read_parameter_names(path: Path) -> list[str]:
    """Read the in-memory names of a model folder's parameters from the file headers; a tied `lm_head` is omitted."""
    config = read_model_config(path)
    family = get_family(config.model_type)
    names = find_weights(path, family.rename, inside=family.weight_folders, is_transposed=family.is_transposed).places
    return [name for name in names if not (config.tie_word_embeddings and name == f"{family.modules.head}.weight")]


def load_model(
    path: Path,
    *,
    dtype: torch.dtype,
    attention: str = "auto",
    device: torch.device | str = "cpu",
    deepspeed: dict[str, Any] | None = None,
    quantize: Literal["nf4"] | None = None,
    fused_kernels: bool = False,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """Load a model onto `device`, or into ZeRO-3 partitions if `deepspeed` (a complete config) sets stage 3.

    Under ZeRO-3, every rank maps the files into memory and copies its part of each parameter, one parameter at a time. No rank
    holds the complete model, and nothing is sent over the network. All ranks must call this function together, after
    `init_distributed`. If tensors are missing, are unexpected or have a different shape, a CheckpointError lists them.

    Args:
        quantize: "nf4" freezes the matrices of the language model and stores them in 4 bits; None leaves them unquantised.
        fused_kernels: whether to use the GPU kernels in `dsreason.models.layers.fused_kernels`.
    """
    model, weights = build_checked_model(path, dtype=dtype, attention=attention, trust_remote_code=trust_remote_code)
    family = get_family(model.config.model_type)
    quantized = [] if quantize is None else convert_to_nf4(model, family.modules.text_layers, dtype)
    if deepspeed is not None and deepspeed.get("zero_optimization", {}).get("stage") == 3:
        from dsreason.models.partition import partition_model  # DeepSpeed picks its device when it is imported

        map_parameters(model, weights)
        fill_buffers(model, device)
        partition_model(model, dtype, deepspeed, quantized)
    else:
        load_weights(model, weights, dtype, device, quantized)
    model.generation_config = read_generation_config(path, model.config)
    patch_vision(model)
    if fused_kernels:
        use_fused_kernels(model)
    return model.train()


def build_checked_model(
    path: Path, *, dtype: torch.dtype = torch.float32, attention: str = "auto", trust_remote_code: bool = False
) -> tuple[PreTrainedModel, WeightFiles]:
    """Build the model in a folder without weights, and check that the files contain all of them. Raises the same errors as
    `load_model`."""
    config = read_model_config(path, trust_remote_code=trust_remote_code)
    family = get_family(config.model_type)
    check_attention(family, attention)
    weights = find_weights(path, family.rename, inside=family.weight_folders, is_transposed=family.is_transposed)
    check_depth(config, weights)
    model = build_empty_model(config, dtype, attention, trust_remote_code)
    check_weights(model, weights)
    return model, weights


def load_weights(
    model: PreTrainedModel,
    weights: WeightFiles,
    dtype: torch.dtype,
    device: torch.device | str,
    quantized: Sequence[NF4Linear] = (),
) -> None:
    """Load all weights of an empty model onto one device, and quantise the weights of the `quantized` layers to 4 bits."""
    map_parameters(model, weights)
    fill_buffers(model, device)
    for layer in quantized:
        quantize_weight(layer, device)
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(device, dtype, copy=True, memory_format=torch.contiguous_format)


def check_depth(config: Any, weights: WeightFiles) -> None:
    """Raise CheckpointError if config.json claims more layers than there are tensors: building them could take forever."""
    depths = {"num_hidden_layers": config.get_text_config().num_hidden_layers}
    family = get_family(config.model_type)
    if family.vision is not None:
        depths = {
            "text_config.num_hidden_layers": config.text_config.num_hidden_layers,
            "vision_config.depth": family.tower_shape(config.vision_config).depth,
        }
    for key, layers in depths.items():
        if layers > len(weights.places):
            raise CheckpointError(
                f"{weights.folder}: config.json has {key} = {layers}, but the files contain only {len(weights.places)} tensors; "
                "download the model again"
            )


def build_empty_model(config: Any, dtype: torch.dtype, attention: str, trust_remote_code: bool) -> PreTrainedModel:
    """Build a model whose tensors occupy no memory. Tied embeddings are a single parameter."""
    implementation = "sdpa" if attention == "auto" else attention
    has_vision = get_family(config.model_type).vision is not None
    try:
        with init_empty_weights(include_buffers=True):
            model = (AutoModelForImageTextToText if has_vision else AutoModelForCausalLM).from_config(
                config, dtype=dtype, attn_implementation=implementation, trust_remote_code=trust_remote_code
            )
    except (ImportError, ValueError) as error:
        raise CheckpointError(f"the model cannot be built with model.attention = {attention!r}: {error}") from error
    except Exception as error:  # for example, because a size is negative or too large, or torch does not know a name
        raise CheckpointError(
            f"{config.name_or_path}: the model cannot be built from config.json: {type(error).__name__}: {error}"
        ) from error
    if attention == "auto":
        use_segments(model)
    if has_delta_nets(config.get_text_config()):
        separate_samples(model)
    # DeepSpeed would cast the rotary frequencies to the training dtype, but bfloat16 changes them by up to 0.4 %.
    model._keep_in_fp32_modules_strict = {*model._keep_in_fp32_modules_strict, "inv_freq"}
    return model


def check_weights(model: nn.Module, weights: WeightFiles) -> None:
    """Raise CheckpointError unless the files contain exactly the model's parameters and, possibly, a tied lm_head."""
    expected = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    firsts = {id(parameter): name for name, parameter in model.named_parameters()}
    tied = {name: firsts[id(p)] for name, p in model.named_parameters(remove_duplicate=False) if name not in expected}
    headers = weights.headers()
    shapes = {name: shape for name, (shape, _) in headers.items()}
    problems = {
        "missing": sorted(expected.keys() - shapes.keys()),
        "unexpected": sorted(shapes.keys() - expected.keys() - tied.keys()),
        "with a different shape": [
            f"{name} has {list(shapes[name])}, but config.json requires {list(shape)}"
            for name, shape in expected.items()
            if shapes.get(name, shape) != shape
        ],
        "with a dtype that cannot be trained": [
            f"{name} ({dtype})" for name, (_, dtype) in headers.items() if dtype not in TRAINABLE
        ],
    }
    lines = [
        f"  {len(names)} {kind}: {join_first(names, 8, separator=', ')}" for kind, names in problems.items() if names
    ]
    if problems["missing"] and weights.unlisted:
        names = join_first([str(file.relative_to(weights.folder)) for file in weights.unlisted], 8, separator=", ")
        lines.append(f"  model.safetensors.index.json does not list {names}")
    if lines:
        raise CheckpointError("\n".join([f"{weights.folder}: the weights do not match config.json", *lines]))
    check_tied(weights, {name: first for name, first in tied.items() if name in shapes})


def check_tied(weights: WeightFiles, stored: dict[str, str]) -> None:
    """Raise CheckpointError if a tied lm_head in the files differs from the embedding, because its values would be lost.

    `stored` maps the lm_head's name to the embedding's name.
    """
    for name, embedding in stored.items():
        tensors: dict[str, Tensor] = {}
        weights.read([name, embedding], tensors.__setitem__)
        if not torch.equal(tensors[name], tensors[embedding]):
            raise CheckpointError(
                f"{weights.folder}: config.json has tie_word_embeddings = true, but {name} differs from {embedding}; "
                "set tie_word_embeddings = false to keep both"
            )


def map_parameters(model: nn.Module, weights: WeightFiles, names: list[str] | None = None) -> None:
    """Replace empty parameters (`names`, or all) with tensors from the files, in every module that shares the parameter."""
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            owners.setdefault(id(parameter), []).append((module, name))
    empty = dict(model.named_parameters())

    def place(name: str, tensor: Tensor) -> None:
        parameter = nn.Parameter(tensor)
        for module, attribute in owners[id(empty[name])]:
            module.register_parameter(attribute, parameter)

    weights.read(list(empty) if names is None else names, place)


def fill_buffers(model: PreTrainedModel, device: torch.device | str = "cpu") -> None:
    """Compute the model's buffers, such as rotary frequencies, with transformers' initialisation; no file contains them."""
    for module in model.modules():
        names = [name for name, _ in module.named_buffers(recurse=False)]
        for name in names:
            buffer = module.get_buffer(name)
            if buffer.numel() > MAX_BUFFER:
                raise CheckpointError(
                    f"{model.name_or_path}: config.json requires {buffer.numel()} values in {type(module).__name__}.{name}, "
                    f"but the maximum is {MAX_BUFFER}; restore the original config.json"
                )
            module.register_buffer(name, torch.full_like(buffer, torch.nan, device=device), persistent=False)
        if names:
            model._init_weights(module)
        if unfilled := [name for name in names if module.get_buffer(name).isnan().any()]:
            raise TypeError(f"transformers does not initialise {', '.join(unfilled)} of {type(module).__name__}")
