"""The folder of an export: the files that it copies from the base model, and the lock on its draft."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from dsreason.checkpoints import export_folder
from dsreason.checkpoints.export import write_model_folder
from dsreason.checkpoints.export_digests import DIGESTS_FILE
from dsreason.checkpoints.export_folder import check_base_links, write_folder_atomically
from dsreason.cli.export import check_run_does_not_write
from dsreason.errors import CheckpointError, ConfigError, SaveError
from dsreason.files import lock
from dsreason.files.lock import LOCK_FILE, FolderLock, LockWriteError, describe_process, hold_folder

NEEDED = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "sentencepiece.bpe.model"),
    *("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json"),
    *("generation_config.json", "chat_template.json", "chat_template.jinja", "LICENSE", "LICENSE.md", "NOTICE.txt"),
    *("LICENCE", "License.txt", "notice", "additional_chat_templates/tool_use.jinja"),
)
FOREIGN = (
    *(".env", ".netrc", ".hidden", "token", "stored_tokens", "credentials.json", "hf_token.txt", "id_rsa", "key.pem"),
    *("pytorch_model.bin", "pytorch_model.bin.index.json", "model.gguf", "optimizer.pt", "model.ckpt", "tf_model.h5"),
    *("model.onnx", "flax_model.msgpack", "consolidated.pth", "scheduler.pkl", "training_args.bin", "data.npz"),
    *("README.md", "notes.txt", "tokenizer.json.bak", "tokenizer_secret.json", "my_config.json", "config.json~"),
    *("modeling_custom.py", "trainer_state.json", "model.safetensors", "model.safetensors.index.json"),
    *("TOKENIZER.JSON", "additional_chat_templates/token", "additional_chat_templates/.hidden.jinja"),
)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "base"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2_5_vl"}))
    return folder


def write_export(source: Path, output: Path, *, trust_remote_code: bool = False) -> Path:
    return write_model_folder({"a": torch.ones(2)}.items(), source, output, trust_remote_code=trust_remote_code)


def list_names(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")}


# Files copied from the base model


def test_only_files_of_tokenizer_and_processor_are_copied(source: Path, tmp_path: Path) -> None:
    (source / "additional_chat_templates").mkdir()
    for name in (*NEEDED, *FOREIGN):
        (source / name).write_text("{}")
    (source / "onnx").mkdir()
    (source / "onnx" / "tokenizer.json").write_text("{}")
    os.mkfifo(source / "vocab.bpe")
    names = list_names(write_export(source, tmp_path / "out"))
    assert names == {*NEEDED, "additional_chat_templates", "config.json", "model.safetensors", DIGESTS_FILE}


@pytest.mark.parametrize("trusted", [True, False])
def test_model_code_is_copied_only_if_trusted(source: Path, tmp_path: Path, trusted: bool) -> None:
    (source / "modeling_custom.py").write_text("")
    (source / ".secret.py").write_text("")
    names = list_names(write_export(source, tmp_path / "out", trust_remote_code=trusted))
    assert names == {"config.json", "model.safetensors", DIGESTS_FILE, *(["modeling_custom.py"] if trusted else [])}


LINKS: dict[str, Callable[[Path, Path], object]] = {
    "absolute": lambda link, secret: link.symlink_to(secret),
    "relative": lambda link, secret: link.symlink_to(os.path.relpath(secret, link.parent)),
    "through a link": lambda link, secret: (
        (link.parent / "next").symlink_to(secret),
        link.symlink_to("next"),
    ),
    "through a folder": lambda link, secret: (
        (link.parent / "inside").symlink_to(secret.parent),
        link.symlink_to(f"inside/{secret.name}"),
    ),
}


@pytest.mark.parametrize("kind", LINKS)
@pytest.mark.parametrize("name", ["tokenizer.json", "config.json", "LICENSE", "additional_chat_templates/a.jinja"])
def test_link_out_of_base_model_is_refused(source: Path, tmp_path: Path, kind: str, name: str) -> None:
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "secret").write_text('{"password": "sentinel"}')
    (source / name).parent.mkdir(exist_ok=True)
    (source / name).unlink(missing_ok=True)
    LINKS[kind](source / name, tmp_path / "private" / "secret")
    with pytest.raises(CheckpointError, match=f"{source / name}: is a link to .*secret, which is outside the folder"):
        write_export(source, tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"base", "private"}


@pytest.mark.parametrize("name", ["vocab.json", "modeling_custom.py"])
def test_link_is_refused_before_the_run_starts(source: Path, tmp_path: Path, name: str) -> None:
    is_code = name.endswith(".py")
    (source / name).symlink_to(tmp_path / "base" / ".." / "secret")
    check_base_links(source, with_code=is_code)  # exports ignore a link without a target
    (tmp_path / "secret").touch()
    with pytest.raises(CheckpointError, match=f"{name}: is a link to"):
        check_base_links(source, with_code=is_code)
    if is_code:
        check_base_links(source, with_code=False)


def test_link_inside_base_model_is_followed(source: Path, tmp_path: Path) -> None:
    (source / "shared").mkdir()
    (source / "shared" / "vocab").write_text("words")
    (source / "vocab.json").symlink_to("shared/vocab")
    out = write_export(source, tmp_path / "out")
    assert (out / "vocab.json").read_text() == "words"
    assert not (out / "vocab.json").is_symlink()


def test_linked_base_folder_is_followed(source: Path, tmp_path: Path) -> None:
    (tmp_path / "linked").symlink_to(source)
    assert (write_export(tmp_path / "linked", tmp_path / "out") / "config.json").is_file()


def make_snapshot(source: Path, hub: Path, target: str) -> Path:
    """Make a model folder in the Hub's cache whose tokenizer.json is a link to `target`."""
    snapshot = hub / "models--user--name" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (hub / "models--user--name" / "blobs").mkdir()
    (hub / "models--user--name" / "blobs" / "1f").write_text((source / "config.json").read_text())
    (snapshot / "config.json").symlink_to("../../blobs/1f")
    (snapshot / "tokenizer.json").symlink_to(target)
    return snapshot


