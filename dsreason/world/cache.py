"""A content-addressed disk cache for text embeddings and latents, shared by all ranks and by later runs."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from dsreason.checkpoints.digests import compute_bytes_digest
from dsreason.errors import DataError, StorageError
from dsreason.files.atomic import write_file
from dsreason.files.cache import convert_cache_errors
from dsreason.problems import join_first
from dsreason.world.families import WorldFamily
from dsreason.world.latents import LatentCodec

log = logging.getLogger(__name__)

VERSION = 2
"""Version of the cache keys; increment it whenever the same models and inputs produce different tensors."""
TENSOR = "values"
"""Name of the only tensor in a cache file."""
DIGEST, CHECKSUM = "sha256", "xxh3_128"
"""Metadata keys for two hashes of the tensor. The first is compared between prompts. The second is eight times as fast to
compute and reveals damage; older files lack it."""
DELETE = "delete it, and the next run recreates it"
SAMPLE_BYTES = 4096
MOST_ALIKE = 0.01
"""Maximum share of prompts that may have the same embedding as another prompt."""
SECONDS = 30.0
"""Seconds between log messages that report how many prompts have been encoded."""


@dataclass(frozen=True)
class TextCache:
    """A cache for one encoder's prompt embeddings. In bfloat16, a Cosmos embedding takes 98 MB, or 1 MB if it is projected."""

    family: WorldFamily
    model: Path
    max_length: int
    dtype: torch.dtype
    projected: bool
    folder: Path

    @classmethod
    def open(
        cls,
        family: WorldFamily,
        model: Path,
        max_length: int,
        dtype: torch.dtype,
        cache: Path,
        *,
        project: bool = False,
    ) -> TextCache:
        """Open the cache for the text encoder in the folder `model`.

        Args:
            cache: the cache folder, `get_cache_dir()`.
            project: whether to store the output of the transformer's first text layer if it is smaller. This is allowed
                only for runs that do not train this layer.
        """
        projected = project and family.projects_text(model)
        parts = ("text_encoder", "tokenizer", *(["transformer"] if projected else []))
        key = make_key(
            "text", family.name, compute_fingerprint(*(model / part for part in parts)), max_length, dtype, projected
        )
        return cls(family, model, max_length, dtype, projected, cache / "world" / f"text-{key}")

    def encode(
        self, prompts: Sequence[str], device: torch.device | str = "cpu", *, rank: int = 0, num_ranks: int = 1
    ) -> None:
        """Encode this rank's share of the missing prompts. The caller must wait for the other ranks.

        The encoder is loaded only if prompts are missing, and freed at the end. Prompts that are too long are truncated, as
        in the pipelines; rank 0 logs a warning about them.
        """
        if rank == 0:
            self._warn_about_truncation(list(dict.fromkeys(prompts)))
        # Split all prompts rather than the missing ones, because fewer are missing once other ranks start to write.
        share = list(dict.fromkeys(prompts))[rank::num_ranks]
        missing = self._list_missing(share)
        if not missing:
            return
        embeddings = self.family.embeddings(self.model, missing, self.max_length, device, self.dtype)
        if self.projected:
            assert self.family.project_text is not None
            embeddings = map(self.family.project_text(self.model, device, self.dtype), embeddings)
        last_report = time.monotonic()
        for number, (prompt, embedding) in enumerate(zip(missing, embeddings, strict=True), 1):
            _write(self._locate(prompt), embedding[0])
            if time.monotonic() > last_report + SECONDS:
                last_report = time.monotonic()
                log.info("encoded %d of %d prompts", number, len(missing))

    def check_room(self, prompts: Sequence[str]) -> None:
        """Raise StorageError if the missing embeddings of these prompts do not fit on the disk."""
        missing = self._list_missing(prompts)
        width = self.family.text_width(self.family.read_transformer_config(self.model), self.projected)
        embedding_bytes = self.max_length * width * self.dtype.itemsize
        place = next(folder for folder in self.folder.absolute().parents if folder.exists())
        free = shutil.disk_usage(place).free
        if len(missing) * embedding_bytes > free:
            smaller = self.family.projects_text(self.model) and not self.projected
            advice = (
                "set model.freeze_text_projection = true, which needs a hundredth of the space"
                if smaller
                else "train on fewer prompts"
            )
            raise StorageError(
                f"{place}: the embeddings of {len(missing)} prompts, {embedding_bytes / 1e6:.1f} MB each, need "
                f"{len(missing) * embedding_bytes / 1e9:.1f} GB, but only {free / 1e9:.1f} GB are free; free some space, set "
                f"DSREASON_CACHE to another folder, or {advice}"
            )

    def _list_missing(self, prompts: Sequence[str]) -> list[str]:
        return [prompt for prompt in prompts if not self._locate(prompt).is_file()]

    def read(self, prompts: Sequence[str]) -> Tensor:
        """Read the prompts' embeddings: `[B, L, D]`, on the CPU. Raise StorageError if one is missing from the cache."""
        return torch.stack([_read(self._locate(prompt)) for prompt in prompts])

    def check_different(self, prompts: Sequence[str]) -> None:
        """Raise DataError if many prompts have the same embedding as another prompt; log a warning if only a few do.

        The model cannot distinguish such prompts, because they were truncated before the point at which they differ.
        """
        prompt_of_digest: dict[str, str] = {}
        alike: list[str] = []
        # Prompts that differ only in white space count as equal.
        different = {self.family.clean(prompt): prompt for prompt in prompts}
        for prompt in different.values():
            digest = _read_digests(self._locate(prompt))[DIGEST]
            if digest in prompt_of_digest:
                alike.append(f"{prompt_of_digest[digest]!r:.80} and {prompt!r:.80}")
            prompt_of_digest.setdefault(digest, prompt)
        if not alike:
            return
        problem = (
            f"{len(alike)} of {len(different)} prompts have the same embedding as another prompt, because they differ only "
            f"after model.max_prompt_length ({self.max_length} tokens, including the chat format): {join_first(alike, 3)}"
        )
        if len(alike) > MOST_ALIKE * len(different):
            raise DataError(f"data: {problem}; raise model.max_prompt_length, or remove these prompts")
        log.warning("%s", problem)

    def _warn_about_truncation(self, prompts: Sequence[str]) -> None:
        counts = self.family.count_tokens(self.model, prompts)
        long = [f"{prompt!r:.80} ({n})" for prompt, n in zip(prompts, counts, strict=True) if n > self.max_length]
        if long:
            log.warning(
                "%d of %d prompts are truncated to model.max_prompt_length (%d tokens, including the chat format): %s",
                *(len(long), len(prompts), self.max_length, join_first(long, 3)),
            )

    def _locate(self, prompt: str) -> Path:
        return self.folder / f"{make_key(prompt)}.safetensors"


