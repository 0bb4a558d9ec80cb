"""Links in run and results folders, through which no other file may be overwritten, deleted or uploaded."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dsreason.checkpoints.export_folder import write_folder_atomically
from dsreason.errors import CheckpointError, ConfigError
from dsreason.evaluation.settings import delete
from dsreason.files.disk import remove
from dsreason.job.logs import setup_logs
from dsreason.monitor.sinks.json_lines import JSONLines
from dsreason.storage.package import open_package, open_package_or_logs
from dsreason.train.common.answers import write_rows
from tests.unit.checkpoints.made_folders import make_export


@pytest.fixture
def flag(here: Path) -> Path:
    """A file outside the folder that every test must leave unchanged."""
    return here.parent / "outside" / "flag"


@pytest.fixture
def own_handlers() -> Iterator[None]:
    root = logging.getLogger()
    before = list(root.handlers)
    yield
    for handler in set(root.handlers) - set(before):
        handler.close()
    root.handlers = before


WRITERS: dict[str, Callable[[Path], object]] = {
    "rows": lambda file: write_rows(file, [{"a": 1}]),
    "metrics": lambda file: JSONLines(file, resume_step=None).log_scalars(1, {"a": 1.0}),
}


@pytest.mark.parametrize("name", WRITERS)
def test_written_file_replaces_link(name: str, here: Path, flag: Path) -> None:
    (here / "file.jsonl").symlink_to(flag)
    WRITERS[name](here / "file.jsonl")
    assert not (here / "file.jsonl").is_symlink()
    assert (here / "file.jsonl").read_text().startswith("{")


@pytest.mark.parametrize("kind", ["link", "dangling", "fifo", "folder"])
@pytest.mark.usefixtures("own_handlers")
def test_log_is_appended_only_to_regular_file(kind: str, here: Path, flag: Path) -> None:
    log = here / "logs" / "rank_0.log"
    log.parent.mkdir()
    make: dict[str, Callable[[], object]] = {
        "link": lambda: log.symlink_to(flag),
        "dangling": lambda: log.symlink_to(flag.with_name("new")),
        "fifo": lambda: os.mkfifo(log),
        "folder": log.mkdir,
    }
    make[kind]()
    with pytest.raises(
        ConfigError, match="rank_0.log: exists but is not a regular file, so the log cannot be appended; remove it"
    ):
        setup_logs(here, 0)


@pytest.mark.parametrize("inside", [".", "file", "folder"])
def test_deletion_removes_only_the_link(inside: str, here: Path, flag: Path) -> None:
    place = here / "results"
    if inside == ".":
        place.symlink_to(flag.parent)
    else:
        place.mkdir()
        (place / "link").symlink_to(flag if inside == "file" else flag.parent)
    delete(place)
    assert not os.path.lexists(place)


def test_removing_missing_path_does_nothing(here: Path) -> None:
    remove(here / "nothing")


def test_export_follows_user_link_to_folder(here: Path, flag: Path) -> None:
    (here / "disk" / "empty").mkdir(parents=True)
    (here / "export").symlink_to(here / "disk" / "empty")
    with write_folder_atomically(here / "export") as partial:
        (partial / "config.json").write_text("{}")
    assert (here / "export").is_symlink()
    assert (here / "disk" / "empty" / "config.json").exists()


def test_export_follows_link_to_missing_folder(here: Path, flag: Path) -> None:
    (here / "export").symlink_to(here / "disk" / "new")
    with write_folder_atomically(here / "export") as partial:
        (partial / "config.json").write_text("{}")
    assert (here / "export").is_symlink()
    assert (here / "disk" / "new" / "config.json").exists()


def test_export_ignores_link_at_its_temporary_name(here: Path, flag: Path) -> None:
    (here / ".final.partial").symlink_to(flag.parent)
    with write_folder_atomically(here / "final") as partial:
        (partial / "config.json").write_text("{}")
    assert [path.name for path in here.iterdir()] == ["final"]


@pytest.mark.parametrize("link", ["metrics.jsonl", "config.json", "tensorboard/events", "logs/rank_1.log"])
def test_logs_with_links_are_not_uploaded(link: str, here: Path, flag: Path) -> None:
    for folder in ("logs", "tensorboard"):
        (here / folder).mkdir()
    (here / "metrics.jsonl").write_text("{}")
    (here / link).unlink(missing_ok=True)
    (here / link).symlink_to(flag)
    with (
        pytest.raises(CheckpointError, match=f"{here / link}: is a link to {flag}"),
        open_package_or_logs(here / "logs"),
    ):
        pytest.fail("it was copied")


def test_logs_upload_when_their_folder_is_linked(here: Path) -> None:
    (here / "disk").mkdir()
    (here / "disk" / "rank_0.log").write_text("x")
    (here / "logs").symlink_to("disk")
    (here / "metrics.jsonl").write_text("{}")
    with open_package_or_logs(here / "logs") as package:
        assert package.files == {"rank_0.log": 1, "metrics.jsonl": 2}


@pytest.mark.parametrize("place", ["tokenizer.json", "adapter/adapter_config.json", "extra"])
def test_export_with_links_is_not_uploaded(place: str, here: Path, flag: Path) -> None:
    make_export(here / "model")
    (here / "model" / place).parent.mkdir(exist_ok=True)
    (here / "model" / place).symlink_to(flag.parent if place == "extra" else flag)
    with pytest.raises(CheckpointError, match=f"{here / 'model' / place}: is a link to {flag.parent}"):
        open_package(here / "model")


def test_only_visible_regular_files_are_uploaded(here: Path, caplog: pytest.LogCaptureFixture) -> None:
    export = make_export(here / "model")
    for name in (".env", ".netrc", ".git/config", ".cache/token", "adapter/.env"):
        (export / name).parent.mkdir(exist_ok=True)
        (export / name).write_text("sentinel")
    os.mkfifo(export / "fifo")
    (export / "dangling").symlink_to("nothing")
    (export / "copy.json").symlink_to("config.json")
    assert open_package(export).files.keys() == {"config.json", "copy.json", "model.safetensors"}
    assert "hidden files are not uploaded: .cache/token, .env, .git/config" in caplog.text


def test_special_files_in_logs_are_left_out(here: Path) -> None:
    (here / "logs").mkdir()
    (here / "logs" / "rank_0.log").write_text("x")
    os.mkfifo(here / "logs" / "fifo")
    (here / "metrics.jsonl").write_text("{}")
    with open_package_or_logs(here / "logs") as package:
        assert package.files.keys() == {"rank_0.log", "metrics.jsonl"}


def test_hub_snapshot_can_be_uploaded(here: Path, flag: Path) -> None:
    snapshot = here / "models--user--name" / "snapshots" / "abc"
    make_export(snapshot)
    (snapshot.parents[1] / "blobs").mkdir()
    (snapshot / "config.json").rename(snapshot.parents[1] / "blobs" / "1f")
    (snapshot / "config.json").symlink_to("../../blobs/1f")
    assert open_package(snapshot).files.keys() == {"config.json", "model.safetensors"}
    (snapshot / "token").symlink_to(flag)
    with pytest.raises(CheckpointError, match="token: is a link to"):
        open_package(snapshot)
