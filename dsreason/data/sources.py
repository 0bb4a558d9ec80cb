"""Data sets as the trainer sees them: finished samples by number, from one or several sources."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from huggingface_hub import constants
from numpy.typing import NDArray

from dsreason.config.schema_data import DataConfig, SourceConfig, VisionConfig
from dsreason.data.adapters import Adapter, find_adapter, shipped_adapters
from dsreason.data.messages import check_messages, check_text, media_parts
from dsreason.data.options import with_options
from dsreason.data.order import Part
from dsreason.data.rows import Rows, is_data_file
from dsreason.data.types import Message, Sample
from dsreason.errors import ConfigError, DataError, StorageError
from dsreason.files.address import S3Address, is_s3
from dsreason.files.archives import embedded_file, media_cache
from dsreason.files.cache import cache_dir
from dsreason.files.own_files import is_inside
from dsreason.files.remote import check_place, join_address, read_address
from dsreason.media.vision import PART_SETTINGS
from dsreason.problems import MOST_LEVELS, is_nested_deeper, nearest
from dsreason.secrets import without_credentials

HELD_OUT_SEED = 0
"""Not `train.seed`: runs that differ in their seed are measured on the same rows."""


@dataclass(frozen=True)
class Source:
    """One opened data set."""

    config: SourceConfig
    adapter: Adapter
    rows: Rows
    weight: float = 1.0

    @property
    def media_root(self) -> Path | S3Address:
        """What relative media paths are joined to."""
        if self.config.media_path:
            media_path = self.config.media_path
            return read_address(media_path) if is_s3(media_path) else Path(media_path).expanduser().absolute()
        if is_s3(self.config.path):
            address = read_address(self.config.path)
            return address.parent if is_data_file(address.key) else address
        path = Path(self.config.path).expanduser().absolute()
        return path.parent if path.is_file() else path

    def sample(self, index: int) -> Sample:
        """Row `index`, with all its media there."""
        sample = self.read(index)
        if missing := missing_medium(sample.messages, self.media_root):
            raise DataError(f"{self.rows.location(index)} (sample {sample.id!r}): {missing}")
        return sample

    def read(self, index: int) -> Sample:
        """Row `index`, whether or not its media exist."""
        sample = self.adapted(index)
        try:
            return finish_sample(sample, self.config, self.media_root)
        except DataError as error:
            raise DataError(f"{self.rows.location(index)} (sample {sample.id!r}): {error}") from error

    def without_media(self, index: int) -> Sample:
        """Row `index` with the options that its question lists; its media are not looked at."""
        sample = self.adapted(index)
        try:
            check_messages(sample.messages)
            check_options(sample.options)
        except DataError as error:
            raise DataError(f"{self.rows.location(index)}: {error}") from error
        return with_options(sample)

    def adapted(self, index: int) -> Sample:
        """Row `index` as the adapter returns it."""
        where = self.rows.location(index)
        try:
            sample = self.adapter.to_sample(renamed(self.rows[index], self.config.columns), self.config)
        except DataError as error:
            raise DataError(f"{where}: {error}") from error
        except KeyError as error:
            raise DataError(f"{where}: field {error} is missing (adapter {self.adapter.name})") from error
        except StorageError:  # not the row's fault
            raise
        except Exception as error:  # the cause has its traceback
            raise DataError(
                f"{where}: adapter {self.adapter.name} cannot read the row: {type(error).__name__}: {error}"
            ) from error
        if not isinstance(sample, Sample):
            raise DataError(f"{where}: adapter {self.adapter.name} must return a Sample, it returned {sample!r:.100}")
        if is_nested_deeper(sample.meta):
            raise DataError(
                f"{where}: its fields are nested deeper than {MOST_LEVELS} levels; leave out what no reward needs"
            )
        return sample


class SampleDataset(Sequence[Sample]):
    """Samples by number. Reading one raises a DataError that names file and row where it cannot be used.

    `rows` [N] are those of the samples, ascending, numbered through all sources; None: all rows.
    """

    def __init__(self, sources: Sequence[Source], rows: NDArray[np.int64] | None = None) -> None:
        self.sources = sources
        self.starts = np.cumsum([0, *(len(source.rows) for source in sources)])  # one more than sources: the last end
        self.rows = np.arange(self.starts[-1]) if rows is None else rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        source, row = self._find(index)
        return source.sample(row)

    def without_media(self, index: int) -> Sample:
        """With the options that its question lists; its media are not looked at."""
        source, row = self._find(index)
        return source.without_media(row)

    def location(self, index: int) -> str:
        """Where a sample comes from, for messages: `train.jsonl, row 3`."""
        source, row = self._find(index)
        return source.rows.location(row)

    @property
    def weighted_parts(self) -> list[Part]:
        """The samples of each source that has any, as `StepOrder` takes them."""
        bounds = pairwise(np.searchsorted(self.rows, self.starts).tolist())
        parts = [Part(np.arange(*bound), source.weight) for bound, source in zip(bounds, self.sources, strict=True)]
        return [part for part in parts if len(part.rows)]

    def select(self, indices: NDArray[np.int64]) -> SampleDataset:
        """The samples of these (sorted) numbers."""
        return SampleDataset(self.sources, self.rows[indices])

    def _find(self, index: int) -> tuple[Source, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        part = int(np.searchsorted(self.starts, self.rows[index], side="right")) - 1
        return self.sources[part], int(self.rows[index] - self.starts[part])


def renamed(row: Any, columns: dict[str, str]) -> Any:
    """The row with the fields that the adapter reads; what had such a name before is no longer there.

    Raises:
        DataError: the row has no such column.
    """
    if not columns:
        return row
    if not isinstance(row, dict):
        raise DataError(
            f"data.columns names {', '.join(columns.values())}, and the row is {row!r:.100}; give rows with fields"
        )
    if missing := [column for column in columns.values() if column not in row]:
        raise DataError(f"data.columns names {missing[0]!r}, and the row has {', '.join(map(str, row))}")
    unmapped = {name: value for name, value in row.items() if name not in {*columns, *columns.values()}}
    return unmapped | {field: row[column] for field, column in columns.items()}


def open_datasets(config: DataConfig) -> tuple[SampleDataset, SampleDataset]:
    """The training and the held-out samples; the latter may be none.

    Raises:
        ConfigError, DataError: no such adapter or data, or no row in it.
    """
    training = SampleDataset([open_source(source, source.weight) for source in config.all_sources()])
    if isinstance(config.validation, SourceConfig):
        return training, SampleDataset([open_source(config.validation)])
    share, num_rows = config.validation, len(training)
    held_out = max(1, round(share * num_rows)) if 0 < share < 1 else int(share)
    if held_out >= num_rows:
        raise DataError(f"data.validation ({share}) leaves nothing of the {num_rows} rows to train on; lower it")
    order = np.random.default_rng(HELD_OUT_SEED).permutation(len(training))
    return training.select(np.sort(order[held_out:])), training.select(np.sort(order[:held_out]))


def open_source(config: SourceConfig, weight: float = 1.0) -> Source:
    check_place("data.path", config.path)
    check_place("data.media_path", config.media_path)
    adapter = find_adapter(config.adapter)
    if config.video_pattern is not None and config.adapter in set(shipped_adapters()) - {"local_labels"}:
        raise ConfigError(
            f"data.video_pattern ({config.video_pattern}) is for the adapter local_labels, data.adapter is {config.adapter}; "
            "change one of them"
        )
    source = Source(config, adapter, adapter.rows(config), weight)
    if len(source.rows) == 0:
        raise DataError(f"{config.path or config.adapter} (split {config.split}): the data set is empty")
    return source


def finish_sample(sample: Sample, config: SourceConfig, media_root: Path | S3Address) -> Sample:
    """Check the messages and options, locate the media, and fill in the source's system prompt and vision settings.

    An answer without an assistant message becomes that message; where there is neither, the row can be asked, but not
    trained on as it stands. A sample without an id gets the path of its first file, and one without options those that its
    question lists.
    """
    check_messages(sample.messages)
    check_options(sample.options)
    messages_given = list(sample.messages)
    if sample.answer and not any(message["role"] == "assistant" for message in messages_given):
        messages_given.append({"role": "assistant", "content": sample.answer})
    messages = finish_messages(messages_given, config, media_root)
    rejected = None
    if sample.rejected is not None:
        check_messages(sample.rejected, "rejected")
        rejected = finish_messages(sample.rejected, config, media_root)
    return with_options(
        replace(sample, id=sample.id or first_path(messages_given), messages=messages, rejected=rejected)
    )


def finish_messages(given: Sequence[Message], config: SourceConfig, media_root: Path | S3Address) -> list[Message]:
    messages = [finish_message(message, config.vision, media_root) for message in given]
    if config.system_prompt and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": config.system_prompt})
    if not absolute_paths_allowed(config):
        check_inside(messages, media_root, config.path)
    return messages


def check_options(options: object) -> None:
    if options is None:
        return
    texts = [*options.keys(), *options.values()] if isinstance(options, dict) else [None]
    if not all(isinstance(text, str) for text in texts):
        raise DataError(f"options: must have a string for each letter, is {options!r:.200}")


def first_path(messages: Sequence[Message]) -> str:
    """The first file, as its row names it; "" if there is none, or the row holds the file itself."""
    paths = [part[part["type"]] for part in media_parts(messages)]
    return paths[0] if paths and isinstance(paths[0], str) else ""


def finish_message(message: Message, vision: VisionConfig, media_root: Path | S3Address) -> Message:
    content = message["content"]
    if isinstance(content, str):
        check_text(content)
        return message
    return {**message, "content": [finish_part(part, vision, media_root) for part in content]}


def finish_part(part: dict[str, Any], vision: VisionConfig, media_root: Path | S3Address) -> dict[str, Any]:
    kind = part["type"]
    if kind == "text":
        return part
    for key in part.keys() - PART_SETTINGS - {"type", kind}:
        if part[key] is not None:
            suggestion = nearest(key, PART_SETTINGS)
            raise DataError(
                f"a part of type {kind!r} has the unknown key {key!r}"
                + (f"; did you mean {suggestion!r}?" if suggestion else "")
            )
    path = locate_medium(part.get(kind), kind, media_root)
    return {**vision_settings(part, vision, kind), **part, kind: str(path)}


def locate_medium(given: Any, kind: str, media_root: Path | S3Address) -> Path | S3Address:
    """Where a medium must be: an absolute path, one below `media_root`, or what a Hugging Face data set holds itself."""
    if isinstance(given, dict) and given.get("bytes"):
        return embedded_file(given["bytes"], Path(str(given.get("path") or "")).suffix)
    from_table = isinstance(given, dict)
    if from_table:
        given = given.get("path")
    if not isinstance(given, str) or not given:
        raise DataError(f"{kind}: needs the path of a file, is {given!r:.200}")
    if is_s3(given):
        return read_address(given)
    if "://" in given and not given.startswith("file://"):
        raise DataError(
            f"{kind}: {without_credentials(given)} is an address; only local files and s3:// addresses are read, "
            "download it first"
        )
    path = Path(given.removeprefix("file://"))
    if isinstance(media_root, S3Address):
        return path if path.is_absolute() else join_address(media_root, str(path))
    # Old versions of `datasets` join their folder and the `file_name` in an image folder's metadata, whatever it is.
    if not path.is_absolute() or (from_table and ".." in path.parts):
        path = media_root / path
        if not is_inside(path, media_root):
            there = (
                "; it exists from the working folder, which paths are not joined to" if os.path.isfile(given) else ""
            )
            raise DataError(f"{kind}: {given} leads out of {media_root}{there}; use absolute paths")
    return path


def missing_medium(messages: Sequence[Message], media_root: Path | S3Address) -> str | None:
    """Return which medium is not there. Whether an object in S3 exists is seen when it is read."""
    for part in media_parts(messages):
        path = part[part["type"]]
        if not is_s3(path) and not os.path.isfile(path):  # unlike Path.is_file, False for a path that is too long
            return f"{part['type']}: no file {path[:300]}{joined_twice(path, media_root)}"
    return None


def joined_twice(path: str, media_root: Path | S3Address) -> str:
    """Advice where a relative path exists, but from the working folder: an adapter has joined `data.path` to it already."""
    if isinstance(media_root, S3Address) or not Path(path).is_relative_to(media_root):
        return ""
    given = os.path.relpath(path, media_root)
    if not os.path.isfile(given):
        return ""
    return (
        f"; there is a file {given[:300]} in the working folder, but relative paths are joined to {media_root}: "
        'set data.media_path = ".", or let the adapter return absolute paths'
    )


def absolute_paths_allowed(config: SourceConfig) -> bool:
    """Return whether absolute paths may lead out of the media's folder."""
    if config.allow_absolute_paths is not None:
        return config.allow_absolute_paths
    if config.media_path:
        return False
    return not config.path or is_s3(config.path) or Path(config.path).expanduser().exists()


