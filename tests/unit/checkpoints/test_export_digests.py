"""Damaged exports are detected before they are used or uploaded, and the error names the damaged file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from dsreason.checkpoints.checkpoint_folder import CARD
from dsreason.checkpoints.export_digests import DIGESTS_FILE, check_digests
from dsreason.checkpoints.export_folder import write_folder_atomically
from dsreason.errors import CheckpointError
from dsreason.storage.package import open_package
from tests.unit.checkpoints.made_folders import make_export

NAMES = ("config.json", "model.safetensors", "adapter/adapter_model.safetensors")


@pytest.fixture
def export(tmp_path: Path) -> Path:
    with write_folder_atomically(tmp_path / "final") as draft:
        draft.rmdir()
        make_export(draft, weights=bytes(range(200)))
        (draft / "adapter").mkdir()
        (draft / NAMES[2]).write_bytes((draft / NAMES[1]).read_bytes())
        (draft / CARD).write_text("# model")
    return tmp_path / "final"


def flip_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "flipped": (flip_bit, f"does not match its digest in {DIGESTS_FILE}: it is damaged or was changed"),
    "cut": (lambda file: file.write_bytes(file.read_bytes()[:-1]), f"bytes, but {DIGESTS_FILE} lists"),
    "empty": (lambda file: file.write_bytes(b""), f"has 0 bytes, but {DIGESTS_FILE} lists"),
    "longer": (lambda file: file.write_bytes(file.read_bytes() + b" "), f"bytes, but {DIGESTS_FILE} lists"),
    "removed": (Path.unlink, f"is missing, but is listed in {DIGESTS_FILE}"),
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_file_is_named_before_upload(export: Path, name: str, kind: str) -> None:
    open_package(export)
    damage, message = DAMAGE[kind]
    damage(export / name)
    for check in (check_digests, open_package):
        with pytest.raises(CheckpointError) as caught:
            check(export)
        assert str(caught.value).startswith(f"{export / name}: ")
        assert message in str(caught.value)
        assert f"remove its entry in {DIGESTS_FILE}" in str(caught.value)


def test_card_and_added_files_may_change(export: Path, caplog: pytest.LogCaptureFixture) -> None:
    (export / CARD).write_text("# a better description")
    open_package(export)
    assert caplog.text == ""
    (export / "UPLOADED.json").write_text("of a download")
    (export / "picture.png").write_bytes(b"1")
    (export / "adapter" / "credentials.json").write_text("{}")
    check_digests(export)
    assert {CARD, "picture.png", "adapter/credentials.json", DIGESTS_FILE} <= open_package(export).files.keys()
    assert f"not in {DIGESTS_FILE}, but `push` uploads them, too: adapter/credentials.json, picture.png" in caplog.text


def test_file_without_digest_entry_is_not_checked(export: Path) -> None:
    (export / "config.json").write_text('{"edited": true}')
    digests = json.loads((export / DIGESTS_FILE).read_text())
    del digests["files"]["config.json"]
    (export / DIGESTS_FILE).write_text(json.dumps(digests))
    check_digests(export)


@pytest.mark.parametrize("name", ["a" * 900, "a\0b"])
def test_impossible_name_is_a_missing_file(export: Path, name: str) -> None:
    digests = {"files": {name: {"size": 1, "xxh3_128_of_64mib": ""}}}
    (export / DIGESTS_FILE).write_text(json.dumps(digests))
    with pytest.raises(CheckpointError, match="is missing, but is listed in"):
        check_digests(export)


def test_older_export_has_no_digests(tmp_path: Path) -> None:
    check_digests(make_export(tmp_path / "older"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "cannot be read"),
        ("[]", "cannot be read"),
        ("[" * 100_000, "cannot be read"),
        ('{"files": {"a": {"size": -1, "xxh3_128_of_64mib": ""}}}', "cannot be read"),
        ('{"files": {"a": {"size": "7"}}}', "cannot be read"),
        (
            '{"files": {"../secret": {"size": 6, "xxh3_128_of_64mib": ""}}}',
            "lists '../secret', which is outside the folder",
        ),
        (
            '{"files": {"/etc/passwd": {"size": 6, "xxh3_128_of_64mib": ""}}}',
            "lists '/etc/passwd', which is outside the folder",
        ),
    ],
)
def test_damaged_digests_are_refused(export: Path, content: str, message: str) -> None:
    (export / DIGESTS_FILE).write_text(content)
    with pytest.raises(CheckpointError, match=f"{DIGESTS_FILE}: {message}"):
        check_digests(export)
