"""Tar shards in webdataset's layout, in which the members of a row share a name up to the first dot.

`<key>.json` contains `prompt` and other fields, or `<key>.txt` contains only the prompt. A row may also have a video
(`.mp4` …). Other members are not read: latents and embeddings are computed with the model being trained. The members' offsets
in the shard are indexed, so any row can be read directly. Nothing is ever unpickled: shards that contain pickles are rejected.
"""

from __future__ import annotations

import hashlib
import json
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

from torch import Tensor

from dsreason.errors import DataError
from dsreason.files.address import is_s3
from dsreason.files.archives import UNPACK_ERRORS, TarMember
from dsreason.files.atomic import write_file
from dsreason.files.cache import build_copy, convert_cache_errors, get_cache_dir
from dsreason.files.remote import PARALLEL, check_room, fetch_file, read_address
from dsreason.files.s3 import list_objects
from dsreason.job.leftovers import build_prefix
from dsreason.world.data.clips import load_clip, read_start
from dsreason.world.data.folder import VIDEO_SUFFIXES
from dsreason.world.data.rows import CheckedRows
from dsreason.world.types import ClipSize, WorldRow

VERSION = 2
"""Format version of the cached indexes; increment it when the format changes."""
PICKLES = ("pkl", "pickle", "pyd", "pth", "pt", "ckpt", "bin")
"""Suffixes of the members that webdataset or torch would unpickle."""
VIDEO_KEYS = tuple(suffix.removeprefix(".") for suffix in VIDEO_SUFFIXES)
MAX_TEXT_BYTES = 16 * 2**20

Members = dict[str, tuple[int, int]]
"""Suffix in lower case → the member's offset in the shard and its size, both in bytes."""


def read_shards(path: str) -> CheckedRows:
    """Read the rows from a tar file, or from all tar files below a folder, sorted by name.

    Raises:
        DataError: the path does not exist, or a shard is damaged or contains a pickle; the message names the shard and
            the offending member, if any.
    """
    rows = CheckedRows()
    for name, shard in list_shard_files(path).items():
        for entry in read_index(shard, name):
            row_id, members = f"{name}:{entry['key']}", entry["members"]
            if "problem" in entry:
                rows.bad.append(f"{row_id}: {entry['problem']}")
                continue
            place = json.dumps({"shard": str(shard), "members": members})
            has_clip = any(key in members for key in VIDEO_KEYS)
            rows.add(row_id, entry["fields"], place if has_clip else None)
    return rows


def list_shard_files(path: str) -> dict[str, Path]:
    """Return the shards, downloaded from S3 if necessary: name to use in messages → local file."""
    if path.lower().endswith((".pkl", ".pickle", ".json")):
        raise DataError(
            f"{path}: is not a shard; instead of an index of cosmos-rl (wdinfo), specify the folder with its tar files; to "
            "inspect a pickled index, run: dsreason data unpickle"
        )
    if is_s3(path):
        address = read_address(path)
        sources = {} if is_tar(path) else list_objects(address)
        names = [path] if is_tar(path) else [f"{address}/{name}" for name in sources]
        check_layout(path, names)
        # Every host needs all shards, because rows are reordered every epoch and a rank may need any of them.
        check_room(path, [source for name, source in sources.items() if is_tar(name)])
        shards = sorted(name for name in names if is_tar(name))
        with ThreadPool(PARALLEL) as threads:
            return dict(zip(shards, threads.map(fetch_file, shards), strict=True)) or _raise_no_shards(path)
    place = Path(path).expanduser()
    if path and place.is_dir():
        files = sorted(file for file in place.rglob("*") if is_tar(file.name))
        check_layout(path, [str(file) for file in files])
        return {str(file): file for file in files} or _raise_no_shards(path)
    if not path or not place.is_file():
        start = f"{path}:" if path else "is empty, but"
        raise DataError(f"{start} must be a tar file, or a folder with tar files")
    return {path: place}


def is_tar(name: str) -> bool:
    return name.lower().endswith(".tar")


def _raise_no_shards(path: str) -> dict[str, Path]:
    raise DataError(f"{path}: has no .tar files; decompress compressed ones, because rows are read in place")


def check_layout(path: str, names: list[str]) -> None:
    """Raise DataError for cosmos-rl's own layout, in which `metas` and `video` are tars in separate folders."""
    folders = {Path(name).parent.name for name in names if is_tar(name)}
    if {"metas", "video"} <= folders:
        raise DataError(
            f"{path}: has a separate tar for each kind of member (metas, video), as in cosmos-rl; unpack tars of the same "
            'name together, and repack them in webdataset\'s layout: <key>.json with {"prompt": …} next to <key>.mp4'
        )


