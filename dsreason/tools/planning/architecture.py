"""Functions that find a model's architecture: in its folder, in config.json on the Hub, or in the table of published models."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from huggingface_hub import get_session, hf_hub_url, try_to_load_from_cache
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status
from transformers import AutoConfig

from dsreason.config.schema import ModelConfig
from dsreason.errors import CheckpointError, ConfigError, StorageError
from dsreason.files.cache import get_cache_dir
from dsreason.files.hub import HUB_ERRORS, convert_hub_error, get_hub_url
from dsreason.job.leftovers import make_temporary_folder
from dsreason.models.load import read_model_config, resolve_model
from dsreason.tools.planning.published import list_architectures

TIMEOUT_S = 5.0
"""Time limit of a request to the Hub, in seconds."""


@dataclass(frozen=True)
class Architecture:
    config: Any
    """The model's configuration as a transformers object."""
    source: str
    """Origin of the configuration, for display."""


@cache
def find_architecture(path: str, revision: str | None = None, trust_remote_code: bool = False) -> Architecture:
    """Find the architecture of the model at `model.path`, without reading or downloading weights; a `tiny:` model is built first.

    Raises:
        CheckpointError: config.json is missing or describes an unsupported model, or the Hub and the table lack the model.
        ConfigError: the path is an S3 URI.
    """
    if path.startswith("tiny:"):
        folder = resolve_model(ModelConfig(path=path), get_cache_dir() / "models")
        return Architecture(read_model_config(folder), f"{path}, built on this machine")
    if path.startswith("s3://"):
        raise ConfigError(
            f"model.path {path}: a plan needs config.json in a local folder or on the Hub; copy it to a local folder"
        )
    if Path(path).is_dir():
        return Architecture(read_model_config(Path(path), trust_remote_code=trust_remote_code), f"{path}/config.json")
    return load_from_hub(path, revision)


def load_from_hub(name: str, revision: str | None) -> Architecture:
    """Load the architecture from the first of these that has it: the Hub's cache, the Hub, the built-in table."""
    cached = try_to_load_from_cache(name, "config.json", revision=revision)
    if isinstance(cached, str):
        return Architecture(read_model_config(Path(cached).parent), f"config.json of {name} in the Hub's cache")
    known_architecture = list_architectures().get(name.lower())
    try:
        content = download_config(name, revision)
    except HUB_ERRORS as error:
        if known_architecture is None:
            raise make_unknown_error(
                convert_hub_error(error, f"model.path {name}", page=f"{get_hub_url()}/{name}", revision=revision)
            ) from None
        return Architecture(
            build_from_table(known_architecture),
            f"built-in table (config.json of {name} could not be downloaded from the Hub)",
        )
    with make_temporary_folder() as folder:
        (Path(folder) / "config.json").write_bytes(content)
        return Architecture(read_model_config(Path(folder)), f"config.json of {name} on the Hub")


def download_config(name: str, revision: str | None) -> bytes:
    """Download config.json without retries; huggingface_hub's own download functions retry for half a minute."""
    url = hf_hub_url(name, "config.json", revision=revision)
    response = get_session().get(url, headers=build_hf_headers(), timeout=TIMEOUT_S, follow_redirects=True)
    hf_raise_for_status(response)
    return bytes(response.content)


def make_unknown_error(reason: StorageError) -> CheckpointError:
    return CheckpointError(
        f"{reason}; it is neither a local folder nor in the built-in table; set model.path to a folder with the model's "
        "config.json, which is all that a plan needs"
    )


def build_from_table(values: dict[str, Any]) -> Any:
    settings = deepcopy(values)
    return AutoConfig.for_model(settings.pop("model_type"), **settings)