def check_inside(messages: Sequence[Message], media_root: Path | S3Address, data_path: str) -> None:
    """DataError for media outside of `media_root`, the folder of the data, and our caches of unpacked or downloaded files."""
    root = str(media_root) if isinstance(media_root, S3Address) else os.path.normpath(media_root)
    folder = Path(data_path).expanduser()
    caches: list[Path | str] = [media_cache(), cache_dir(), constants.HF_HOME, constants.HF_HUB_CACHE]
    if data_path and folder.is_dir():
        caches.append(folder)
    places = [root, *(os.path.abspath(place) for place in caches)]
    for part in media_parts(messages):
        kind = part["type"]
        path = part[kind] if is_s3(part[kind]) else os.path.normpath(part[kind])
        if not any(Path(path).is_relative_to(place) for place in places):  # links may lead anywhere
            raise DataError(
                f"{kind}: {part[kind]} is outside of {media_root}; set data.media_path, or data.allow_absolute_paths = true "
                "if you trust who wrote these rows"
            )


def vision_settings(part: dict[str, Any], vision: VisionConfig, kind: str) -> dict[str, Any]:
    """The source's settings for this part: its own fps or nframes replaces both of them."""
    settings = vision.model_dump(exclude_none=True)
    if kind == "image":
        return {key: value for key, value in settings.items() if key in ("min_pixels", "max_pixels")}
    if "fps" in part or "nframes" in part:
        settings.pop("fps", None)
        settings.pop("nframes", None)
    return settings
