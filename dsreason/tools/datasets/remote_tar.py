"""Functions that find single videos in a tar on a server, without downloading the entire tar.

A tar has no table of contents, so its headers are read one after another. The result is kept in an index file, and a later
call continues where the previous one stopped.
"""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from dsreason.errors import DataError
from dsreason.files.archives import TarMember
from dsreason.files.atomic import write_file
from dsreason.files.disk import read_json_object
from dsreason.monitor.progress import track
from dsreason.tools.datasets.ranges import RangedFile, ServedFile, Version

SUFFIX = ".mp4"


@dataclass
class Index:
    """Index of the first `offset` bytes of a tar."""

    version: tuple[int, str]
    """Version of the tar; see `Version`."""
    offset: int = 0
    is_complete: bool = False
    members: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Name of a video → offset and size of its content, in bytes."""


def find_members(source: ServedFile, wanted: Mapping[str, str], indices: Path) -> dict[str, tuple[str, int, int]]:
    """Return where the requested members are: key → (member, offset, size). Keys without a member are omitted.

    Args:
        wanted: suffix of a member's path → key; one member per key is enough.
        indices: folder for the index files.

    Raises:
        HTTPError, DataError: the tar cannot be read; the headers read so far are kept in the index.
    """
    with RangedFile(source) as file:
        index_file = indices / f"{hashlib.sha256(source.url.encode()).hexdigest()[:24]}.json"
        index = read_index(index_file, source.version)
        missing = set(wanted.values()) - select_members(index, wanted).keys()
        if missing and not index.is_complete:
            indices.mkdir(parents=True, exist_ok=True)
            try:
                scan_further(file, index, wanted, missing)
            except tarfile.TarError as error:
                raise DataError(f"{source.url}: is not a tar archive, or is damaged ({error})") from error
            finally:
                write_file(index_file, json.dumps(asdict(index)))
    return select_members(index, wanted)


def scan_further(file: RangedFile, index: Index, wanted: Mapping[str, str], missing: set[str]) -> None:
    """Read headers, starting after the indexed part, until no key is missing or the tar ends."""
    name = file.source.url.rpartition("/")[2]
    with track(f"searching {name}", file.length - index.offset, "bytes") as advance:
        buffered = io.BufferedReader(file)
        buffered.seek(index.offset)
        with tarfile.open(fileobj=buffered, mode="r:", tarinfo=TarMember) as tar:
            while missing:
                member = tar.next()
                if member is None:
                    index.is_complete = True
                    return
                if member.isfile() and member.size and member.name.endswith(SUFFIX):
                    index.members[member.name] = (member.offset_data, member.size)
                    missing.discard(find_key(member.name, wanted) or "")
                advance(tar.offset - index.offset)
                index.offset = tar.offset


def find_key(member: str, wanted: Mapping[str, str]) -> str | None:
    """Return the key of a member, or None. For `a/b/c.mp4`, `wanted` may contain `a/b/c.mp4`, `b/c.mp4` or `c.mp4`."""
    parts = member.split("/")
    endings = ("/".join(parts[start:]) for start in range(len(parts)))
    return next((wanted[ending] for ending in endings if ending in wanted), None)


def select_members(index: Index, wanted: Mapping[str, str]) -> dict[str, tuple[str, int, int]]:
    members: dict[str, tuple[str, int, int]] = {}
    for member, (start, size) in index.members.items():
        if (key := find_key(member, wanted)) is not None:
            members.setdefault(key, (member, start, size))
    return members


def read_index(file: Path, version: Version) -> Index:
    """Read the index; return an empty index if the file is missing or belongs to another version of the tar."""
    try:
        index = Index(**read_json_object(file))
        return index if tuple(index.version) == version else Index(version)
    except TypeError:
        return Index(version)