@dataclass(frozen=True)
class LatentCache:
    """A cache for one codec's latents. The keys are hashes of pixels, so they change with the clip's size and frame rate."""

    codec: LatentCodec
    folder: Path

    @classmethod
    def open(cls, codec: LatentCodec, model: Path, dtype: torch.dtype, cache: Path) -> LatentCache:
        return cls(codec, cache / "world" / f"latents-{make_key('latents', compute_fingerprint(model / 'vae'), dtype)}")

    def encode(self, clips: Tensor) -> Tensor:
        """Return the clips' latents: uint8 `[B, 3, T, H, W]` → float32 `[B, C, t, h, w]`, on the CPU."""
        return torch.cat([self._encode_clip(clip) for clip in clips.split(1)])

    def _encode_clip(self, clip: Tensor) -> Tensor:
        pixels = clip.cpu().contiguous()
        content = hashlib.sha256(pixels.numpy().tobytes()).hexdigest()
        file = self.folder / f"{make_key(tuple(pixels.shape), content)}.safetensors"
        if file.is_file():
            try:
                return _read(file)
            except StorageError as error:
                log.warning("%s; it is now encoded again", error)
        _write(file, self.codec.encode(clip.float() / 127.5 - 1))
        return _read(file)


def make_key(*parts: object) -> str:
    return hashlib.sha256("\n".join(map(str, (VERSION, *parts))).encode()).hexdigest()[:32]


def compute_fingerprint(*places: Path) -> str:
    """Hash the files of model components.

    Settings and tokenizers are read completely. For weight files, only the header and the first 4 KB of each tensor are read:
    these differ between any two trained models, and reading all 16 GB would take longer than encoding.

    Args:
        places: files, and folders whose files are all included (without subfolders).
    """
    digest = hashlib.sha256()
    for file in sorted(file for place in places for file in (place.iterdir() if place.is_dir() else [place])):
        if file.is_file() and not file.name.startswith("."):
            digest.update(file.name.encode())
            digest.update(_read_samples(file) if file.suffix == ".safetensors" else file.read_bytes())
    return digest.hexdigest()


def _read_samples(file: Path) -> bytes:
    with file.open("rb") as weights:
        size = int.from_bytes(weights.read(8), "little")
        header = weights.read(size)
        parts = [header]
        for tensor in json.loads(header).values():
            if (offsets := tensor.get("data_offsets")) is not None:
                weights.seek(8 + size + offsets[0])
                parts.append(weights.read(min(SAMPLE_BYTES, offsets[1] - offsets[0])))
    return b"".join(parts)


def _write(file: Path, tensor: Tensor) -> None:
    values = tensor.detach().cpu().contiguous()
    content = _get_bytes(values)
    digests = {DIGEST: hashlib.sha256(content).hexdigest(), CHECKSUM: compute_bytes_digest(content)}
    with convert_cache_errors(file, "DSREASON_CACHE"):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_file(file, save({TENSOR: values}, metadata=digests))


def _read(file: Path) -> Tensor:
    """Read the tensor from a cache file; raise StorageError if it does not match its hash."""
    with _open(file) as tensors:
        digests: Mapping[str, str] = tensors.metadata() or {}
        values: Tensor = tensors.get_tensor(TENSOR)
    content = _get_bytes(values)
    if CHECKSUM in digests:
        is_sound = digests[CHECKSUM] == compute_bytes_digest(content)
    else:  # a file written by an older version
        is_sound = digests.get(DIGEST) == hashlib.sha256(content).hexdigest()
    if not is_sound:
        raise StorageError(f"{file}: is damaged: its values do not match their digest; {DELETE}")
    return values


def _read_digests(file: Path) -> Mapping[str, str]:
    with _open(file) as tensors:
        digests: Mapping[str, str] = tensors.metadata() or {}
    if DIGEST not in digests:
        raise StorageError(f"{file}: is damaged: it has no digest of its values; {DELETE}")
    return digests


def _get_bytes(values: Tensor) -> memoryview:
    return values.reshape(-1).view(torch.uint8).numpy().data


@contextmanager
def _open(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, framework="pt") as tensors:
            yield tensors
    except FileNotFoundError:
        raise StorageError(
            f"{file}: is missing because the cache was cleared during the run; restart the run"
        ) from None
    except (SafetensorError, OSError) as error:
        raise StorageError(f"{file}: cannot be read ({error}); {DELETE}") from error
