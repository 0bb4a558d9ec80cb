"""The local folder for `model.path`: the folder itself, a tiny model, a copy of an S3 folder, or a download from the Hub."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dsreason.errors import CheckpointError, DataError
from dsreason.families import FAMILIES
from dsreason.files.address import is_s3
from dsreason.files.cache import build_copy, convert_cache_errors
from dsreason.files.disk import check_regular, read_json_object
from dsreason.files.hub import HUB_ERRORS, convert_hub_error, fetch_snapshot, get_hub_url
from dsreason.files.remote import fetch_folder
from dsreason.secrets import mask_credentials

TINY = "tiny:"
MODEL_FILES = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model")
"""Patterns of the files that a model needs; pickled weights are excluded."""
OPENED = re.compile(
    r"model.*\.safetensors|"
    r"(.*config|.*token.*|.*processor.*|vocab.*|merges.*|chat_template.*|.*\.index|.*sentencepiece.*)\.(json|jinja|txt|model)"
)
"""Pattern for the names of the files that transformers opens; other files that match `MODEL_FILES` may be notes or data."""
CHUNK = 65536
SIZES = {
    *(
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
    ),
    *("vocab_size", "max_position_embeddings", "depth", "num_heads", "out_hidden_size", "num_position_embeddings"),
    *("patch_size", "spatial_merge_size", "temporal_patch_size", "in_channels", "in_chans", "window_size"),
    *("num_channels", "num_patches", "projector_hidden_size"),
}
"""Names of the size fields in config.json and its sections; transformers replaces null with a default."""
LARGEST_SIZE = 100_000_000
MOST_BYTES = 256 * 1024**2
"""Maximum number of bytes in a model file other than weights; the largest tokenizers have a tenth of this size."""


def find_folder(
    path: str, *, tiny: Callable[[str], Path], fetch: Callable[[], Path], download: Callable[[], Path]
) -> Path:
    """Return the local folder for `path`, which is `tiny:<name>`, an s3:// URI, a folder, or a name on the Hub.

    If the folder is missing, a CheckpointError says what was searched for, and where.
    """
    if path.startswith(TINY):
        return tiny(path.removeprefix(TINY))
    if is_s3(path):
        return fetch()
    if "://" in path:
        raise CheckpointError(
            f"model.path {mask_credentials(path)}: URLs are not supported; use a folder, an s3:// URI or the name of a model "
            "on the Hub"
        )
    if (local := Path(path).expanduser()).exists():
        check_files(local)
        return local
    if re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", path):
        return download()
    raise CheckpointError(f"model.path {path}: the folder does not exist (working folder: {Path.cwd()})")


def check_files(folder: Path) -> None:
    """Raise CheckpointError if the folder has a file that transformers could not finish reading: a FIFO, device or huge file."""
    check_each_file(sorted(file for pattern in MODEL_FILES for file in folder.glob(pattern)))
    check_each_file(
        sorted(file for name in find_weight_folders(folder) for file in (folder / name).glob("*.safetensors"))
    )


def check_each_file(files: Sequence[Path]) -> None:
    for file in files:
        opened = OPENED.fullmatch(file.name)
        if not opened and (file.is_dir() or not file.exists()):
            continue  # such as a folder, or a link to a file that was removed from the Hub cache
        try:
            check_regular(file, file)
            size = file.stat().st_size
        except OSError as error:
            raise CheckpointError(
                f"{file}: cannot be read ({error.strerror}); remove it, or download the model again"
            ) from None
        if opened and size > MOST_BYTES and file.suffix != ".safetensors":
            raise CheckpointError(
                f"{file} has {size} bytes, but files other than weights must not exceed {MOST_BYTES} bytes; download it again"
            )


def find_weight_folders(folder: Path) -> tuple[str, ...]:
    """Return the subfolders that contain a model's weights; none if they are beside config.json, or if that is unreadable."""
    if next(folder.glob("*.safetensors"), None) is not None:
        return ()
    model_type = read_json_object(folder / "config.json").get(
        "model_type"
    )  # `read_model_config` reports a damaged file
    return next((family.weight_folders for family in FAMILIES.values() if family.model_type == model_type), ())


