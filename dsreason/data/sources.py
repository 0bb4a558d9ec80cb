"""Training data sets: complete samples by index, from one or more sources."""

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
from dsreason.data.adapters import Adapter, find_adapter, list_shipped_adapters, rename_columns
from dsreason.data.messages import check_messages, check_text, fetch_urls, get_first_path, list_media_parts
from dsreason.data.options import with_options
from dsreason.data.order import WeightedRows
from dsreason.data.rows import NamedRows, is_data_file
from dsreason.data.types import Message, Sample
from dsreason.errors import ConfigError, DataError, StorageError
from dsreason.files.address import S3Address, is_s3
from dsreason.files.archives import get_media_cache
from dsreason.files.cache import get_cache_dir
from dsreason.files.own_files import is_inside
from dsreason.files.remote import check_location, join_address, read_address
from dsreason.media.embedded import is_embedded, unpack_embedded
from dsreason.media.frames import TIMES, check_no_image, list_files, list_frames, suggest_key, write_frame_list
from dsreason.media.urls import is_url, mask_url, split_url
from dsreason.media.vision import PART_SETTINGS
from dsreason.problems import MOST_LEVELS, is_nested_deeper
from dsreason.secrets import hide_payloads, mask_credentials

MAX_PATH_LETTERS = 4096
"""Maximum length of a path on Linux."""
HELD_OUT_SEED = 0
"""Seed for the held-out split. It is independent of `train.seed`, so runs with different seeds hold out the same rows."""


@dataclass(frozen=True)
class DataSource:
    """An opened data set with its adapter and its weight."""

    config: SourceConfig
    adapter: Adapter
    rows: NamedRows
    weight: float = 1.0

    @property
    def media_root(self) -> Path | S3Address:
        """Folder against which relative media paths are resolved."""
        if self.config.media_path:
            media_path = self.config.media_path
            return read_address(media_path) if is_s3(media_path) else Path(media_path).expanduser().absolute()
        if is_s3(self.config.path):
            address = read_address(self.config.path)
            return address.parent if is_data_file(address.key) else address
        path = Path(self.config.path).expanduser().absolute()
        return path.parent if path.is_file() else path

    def sample(self, index: int) -> Sample:
        """Return the sample for row `index`; its media at URLs are downloaded first.

        Raises:
            DataError: the row cannot be used, or a media file is missing or cannot be fetched.
        """
        sample = self.read(index)
        try:
            return self.fetch_media(sample)
        except DataError as error:
            raise DataError(f"{self.rows.describe_location(index)} (sample {sample.id!r}): {error}") from error

    def read(self, index: int) -> Sample:
        """Return the sample for row `index` without checking that its media exist."""
        sample = self.call_adapter(index)
        try:
            return finish_sample(sample, self.config, self.media_root)
        except DataError as error:
            location = f"{self.rows.describe_location(index)} (sample {sample.id!r})"
            raise DataError(f"{location}: {hide_payloads(str(error))}") from error

    def fetch_media(self, sample: Sample) -> Sample:
        """Return the sample with local copies of its media in place of their URLs.

        Raises:
            DataError: a media file is missing or cannot be fetched.
        """
        if missing := find_missing_medium(sample.messages, self.media_root):
            raise DataError(missing)
        messages, rejected = (
            [fetch_urls(message, allow_private=self.config.allow_private_urls) for message in conversation]
            for conversation in (sample.messages, sample.rejected or [])
        )
        return replace(sample, messages=messages, rejected=rejected or sample.rejected)

    def read_without_media(self, index: int) -> Sample:
        """Return the sample for row `index`, with the options that its question lists, without checking its media."""
        sample = self.call_adapter(index)
        try:
            check_messages(sample.messages)
            check_options(sample.options)
        except DataError as error:
            raise DataError(f"{self.rows.describe_location(index)}: {hide_payloads(str(error))}") from error
        return with_options(sample)

    def call_adapter(self, index: int) -> Sample:
        """Return the adapter's unmodified result for row `index`."""
        location = self.rows.describe_location(index)
        try:
            sample = self.adapter.to_sample(rename_columns(self.rows[index], self.config.columns), self.config)
        except DataError as error:
            raise DataError(f"{location}: {hide_payloads(str(error))}") from error
        except KeyError as error:
            raise DataError(f"{location}: field {error} is missing (adapter {self.adapter.name})") from error
        except StorageError:  # the row is not at fault
            raise
        except Exception as error:  # the cause keeps its traceback
            raise DataError(
                f"{location}: adapter {self.adapter.name} cannot read the row: {type(error).__name__}: "
                f"{hide_payloads(str(error))}"
            ) from error
        if not isinstance(sample, Sample):
            raise DataError(
                f"{location}: adapter {self.adapter.name} must return a Sample, but returned "
                f"{hide_payloads(repr(sample)):.100}"
            )
        if is_nested_deeper(sample.meta):
            raise DataError(
                f"{location}: the row's fields are nested more than {MOST_LEVELS} levels deep; remove those that no "
                "reward needs"
            )
        return sample