def read_index(shard: Path, name: str) -> list[dict[str, Any]]:
    """Return the shard's index, which is built once per version of a shard.

    Its entries are `{"key", "fields", "members"}`, or have `problem` instead of `fields`.

    Raises:
        DataError: the shard is damaged or contains a pickle.
    """
    with convert_shard_errors(name):
        status = shard.stat()
    version = f"{VERSION} {shard.resolve()} {status.st_size} {status.st_mtime_ns}"
    folder = get_cache_dir() / "world" / "shards" / hashlib.sha256(version.encode()).hexdigest()[:24]

    def build(partial: Path) -> None:
        entries = make_index(shard, name)
        partial.mkdir(parents=True, exist_ok=True)
        write_file(partial / "index.json", json.dumps(entries))

    with convert_cache_errors(folder, "DSREASON_CACHE"):
        built = build_copy(folder, build)
    entries: list[dict[str, Any]] = json.loads((built / "index.json").read_bytes())
    return entries


def make_index(shard: Path, name: str) -> list[dict[str, Any]]:
    members: dict[str, Members] = {}
    with (
        convert_shard_errors(name),
        shard.open("rb") as file,
        tarfile.open(fileobj=file, mode="r:", tarinfo=TarMember) as tar,
    ):
        for member in tar:
            if member.isdir():
                continue
            check_member(member, name)
            folder, _, base = member.name.rpartition("/")
            key, _, suffix = base.partition(".")
            suffix = suffix.lower()
            key = f"{folder}/{key}" if folder else key
            if suffix in members.setdefault(key, {}):
                raise DataError(f"{name}: contains the member {member.name!r:.200} twice; remove one")
            members[key][suffix] = (member.offset_data, member.size)
        end = max((start + size for parts in members.values() for start, size in parts.values()), default=0)
        if end > file.seek(0, 2):
            raise DataError(
                f"{name}: is truncated: its last member ends at byte {end}, but the file has only {file.tell()} bytes"
            )
        return [to_entry(file, key, parts) for key, parts in members.items()]


def check_member(member: tarfile.TarInfo, name: str) -> None:
    suffix = member.name.rpartition(".")[2].lower()
    if suffix in PICKLES:
        raise DataError(
            f"{name}: member {member.name!r:.200} is a pickle, which could run code; store arrays as .npy and facts as .json "
            "(dsreason data unpickle converts plain data), and repack the shard"
        )
    if not member.isreg() or member.issparse():
        raise DataError(
            f"{name}: member {member.name!r:.200} is a link or a sparse file, but must be a regular file; repack the shard"
        )


def to_entry(file: Any, key: str, members: Members) -> dict[str, Any]:
    """Return a row's index entry, with the fields from its `.json` or `.txt`, or with a `problem` if they are unusable."""
    entry: dict[str, Any] = {"key": key, "members": members}
    suffix = next((suffix for suffix in ("json", "txt") if suffix in members), None)
    if suffix is None:
        suffixes = ", ".join(members)
        return entry | {"problem": f"has no prompt: neither {key}.json nor {key}.txt exists, only {suffixes}"}
    start, size = members[suffix]
    if size > MAX_TEXT_BYTES:
        return entry | {"problem": f"its .{suffix} has {size} bytes, but the maximum is {MAX_TEXT_BYTES}"}
    file.seek(start)
    try:
        text = file.read(size).decode("utf-8-sig")
        return entry | {"fields": json.loads(text) if suffix == "json" else {"prompt": " ".join(text.split())}}
    except (ValueError, RecursionError) as error:
        return entry | {"problem": f"its .{suffix} cannot be read: {error}"}


@contextmanager
def convert_shard_errors(name: str) -> Iterator[None]:
    try:
        yield
    except UNPACK_ERRORS as error:
        cause = " ".join(str(error).split()) or type(error).__name__
        raise DataError(f"{name}: cannot be read as a tar file: {cause}; if it is compressed, decompress it") from error


# ---------------------------------------------------------------- members of a row


def read_clip(row: WorldRow, size: ClipSize) -> Tensor:
    """Read a clip from the video in the row's shard, like `clips.read_clip`."""
    members = json.loads(str(row.clip))["members"]
    suffix = next(key for key in VIDEO_KEYS if key in members)
    with tempfile.NamedTemporaryFile(prefix=build_prefix(), suffix=f".{suffix}") as file:
        file.write(read_member(row, suffix))
        file.flush()
        try:
            return load_clip(file.name, size, start=read_start(row))
        except DataError as error:
            raise DataError(f"{row.id}: {str(error).replace(file.name, f'its .{suffix}')}") from None


def read_member(row: WorldRow, suffix: str) -> bytes:
    place = json.loads(str(row.clip))
    start, size = place["members"][suffix]
    try:
        with Path(place["shard"]).open("rb") as file:
            file.seek(start)
            content = file.read(size)
    except OSError as error:
        raise DataError(f"{row.id}: its shard cannot be read: {error}") from error
    if len(content) != size:
        raise DataError(
            f"{row.id}: its shard was truncated during the run: only {len(content)} of the {size} bytes of .{suffix} remain"
        )
    return content