def test_hub_cache_links_are_allowed(source: Path, tmp_path: Path) -> None:
    snapshot = make_snapshot(source, tmp_path / "hub", "../../blobs/1f")
    assert list_names(write_export(snapshot, tmp_path / "out")) == {
        "config.json",
        "tokenizer.json",
        "model.safetensors",
        DIGESTS_FILE,
    }


def test_hub_cache_links_of_subfolder_are_allowed(source: Path, tmp_path: Path) -> None:
    snapshot = make_snapshot(source, tmp_path / "hub", "../../blobs/1f")
    (snapshot / "text").mkdir()
    (snapshot / "text" / "config.json").symlink_to("../../../blobs/1f")
    assert (write_export(snapshot / "text", tmp_path / "out") / "config.json").is_file()


def test_hub_cache_on_two_disks_is_followed(source: Path, tmp_path: Path) -> None:
    snapshot = make_snapshot(source, tmp_path / "hub", "../../blobs/1f")
    blobs = snapshot.parents[1] / "blobs"
    blobs.rename(tmp_path / "disk")
    blobs.symlink_to(tmp_path / "disk")
    assert (write_export(snapshot, tmp_path / "out") / "tokenizer.json").is_file()


@pytest.mark.parametrize(
    "model", ["snapshots/abc", "snapshots/abc/deep/model", "models--user--name/mine/snapshots/abc"]
)
def test_only_the_hub_cache_has_blobs(source: Path, tmp_path: Path, model: str) -> None:
    folder = tmp_path / model
    folder.parent.mkdir(parents=True)
    source.rename(folder)
    blobs = next(place for place in folder.parents if place.name == "snapshots").with_name("blobs")
    blobs.mkdir()
    (blobs / "id_rsa").write_text("sentinel")
    (folder / "tokenizer.json").symlink_to(blobs / "id_rsa")
    with pytest.raises(CheckpointError, match=r"tokenizer.json: is a link to .*id_rsa"):
        write_export(folder, tmp_path / "out")


def test_hub_cache_links_elsewhere_are_refused(source: Path, tmp_path: Path) -> None:
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "token").write_text("sentinel")
    snapshot = make_snapshot(source, tmp_path / "hub", "../../../token")
    with pytest.raises(CheckpointError, match=r"tokenizer.json: is a link to .*/hub/token"):
        write_export(snapshot, tmp_path / "out")


# Two processes


def write_config(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)


