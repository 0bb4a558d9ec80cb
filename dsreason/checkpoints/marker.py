"""The marker of a complete folder, which lists the size and digest of each file in it. This module does not need torch.

COMPLETE    {"files": {"trainer_state.json": 214, …}, "xxh3_128_of_64mib": {"trainer_state.json": "9f0c…", …}}

Older markers have the SHA-256 of the last 64 KiB of each file under "ends" instead, or only sizes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsreason.checkpoints.digests import ALGORITHM, compare_digests, compare_sizes, compute_digest
from dsreason.errors import CheckpointError
from dsreason.files.atomic import flush, write_file
from dsreason.files.disk import hash_end, read_small

MARKER = "COMPLETE"
STATE_FILE = "trainer_state.json"
ENDS = "ends"
KEYS = {"files", "made_of", ALGORITHM, ENDS}
"""All keys of a marker. An unknown key is an error: it may be one of these with a flipped bit, and a missing key would disable a
check."""
HASHES: Mapping[str, Callable[[Path], str]] = {ALGORITHM: compute_digest, ENDS: hash_end}
ADVICE = "choose another checkpoint, or restore the original file"


@dataclass(frozen=True)
class Marker:
    """The content of a marker."""

    sizes: dict[str, int]
    """Path in the folder → size in bytes."""
    digests: dict[str, str]
    """Path in the folder → digest; empty if the marker has no digests."""
    kind: str
    """Kind of the digests, which is a key in `HASHES`; "" if the marker has no digests."""

    @property
    def full_digests(self) -> dict[str, str]:
        """Digests of entire files; empty if the marker has none of this kind."""
        return self.digests if self.kind == ALGORITHM else {}

    @property
    def gaps(self) -> str:
        """Description of what cannot be verified in an older checkpoint; "" if everything can be."""
        if self.kind == ALGORITHM:
            return ""
        checked = "its size and its last 64 KiB" if self.kind == ENDS else "its size"
        return f"an older version wrote it, so only {checked} can be verified of each file"


def write_marker(folder: Path, digests: Mapping[str, str] | None = None, **facts: str) -> None:
    """Write the marker, which lists all files in a folder and thereby declares it complete; `facts` are also stored in it.

    Args:
        digests: digests of files that have already been flushed to disk; other files are flushed and hashed here.
    """
    digests = digests or {}
    files = [path for path in sorted(folder.rglob("[!.]*")) if path.is_file() and path.name != MARKER]
    names = {path.relative_to(folder).as_posix(): path for path in files}
    for path in {*(path for name, path in names.items() if name not in digests), *(path.parent for path in files)}:
        flush(path)
    sizes = {name: path.stat().st_size for name, path in names.items()}
    digests = {name: digests.get(name) or compute_digest(path) for name, path in names.items()}
    write_json(folder / MARKER, {**facts, "files": sizes, ALGORITHM: digests})


def read_marker(folder: Path) -> Marker:
    """Read a folder's marker; raise CheckpointError if it is damaged."""
    file = folder / MARKER
    document = read_json(file)
    if unknown := sorted(document.keys() - KEYS):
        raise CheckpointError(
            f"{file}: has the unknown key {unknown[0]!r:.100}, so it is damaged or from a newer version of dsreason; choose "
            "another checkpoint"
        )
    files = document.get("files")
    if not isinstance(files, dict):
        raise CheckpointError(f"{file}: does not list the checkpoint's files; choose another checkpoint")
    for name in files:
        if not (parts := Path(name).parts) or parts[0] == "/" or ".." in parts:
            raise CheckpointError(
                f"{file}: lists {name!r:.300}, which is outside the checkpoint folder; choose another checkpoint"
            )
    kind = next((kind for kind in HASHES if kind in document), "")
    digests = document.get(kind, {})
    if not isinstance(digests, dict) or (kind and digests.keys() != files.keys()):
        raise CheckpointError(f"{file}: lists digests and sizes of different files; choose another checkpoint")
    return Marker(files, digests, kind)


def check_sizes(folder: Path) -> Marker:
    """Check that all files listed in the marker exist with the listed sizes, and return the marker."""
    marker = read_marker(folder)
    compare_sizes(folder, marker.sizes, MARKER, ADVICE)
    if STATE_FILE not in marker.sizes and (folder / STATE_FILE).exists():
        raise CheckpointError(f"{folder / MARKER}: does not list {STATE_FILE}; choose another checkpoint")
    return marker


def check_content(folder: Path, names: Collection[str] | None = None) -> Marker:
    """Check sizes with `check_sizes`, then the digests of the files in `names` (None: all files), which are read completely."""
    marker = check_sizes(folder)
    digests = {name: digest for name, digest in marker.digests.items() if names is None or name in names}
    if digests:
        compare_digests(folder, digests, MARKER, ADVICE, compute=HASHES[marker.kind])
    return marker


def write_json(path: Path, value: Any) -> None:
    write_file(path, json.dumps(value, indent=1) + "\n", durable=True)


def read_json(path: Path, advice: str = "choose another checkpoint") -> dict[str, Any]:
    try:
        document = json.loads(read_small(path))
    except (OSError, ValueError, RecursionError) as cause:
        raise CheckpointError(f"{path}: cannot be read ({cause}); {advice}") from cause
    if not isinstance(document, dict):
        raise CheckpointError(f"{path}: must be a JSON object; got a {type(document).__name__}; {advice}")
    return document
