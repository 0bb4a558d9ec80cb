"""Digests of whole files."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsreason.checkpoints import digests
from dsreason.checkpoints.digests import compute_digest
from tests.damage import flip_bit


@pytest.mark.parametrize("size", [1, 9, 10, 11, 95, 100])
def test_each_bit_changes_the_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(digests, "PIECE_BYTES", 10)
    monkeypatch.setattr(digests, "CHUNK_BYTES", 4)
    file = tmp_path / "file"
    file.write_bytes(bytes(range(size)))
    expected = compute_digest(file)
    for position in range(size):
        flip_bit(file, position)
        assert compute_digest(file) != expected
        flip_bit(file, position)
    assert compute_digest(file) == expected


def test_order_and_length_of_pieces_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "PIECE_BYTES", 4)
    contents = [b"", b"aaaa", b"aaaabbbb", b"bbbbaaaa", b"aaaabbbb\0", b"aaaabbbb\0\0\0\0"]
    values = set()
    for content in contents:
        (tmp_path / "file").write_bytes(content)
        values.add(compute_digest(tmp_path / "file"))
    assert len(values) == len(contents)
