"""Digests of an export's files, which reveal damage before a file is used or uploaded.

{"files": {"model.safetensors": {"size": 123, "xxh3_128_of_64mib": "…"}, "adapter/adapter_model.safetensors": …}}
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

from pydantic import NonNegativeInt, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from dsreason.checkpoints.checkpoint_folder import CARD
from dsreason.checkpoints.digests import ALGORITHM, compare_digests, compare_sizes, compute_digest
from dsreason.errors import CheckpointError
from dsreason.files.disk import read_small
from dsreason.problems import describe_first_problem

DIGESTS_FILE = "dsreason_digests.json"
UNLISTED = (CARD, DIGESTS_FILE)
"""Names of files without a digest, such as model cards, which are meant to be edited."""
THREADS = 8
"""Maximum number of files to read at the same time."""


class FileDigest(TypedDict):
    """Size in bytes and digest of a file."""

    size: NonNegativeInt
    xxh3_128_of_64mib: str


class Document(TypedDict):
    """Content of the file; `files` maps relative paths to digests."""

    files: dict[str, FileDigest]


def write_digests(folder: Path) -> None:
    """Write the digests of all files in a complete export, except model cards, which are meant to be edited."""
    names = [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file()]
    names = [name for name in names if Path(name).name not in UNLISTED]
    with ThreadPool(THREADS) as threads:
        digests = dict(zip(names, threads.map(lambda name: compute_digest(folder / name), names), strict=True))
    files = {name: {"size": (folder / name).stat().st_size, ALGORITHM: digests[name]} for name in names}
    (folder / DIGESTS_FILE).write_text(json.dumps({"files": files}, indent=1) + "\n", encoding="utf-8")


def check_digests(folder: Path) -> None:
    """Compare an export's files with its digests. A folder without digests, such as an older export, is not checked.

    Raises:
        CheckpointError: a file is missing or differs; the message names it.
    """
    if not (folder / DIGESTS_FILE).exists():
        return
    files = read_digests(folder)
    advice = f"export the model again, or, if you changed it on purpose, remove its entry in {DIGESTS_FILE}"
    compare_sizes(folder, {name: file["size"] for name, file in files.items()}, DIGESTS_FILE, advice)
    digests = {name: file["xxh3_128_of_64mib"] for name, file in files.items()}
    compare_digests(folder, digests, DIGESTS_FILE, advice, threads=THREADS)


def list_unlisted(folder: Path, names: Iterable[str]) -> list[str]:
    """Return the `names` that are missing from an export's digests, because something else wrote them; [] without digests."""
    if not (folder / DIGESTS_FILE).exists():
        return []
    files = read_digests(folder)
    return [name for name in names if name not in files and Path(name).name not in UNLISTED]


def read_digests(folder: Path) -> Mapping[str, FileDigest]:
    file = folder / DIGESTS_FILE
    try:
        files = TypeAdapter(Document).validate_json(read_small(file), strict=True)["files"]
    except (OSError, ValueError) as cause:
        problem: Any = describe_first_problem(cause) if isinstance(cause, ValidationError) else cause
        raise CheckpointError(
            f"{file}: cannot be read ({problem}); export the model again, or remove the file to use the export unchecked"
        ) from cause
    for name in files:
        if Path(name).is_absolute() or ".." in Path(name).parts or len(name) > 1000:
            raise CheckpointError(f"{file}: lists {name!r:.300}, which is outside the folder; export the model again")
    return files