class SampleDataset(Sequence[Sample]):
    """Samples by index. Reading an unusable sample raises a DataError that names its file and row.

    `rows` [N] are the samples' row indices in ascending order, counted across all sources; None selects all rows.
    """

    def __init__(self, sources: Sequence[DataSource], rows: NDArray[np.int64] | None = None) -> None:
        self.sources = sources
        # The last entry is the end of the last source.
        self.starts = np.cumsum([0, *(len(source.rows) for source in sources)])
        self.rows = np.arange(self.starts[-1]) if rows is None else rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        source, row = self._find(index)
        return source.sample(row)

    def read_without_media(self, index: int) -> Sample:
        """Return a sample, with the options that its question lists, without checking its media."""
        source, row = self._find(index)
        return source.read_without_media(row)

    def describe_location(self, index: int) -> str:
        """Return a sample's file and row for messages: `train.jsonl, row 3`."""
        source, row = self._find(index)
        return source.rows.describe_location(row)

    @property
    def weighted_parts(self) -> list[WeightedRows]:
        """Weighted parts for `StepOrder`: one per non-empty source, with the source's weight."""
        bounds = pairwise(np.searchsorted(self.rows, self.starts).tolist())
        parts = [
            WeightedRows(np.arange(*bound), source.weight) for bound, source in zip(bounds, self.sources, strict=True)
        ]
        return [part for part in parts if len(part.rows)]

    def select(self, indices: NDArray[np.int64]) -> SampleDataset:
        """Return a data set with the samples at these indices, which must be sorted."""
        return SampleDataset(self.sources, self.rows[indices])

    def _find(self, index: int) -> tuple[DataSource, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample index {index} is out of range for {len(self)} samples")
        part = int(np.searchsorted(self.starts, self.rows[index], side="right")) - 1
        return self.sources[part], int(self.rows[index] - self.starts[part])


def open_datasets(config: DataConfig) -> tuple[SampleDataset, SampleDataset]:
    """Open the training samples and the held-out samples, which may be empty.

    Raises:
        ConfigError, DataError: the adapter or the data does not exist, or the data has no rows.
    """
    training = SampleDataset([open_source(source, source.weight) for source in config.list_sources()])
    if isinstance(config.validation, SourceConfig):
        return training, SampleDataset([open_source(config.validation)])
    share, num_rows = config.validation, len(training)
    held_out = max(1, round(share * num_rows)) if 0 < share < 1 else int(share)
    if held_out >= num_rows:
        raise DataError(f"data.validation ({share}) leaves none of the {num_rows} rows for training; lower it")
    order = np.random.default_rng(HELD_OUT_SEED).permutation(len(training))
    return training.select(np.sort(order[held_out:])), training.select(np.sort(order[:held_out]))


def open_source(config: SourceConfig, weight: float = 1.0) -> DataSource:
    check_location("data.path", config.path)
    check_location("data.media_path", config.media_path)
    adapter = find_adapter(config.adapter)
    if config.video_pattern is not None and config.adapter in set(list_shipped_adapters()) - {"local_labels"}:
        raise ConfigError(
            f"data.video_pattern ({config.video_pattern}) applies only to the adapter local_labels, but data.adapter is "
            f"{config.adapter}; change one of them"
        )
    source = DataSource(config, adapter, adapter.rows(config), weight)
    if len(source.rows) == 0:
        raise DataError(f"{config.path or config.adapter} (split {config.split}): the data set is empty")
    return source


def finish_sample(sample: Sample, config: SourceConfig, media_root: Path | S3Address) -> Sample:
    """Check the messages and options, locate the media, and add the source's system prompt and vision settings.

    If a row has an answer but does not end with an assistant message, the answer becomes that message. A row with neither can
    be used as a prompt, but not for supervised training.

    Missing fields are filled in: the id with the path of the first media file, the options with those that the question lists,
    and `data_source` with the source's name.
    """
    check_messages(sample.messages)
    check_options(sample.options)
    raw_messages = list(sample.messages)
    meta = sample.meta if config.name is None else {"data_source": config.name} | sample.meta
    if sample.answer and raw_messages[-1]["role"] != "assistant":
        raw_messages.append({"role": "assistant", "content": sample.answer})
    messages = finish_messages(raw_messages, config, media_root)
    rejected = None
    if sample.rejected is not None:
        check_messages(sample.rejected, "rejected")
        rejected = finish_messages(sample.rejected, config, media_root)
    return with_options(
        replace(sample, id=sample.id or get_first_path(raw_messages), messages=messages, rejected=rejected, meta=meta)
    )


def finish_messages(raw: Sequence[Message], config: SourceConfig, media_root: Path | S3Address) -> list[Message]:
    messages = [finish_message(message, config.vision, media_root) for message in raw]
    if config.system_prompt and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": config.system_prompt})
    if not allow_absolute_paths(config):
        check_inside(messages, media_root, config.path)
    return messages


def check_options(options: object) -> None:
    if options is None:
        return
    texts = [*options.keys(), *options.values()] if isinstance(options, dict) else [None]
    if not all(isinstance(text, str) for text in texts):
        raise DataError(f"options must map each letter to a string; got {options!r:.200}")


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
    for key in part.keys() - PART_SETTINGS - {"type", kind, *(TIMES if kind == "video" else ())}:
        if part[key] is not None:
            raise DataError(f"a part of type {kind!r} has the unknown key {key!r}{suggest_key(key)}")
    if kind == "video" and isinstance(part.get(kind), list):
        paths: list[str] | None = [str(locate_medium(item, "frame", media_root)) for item in part[kind]]
    else:
        path = str(locate_medium(part.get(kind), kind, media_root))
        paths = list_frames(path) if kind == "video" else None
    if paths is not None:
        settings = {key: value for key, value in part.items() if key not in TIMES}
        return {**select_vision_settings(settings, vision, kind), **settings, kind: str(write_frame_list(paths, part))}
    if kind == "video":
        check_no_image(part[kind], path)
    if part.get("timestamps") is not None:
        raise DataError(
            f"timestamps are for videos given as frames, but {path} is neither a folder nor a pattern that matches files; remove "
            "them, or correct the path"
        )
    return {**select_vision_settings(part, vision, kind), **part, kind: path}


def locate_medium(raw: Any, kind: str, media_root: Path | S3Address) -> Path | S3Address | str:
    """Return a media file's location: an absolute path, a path below `media_root`, a URL, or the copy of an embedded file."""
    from_table = isinstance(raw, dict) and not raw.get("bytes")
    if from_table:
        raw = raw.get("path")
    if is_embedded(raw):
        return unpack_embedded(raw, kind)
    if not isinstance(raw, str) or not raw:
        raise DataError(f"{kind} must be the path of a file; got {raw!r:.200}")
    if is_url(raw):
        split_url(raw)
        return raw
    if is_s3(raw):
        return read_address(raw)
    if len(raw) > MAX_PATH_LETTERS:
        raise DataError(
            f"{kind}: no file has a path of {len(raw):,} characters; write base64 as data:{kind}/unknown;base64,…"
        )
    if "://" in raw and not raw.startswith("file://"):
        raise DataError(
            f"{kind}: {mask_credentials(raw)} is a URL, but only local files and s3://, http:// and https:// URLs are "
            "supported; download the file first"
        )
    path = Path(raw.removeprefix("file://"))
    if isinstance(media_root, S3Address):
        return path if path.is_absolute() else join_address(media_root, str(path))
    # Old versions of `datasets` join every `file_name` in an image folder's metadata to the folder's path.
    if not path.is_absolute() or (from_table and ".." in path.parts):
        path = media_root / path
        if not is_inside(path, media_root):
            hint = (
                " (it exists relative to the working folder, but paths are not resolved against that)"
                if os.path.isfile(raw)
                else ""
            )
            raise DataError(f"{kind}: {raw} points outside {media_root}{hint}; use absolute paths")
    return path


def find_missing_medium(messages: Sequence[Message], media_root: Path | S3Address) -> str | None:
    """Return a message about the first missing media file, or None. S3 objects and URLs are checked only when fetched."""
    for part in list_media_parts(messages):
        for path in list_files(part[part["type"]]):
            # Path.is_file raises if a path is too long
            if not is_s3(path) and not is_url(path) and not os.path.isfile(path):
                return f"{part['type']}: no such file: {path[:300]}{describe_joined_twice(path, media_root)}"
    return None


def describe_joined_twice(path: str, media_root: Path | S3Address) -> str:
    """Return advice if the path exists relative to the working folder: the adapter may already have joined `data.path` to it."""
    if isinstance(media_root, S3Address) or not Path(path).is_relative_to(media_root):
        return ""
    relative_path = os.path.relpath(path, media_root)
    if not os.path.isfile(relative_path):
        return ""
    return (
        f"; the file {relative_path[:300]} exists in the working folder, but relative paths are resolved against "
        f'{media_root}: set data.media_path = ".", or return absolute paths from the adapter'
    )


def allow_absolute_paths(config: SourceConfig) -> bool:
    """Return whether media may have absolute paths outside the media folder."""
    if config.allow_absolute_paths is not None:
        return config.allow_absolute_paths
    if config.media_path:
        return False
    return not config.path or is_s3(config.path) or Path(config.path).expanduser().exists()


def check_inside(messages: Sequence[Message], media_root: Path | S3Address, data_path: str) -> None:
    """Raise DataError for media outside `media_root`, the data folder, and the caches for unpacked or downloaded files."""
    root = str(media_root) if isinstance(media_root, S3Address) else os.path.normpath(media_root)
    folder = Path(data_path).expanduser()
    caches: list[Path | str] = [get_media_cache(), get_cache_dir(), constants.HF_HOME, constants.HF_HUB_CACHE]
    if data_path and folder.is_dir():
        caches.append(folder)
    allowed_folders = [root, *(os.path.abspath(cache) for cache in caches)]
    for part in list_media_parts(messages):
        kind = part["type"]
        for file in list_files(part[kind]):
            if is_url(file):
                raise DataError(
                    f"{kind}: {mask_url(file)} is outside of {media_root}; download it there, or set "
                    "data.allow_absolute_paths = true if you trust the author of these rows"
                )
            path = file if is_s3(file) else os.path.normpath(file)
            if any(Path(path).is_relative_to(allowed) for allowed in allowed_folders):  # links may lead anywhere
                continue
            raise DataError(
                f"{kind}: {file} is outside {media_root}; set data.media_path, or data.allow_absolute_paths = true if you "
                "trust the author of these rows"
            )


def select_vision_settings(part: dict[str, Any], vision: VisionConfig, kind: str) -> dict[str, Any]:
    """Return the source's vision settings for a part. If the part sets `fps` or `nframes`, both of the source's are dropped."""
    settings = vision.model_dump(exclude_none=True)
    if kind == "image":
        return {key: value for key, value in settings.items() if key in ("min_pixels", "max_pixels")}
    if "fps" in part or "nframes" in part:
        settings.pop("fps", None)
        settings.pop("nframes", None)
    return settings