def build_tiny_folder(name: str, builders: Mapping[str, Callable[[Path], object]], version: int, cache: Path) -> Path:
    """Return the folder of a tiny model; build the model if the folder is missing. `version` is part of the folder's name."""
    if name not in builders:
        choices = ", ".join(TINY + model_name for model_name in builders)
        raise CheckpointError(f"model.path {TINY}{name}: the tiny model must be one of {choices}")
    folder = cache / f"tiny-{name}-{version}"
    with convert_cache_errors(folder, "DSREASON_CACHE"):
        return build_copy(folder, builders[name])


def fetch_model_folder(path: str, is_wanted: Callable[[str], bool], kind: str) -> Path:
    """Copy the files of an S3 folder for which `is_wanted` returns True, and return the local folder.

    `kind` describes the expected folder, for the message of a CheckpointError.
    """
    try:
        return fetch_folder(path, is_wanted)
    except DataError as error:
        raise CheckpointError(f"model.path: {error}; set model.path to {kind}") from None


def download_folder(path: str, revision: str | None, patterns: Sequence[str], ignored: Sequence[str] = ()) -> Path:
    """Download the files of a Hub repository that match one of `patterns` and none of `ignored`; return the local folder."""
    options = {"ignore_patterns": list(ignored)} if ignored else {}
    try:
        return fetch_snapshot(path, revision=revision, allow_patterns=list(patterns), **options)
    except HUB_ERRORS as error:
        where, page = f"model.path {path}: is not a local folder", f"{get_hub_url()}/{path}"
        raise CheckpointError(str(convert_hub_error(error, where, page=page, revision=revision))) from error


def compute_fingerprint(folder: Path) -> str:
    """Hash a model folder: its small files completely, and of each weight file only the size and up to 256 chunks."""
    digest = hashlib.sha256()
    for file in sorted([*folder.glob("*.json"), *folder.glob("*.jinja")]):
        digest.update(f"{file.name} ".encode() + file.read_bytes())
    subfolders = [folder / name for name in find_weight_folders(folder)]
    for file in sorted(file for place in (folder, *subfolders) for file in place.glob("*.safetensors")):
        size = file.stat().st_size
        digest.update(f"{file.relative_to(folder).as_posix()} {size} ".encode())
        with file.open("rb") as opened:
            for start in range(0, size, max(CHUNK, size // 256)):
                opened.seek(start)
                digest.update(opened.read(CHUNK))
    return digest.hexdigest()[:16]


def explain_custom_code(
    folder: Path,
    error: Exception,
    kind: str,
    advice: str = "read the code and, if you trust it, set model.trust_remote_code = true",
) -> str:
    """Describe the custom code that transformers needs: the classes of `kind`, and the files in which they are named.

    `kind` is a pattern such as "AutoTokenizer". If the error has another cause, return "".
    """
    if "trust_remote_code" not in str(error):
        return ""
    classes = []
    for file in sorted(folder.glob("*config.json")):
        auto_map = json.loads(file.read_bytes()).get("auto_map", {})
        for name, value in (auto_map if isinstance(auto_map, dict) else {"AutoTokenizer": auto_map}).items():
            names = value if isinstance(value, list) else [value]
            if re.fullmatch(kind, name):
                classes.append(f"{file.name} names the class {next((name for name in names if name), None)}")
    return f"this needs custom code, which was not run: {', '.join(dict.fromkeys(classes))}; {advice}"


def check_sizes(path: Path, config: Mapping[str, Any], within: str = "") -> None:
    """Raise CheckpointError if config.json has an impossible size: 0 would cause a division by zero, and 10^9 exhaust memory.

    `within` is the dotted path of the section `config`, for messages.
    """
    for name, value in config.items():
        if name == "mrope_section" and not (
            isinstance(value, list) and len(value) == 3 and all(type(length) is int and length > 0 for length in value)
        ):
            raise CheckpointError(
                f"{path}: config.json has {within}{name} = {value!r:.40}, but it must be three positive integers; restore the "
                "original config.json"
            )
        if isinstance(value, dict):
            check_sizes(path, value, f"{within}{name}.")
        elif name in SIZES and value is not None and not (type(value) is int and 0 < value <= LARGEST_SIZE):
            raise CheckpointError(
                f"{path}: config.json has {within}{name} = {value!r:.40}, but it must be an integer from 1 to {LARGEST_SIZE}; "
                "restore the original config.json"
            )