def test_second_export_into_a_folder_is_refused(tmp_path: Path) -> None:
    output = tmp_path / "final"
    with write_folder_atomically(output) as first:
        write_config(first, "first")
        with (
            pytest.raises(ConfigError, match=r"final: cannot be written now: .*in use by process \d+ on .*wait until"),
            write_folder_atomically(output),
        ):
            pytest.fail("it was written")
        with write_folder_atomically(tmp_path / "other") as other:  # another folder can still be written
            write_config(other, "other")
    assert (output / "config.json").read_text() == "first"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["final", "other"]


@pytest.mark.parametrize(("name", "refused"), [("final", True), ("step_20", True), ("mine", False)])
def test_running_run_keeps_its_exports_to_itself(tmp_path: Path, name: str, refused: bool) -> None:
    with (
        hold_folder(tmp_path / "run"),
        pytest.raises(ConfigError, match="run: is in use by process") if refused else nullcontext(),
    ):
        check_run_does_not_write(tmp_path / "run" / "export" / name)


def test_locking_on_full_disk_raises_save_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(lock: FolderLock, folder: Path) -> None:
        raise LockWriteError(f"{folder}: cannot be written (No space left on device)")

    monkeypatch.setattr(FolderLock, "take", fail)
    with pytest.raises(SaveError, match="No space left"), write_folder_atomically(tmp_path / "final"):
        pytest.fail("it was written")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("is_released", [False, True])
def test_losing_export_says_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_released: bool) -> None:
    """Also if the winner ends, and deletes its lock, before the message is composed."""
    drafts = tmp_path / ".final.partial"
    drafts.mkdir()
    (drafts / LOCK_FILE).write_text(json.dumps(asdict(describe_process())))
    original = lock.make_in_use_error

    def compose(folder: Path, content: str) -> ConfigError:
        if is_released:
            (drafts / LOCK_FILE).unlink()
        return original(folder, content)

    monkeypatch.setattr(lock, "make_in_use_error", compose)
    with pytest.raises(ConfigError, match="is in use by process"), write_folder_atomically(tmp_path / "final"):
        pytest.fail("it was written")


def test_vanishing_drafts_folder_is_created_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if another export, which has just ended, deleted it before this one locks it."""
    original, takes = FolderLock.take, []

    def take(folder_lock: FolderLock, folder: Path) -> None:
        takes.append(folder)
        if len(takes) < 3:
            folder.rmdir()
        original(folder_lock, folder)

    monkeypatch.setattr(FolderLock, "take", take)
    with write_folder_atomically(tmp_path / "final") as draft:
        write_config(draft, "new")
    assert len(takes) == 3 and [path.name for path in tmp_path.iterdir()] == ["final"]


def test_draft_of_killed_process_is_deleted(tmp_path: Path) -> None:
    drafts = tmp_path / ".final.partial"
    (drafts / "old").mkdir(parents=True)
    (drafts / LOCK_FILE).write_text(json.dumps(asdict(replace(describe_process(), started="0"))))
    with write_folder_atomically(tmp_path / "final") as draft:
        assert not (drafts / "old").exists()
        write_config(draft, "new")
    assert [path.name for path in tmp_path.iterdir()] == ["final"]


def test_folder_filled_during_writing_is_kept(tmp_path: Path) -> None:
    with (
        pytest.raises(CheckpointError, match="final: exists and is not empty"),
        write_folder_atomically(tmp_path / "final") as draft,
    ):
        write_config(draft, "ours")
        (tmp_path / "final").mkdir()
        write_config(tmp_path / "final", "theirs")
    assert (tmp_path / "final" / "config.json").read_text() == "theirs"
    assert [path.name for path in tmp_path.iterdir()] == ["final"]


# Power failures


def test_files_reach_the_disk_before_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[tuple[str, bool]] = []
    output = tmp_path / "final"
    monkeypatch.setattr(export_folder, "flush", lambda path: flushed.append((path.name, output.exists())))
    with write_folder_atomically(output) as draft:
        (draft / "adapter").mkdir()
        (draft / "adapter" / "weights").write_text("1")
        write_config(draft, "{}")
    *before, last = flushed
    assert {(draft.name, False), ("adapter", False), ("weights", False), ("config.json", False)} <= set(before)
    assert not any(exists for _, exists in before)
    assert last == (tmp_path.name, True)


def test_created_parents_reach_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[Path] = []
    monkeypatch.setattr(export_folder, "flush", flushed.append)
    with write_folder_atomically(tmp_path / "new" / "a" / "final") as draft:
        write_config(draft, "{}")
    assert flushed[-3:] == [tmp_path / "new" / "a", tmp_path / "new", tmp_path]
