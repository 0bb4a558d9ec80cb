"""The caches of text embeddings and latents: reuse, the dependencies of keys, and the detection of damage."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from dsreason.errors import DataError, StorageError
from dsreason.world.cache import LatentCache, TextCache, compute_fingerprint
from dsreason.world.families import FAMILIES, WorldFamily
from dsreason.world.models import load_vae
from tests.damage import cut, empty, flip_bit

PROMPTS = ["a red square moves left", "a blue square moves left", "a red square moves right"]


def counting(family: WorldFamily, encoded: list[str]) -> WorldFamily:
    def embeddings(folder: Path, prompts: Any, *rest: Any) -> Any:
        encoded.extend(prompts)
        return family.embeddings(folder, prompts, *rest)

    return replace(family, embeddings=embeddings)


@pytest.mark.parametrize("name", FAMILIES)
def test_prompts_are_encoded_once_across_ranks(tiny_worlds: dict[str, Path], tmp_path: Path, name: str) -> None:
    encoded: list[str] = []
    family = counting(FAMILIES[name], encoded)
    cache = TextCache.open(family, tiny_worlds[name], 64, torch.float32, tmp_path)
    cache.encode(PROMPTS, rank=1, num_ranks=2)
    assert encoded == [PROMPTS[1]]
    cache.encode([*PROMPTS, *PROMPTS])
    assert encoded == [PROMPTS[1], PROMPTS[0], PROMPTS[2]]
    cache.encode(PROMPTS)
    assert len(encoded) == 3
    cache.check_different(PROMPTS)
    expected = FAMILIES[name].encode_text(tiny_worlds[name], PROMPTS, 64, "cpu", torch.float32)
    assert torch.equal(cache.read(PROMPTS[::-1]), expected.flip(0))
    assert not list(tmp_path.rglob("*.partial"))


def test_prompts_identical_after_truncation_are_rejected(tiny_worlds: dict[str, Path], tmp_path: Path) -> None:
    cache = TextCache.open(FAMILIES["cosmos_predict2_5"], tiny_worlds["cosmos_predict2_5"], 16, torch.float32, tmp_path)
    cache.encode(PROMPTS)
    with pytest.raises(
        DataError, match=r"2 of 3 prompts .*max_prompt_length \(16 tokens.*'a red square moves left' and 'a blue "
    ):
        cache.check_different(PROMPTS)


def test_identically_truncated_prompts_are_reported(
    tiny_worlds: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = TextCache.open(FAMILIES["wan"], tiny_worlds["wan"], 8, torch.float32, tmp_path)
    long = "the red ball moves to the left "
    prompts = [f"{a} {b}" for a in "abcdefghijkl" for b in "mnopqrstuv"] + [f"{long} up", f"{long} down"]
    cache.encode(prompts)
    caplog.clear()
    cache.check_different(prompts)
    assert "1 of 122 prompts have the same embedding as another prompt" in caplog.text


def test_prompts_differing_in_spaces_are_equal(tiny_worlds: dict[str, Path], tmp_path: Path) -> None:
    cache = TextCache.open(FAMILIES["wan"], tiny_worlds["wan"], 64, torch.float32, tmp_path)
    prompts = ["a  red ball", "a red ball", "a red &amp; blue ball", "a red & blue ball"]
    cache.encode(prompts)
    cache.check_different(prompts)


@pytest.mark.parametrize(("name", "length"), [("cosmos_predict2_5", 64), ("wan", 8)])
def test_truncated_prompts_are_counted_and_listed(
    tiny_worlds: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, length: int
) -> None:
    cache = TextCache.open(FAMILIES[name], tiny_worlds[name], length, torch.float32, tmp_path)
    cache.encode(["a ball"])
    assert not caplog.messages
    cache.encode(["a ball", "a red square moves left " * 9])
    assert len(caplog.messages) == 1
    assert f"1 of 2 prompts are truncated to model.max_prompt_length ({length} tokens" in caplog.text
    assert "'a red square moves left a red" in caplog.text
    cache.encode(["a red square moves left " * 9], rank=1, num_ranks=2)
    assert len(caplog.messages) == 1


def test_caches_differ_by_length_dtype_and_encoder(tiny_worlds: dict[str, Path], tmp_path: Path) -> None:
    name = "wan"
    other = tmp_path / "other"
    shutil.copytree(tiny_worlds[name], other)
    same = TextCache.open(FAMILIES[name], other, 64, torch.float32, tmp_path).folder
    assert same == TextCache.open(FAMILIES[name], tiny_worlds[name], 64, torch.float32, tmp_path).folder
    weights = other / "text_encoder" / "model.safetensors"
    tensors = load_file(weights)
    tensors[max(tensors)].view(-1)[0] += 1
    save_file(tensors, weights, metadata={"format": "pt"})
    folders = {
        same,
        TextCache.open(FAMILIES[name], other, 64, torch.float32, tmp_path).folder,
        TextCache.open(FAMILIES[name], tiny_worlds[name], 32, torch.float32, tmp_path).folder,
        TextCache.open(FAMILIES[name], tiny_worlds[name], 64, torch.bfloat16, tmp_path).folder,
    }
    assert len(folders) == 4


def test_cache_fingerprint_depends_on_tokenizer(tiny_worlds: dict[str, Path], tmp_path: Path) -> None:
    other = tmp_path / "tokenizer"
    shutil.copytree(tiny_worlds["wan"] / "tokenizer", other)
    assert compute_fingerprint(other) == compute_fingerprint(tiny_worlds["wan"] / "tokenizer")
    (other / "tokenizer.json").write_text((other / "tokenizer.json").read_text() + " ")
    assert compute_fingerprint(other) != compute_fingerprint(tiny_worlds["wan"] / "tokenizer")


def test_embeddings_stay_in_bfloat16(tiny_worlds: dict[str, Path], tmp_path: Path) -> None:
    cache = TextCache.open(FAMILIES["wan"], tiny_worlds["wan"], 32, torch.bfloat16, tmp_path)
    cache.encode(PROMPTS[:1])
    assert cache.read(PROMPTS[:1]).dtype == torch.bfloat16


def test_error_names_damaged_or_missing_cache_file(tiny_worlds: dict[str, Path], tmp_path: Path) -> None:
    cache = TextCache.open(FAMILIES["wan"], tiny_worlds["wan"], 32, torch.float32, tmp_path)
    with pytest.raises(StorageError, match=r"\.safetensors: is missing"):
        cache.read(PROMPTS)
    cache.encode(PROMPTS[:1])
    next(cache.folder.iterdir()).write_bytes(b"\0" * 20)
    with pytest.raises(StorageError, match=r"\.safetensors: cannot be read .*delete it"):
        cache.read(PROMPTS[:1])


def test_latents_are_encoded_once(tiny_worlds: dict[str, Path], tmp_path: Path) -> None:
    folder = tiny_worlds["wan"]
    codec = load_vae(folder, "cpu", torch.float32)
    cache = LatentCache.open(codec, folder, torch.float32, tmp_path)
    clips = torch.randint(256, (2, 3, 5, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    latents = cache.encode(clips)
    torch.testing.assert_close(latents, codec.encode(clips.float() / 127.5 - 1))
    assert len(list(cache.folder.iterdir())) == 2
    assert torch.equal(LatentCache(None, cache.folder).encode(clips.flip(0)), latents.flip(0))  # type: ignore[arg-type]


def test_flipped_bit_in_an_embedding_is_detected(tiny_worlds: dict[str, Path], tmp_path: Path) -> None:
    cache = TextCache.open(FAMILIES["wan"], tiny_worlds["wan"], 32, torch.float32, tmp_path)
    cache.encode(PROMPTS[:1])
    expected, file = cache.read(PROMPTS[:1]), next(cache.folder.iterdir())
    content = file.read_bytes()
    for number in range(8 * 8, 8 * len(content), 307):  # one bit in every 38 bytes, after the header's length
        file.write_bytes(content)
        flip_bit(file, number // 8, number % 8)
        try:
            cache.check_different(PROMPTS[:1])
            assert torch.equal(cache.read(PROMPTS[:1]), expected)  # the bit belongs to a digest that is not compared
            assert number // 8 < len(content) - expected.nbytes
        except StorageError as error:
            assert f"{file}: " in str(error)  # noqa: PT017 (harmless damage is no error)


def test_damage_to_older_entry_is_detected(tiny_worlds: dict[str, Path], tmp_path: Path) -> None:
    """Check older entries, which have only a SHA-256."""
    cache = TextCache.open(FAMILIES["wan"], tiny_worlds["wan"], 32, torch.float32, tmp_path)
    cache.encode(PROMPTS[:1])
    expected, file = cache.read(PROMPTS[:1]), next(cache.folder.iterdir())
    with safe_open(file, "pt") as tensors:
        digest = tensors.metadata()["sha256"]
    save_file(load_file(file), file, metadata={"sha256": digest})
    assert torch.equal(cache.read(PROMPTS[:1]), expected)
    flip_bit(file, -100)
    with pytest.raises(StorageError, match=r"\.safetensors: is damaged: its values do not match .*; delete it"):
        cache.read(PROMPTS[:1])


@pytest.mark.parametrize("damage", [flip_bit, cut, empty])
def test_damaged_latents_are_encoded_again(
    tiny_worlds: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], None]
) -> None:
    folder = tiny_worlds["wan"]
    cache = LatentCache.open(load_vae(folder, "cpu", torch.float32), folder, torch.float32, tmp_path)
    clips = torch.randint(256, (1, 3, 5, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    latents, file = cache.encode(clips), next(cache.folder.iterdir())
    damage(file)
    assert torch.equal(cache.encode(clips), latents)
    assert f"{file}: " in caplog.text
    assert "encoded again" in caplog.text
    caplog.clear()
    assert torch.equal(cache.encode(clips), latents)
    assert not caplog.text


@pytest.mark.parametrize(
    ("name", "project", "num_bytes"),
    [("wan", False, 32 * 32 * 4), ("cosmos_predict2_5", False, 32 * 128 * 4), ("cosmos_predict2_5", True, 32 * 32 * 4)],
)
def test_insufficient_disk_is_reported_before_encoding(
    tiny_worlds: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    project: bool,
    num_bytes: int,
) -> None:
    cache = TextCache.open(FAMILIES[name], tiny_worlds[name], 32, torch.float32, tmp_path, project=project)
    cache.encode(PROMPTS[:1])
    (file,) = cache.folder.iterdir()
    assert num_bytes < file.stat().st_size < num_bytes + 1000
    free = len(PROMPTS[1:]) * num_bytes
    usage = SimpleNamespace(free=free)
    monkeypatch.setattr("dsreason.world.cache.shutil.disk_usage", lambda place: usage)
    cache.check_room(PROMPTS)
    usage.free -= 1
    advice = "freeze_text_projection" if name != "wan" and not project else "fewer prompts"
    with pytest.raises(StorageError, match=rf"embeddings of {len(PROMPTS) - 1} prompts, .* GB are free; .*{advice}"):
        cache.check_room(PROMPTS)
