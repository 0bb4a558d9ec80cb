"""Limits of the shell and the machine: memory, open files, file sizes and unusable outputs."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError

from dsreason.data import rows
from dsreason.data.rows import JsonLinesRows, JsonListRows
from dsreason.errors import ConfigError, DataError, DsReasonError, SaveError, StorageError
from dsreason.evaluation.infer import read_prompts
from dsreason.files.cache import convert_cache_errors
from dsreason.job.failures import describe_dead_worker, to_readable_error
from dsreason.models.processors import template
from dsreason.world.data.prompts import read_prompts as read_world_prompts
from tests.integration.command import COMMAND
from tests.unit.hostile.guard import refused

MIB = 1 << 20
COSMOS = '[train]\nepoch = 1\n[train.train_policy]\ntype = "sft"\ndataset.name = "a/b"\n[policy]\nmodel_name_or_path = "a/b"\n'


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A function that simulates a shell with only these limits."""

    def limit(**found: int) -> None:
        numbers = {getattr(resource, f"RLIMIT_{name}"): value for name, value in found.items()}
        unlimited = resource.RLIM_INFINITY
        monkeypatch.setattr(resource, "getrlimit", lambda kind: (numbers.get(kind, unlimited),) * 2)

    return limit


FULL_IN_RUST = SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
TOO_LARGE = OSError(errno.EFBIG, "File too large", "run/rows.bin")
TORCH_FILES = RuntimeError("Too many open files. Communication with the workers is no longer possible.")


@pytest.mark.parametrize(
    ("error", "given", "kind", "words"),
    [
        (OSError(errno.ENOMEM, "Cannot allocate memory"), {}, ConfigError, ["out of memory", "fewer workers"]),
        (OSError(errno.EMFILE, "Too many open files", "a"), {}, ConfigError, ["too many open files", "ulimit -n"]),
        (TORCH_FILES, {}, ConfigError, ["too many open files", "ulimit -n"]),
        (TOO_LARGE, {"FSIZE": 4096}, SaveError, ["run/rows.bin: File too large", "4096 bytes", "ulimit -f"]),
        (TOO_LARGE, {}, SaveError, ["run/rows.bin", "the disk does not support files this large"]),
        (FULL_IN_RUST, {}, SaveError, ["No space left on device; free disk space"]),
    ],
    ids=str,
)
def test_exceeded_limit_is_named_in_error(
    error: Exception, given: dict[str, int], kind: type[DsReasonError], words: list[str], limits: Callable[..., None]
) -> None:
    limits(**given)
    message = to_readable_error(error)
    assert type(message) is kind
    assert all(word in str(message) for word in words), message
    assert "\n" not in str(message)


def test_full_cache_disk_raises_storage_error() -> None:
    def save() -> None:
        with convert_cache_errors(Path("/cache/tiny"), "DSREASON_CACHE"):
            raise FULL_IN_RUST

    refused(save, StorageError, "/cache/tiny: cannot be written", "No space left on device", "DSREASON_CACHE")


@pytest.mark.parametrize("error", [MemoryError(), KeyError("memory"), DataError("a.png: Too many open files")], ids=str)
def test_other_errors_are_unchanged(error: Exception) -> None:
    assert to_readable_error(error) is error


def test_dead_worker_message_names_file_limit(limits: Callable[..., None]) -> None:
    limits(FSIZE=10240)
    assert (
        "files, and the data that a worker passes on, are limited to 10240 bytes (ulimit -f)" in describe_dead_worker()
    )


def test_template_memory_limit_respects_ulimit(limits: Callable[..., None]) -> None:
    assert template.compute_memory_limit() == template.MEMORY_BYTES
    limits(AS=template.read_address_space() + 200 * MIB)
    assert 100 * MIB < template.compute_memory_limit() <= 200 * MIB
    limits(AS=template.read_address_space() + 10 * MIB)
    with pytest.raises(ConfigError, match=r"ulimit -v: the limit of \d+ MiB leaves \d+ MiB"):
        template.compute_memory_limit()


@pytest.mark.parametrize(
    ("content", "number"), [(b"\0" * 3000, 1), (b'{"a": 1}\n{"a": "' + b"x" * 3000, 2)], ids=["holes", "an open text"]
)
def test_overlong_line_is_rejected_by_number(
    here: Path, content: bytes, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "MAX_LINE_BYTES", 2048)
    (here / "rows.jsonl").write_bytes(content)
    with pytest.raises(DataError, match=f"line {number}: the line is longer than .* MiB; write one row per line"):
        JsonLinesRows(here / "rows.jsonl")


def test_line_of_maximum_length_is_read(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "MAX_LINE_BYTES", 20)
    (here / "rows.jsonl").write_bytes(b'{"a": "aaaaaaaaaa"}\n{"a": "bbbbbbbbbb"}\n')
    assert JsonLinesRows(here / "rows.jsonl").row(1) == {"a": "bbbbbbbbbb"}


def sparse(file: Path) -> Path:
    file.touch()
    os.truncate(file, 10 * 2**30)
    return file


def test_oversized_file_is_rejected(here: Path) -> None:
    rows, prompts = sparse(here / "a.json"), sparse(here / "a.txt")
    refused(lambda: JsonListRows(rows), DataError, "a.json: has 10737418240 bytes", "to a .jsonl file")
    refused(lambda: read_world_prompts(str(prompts)), DataError, "a.txt: has 10737418240 bytes")
    refused(lambda: read_prompts(None, Path("/dev/zero")), ConfigError, "--prompt-file /dev/zero: is larger than")


def test_prompt_is_read_from_pipe(here: Path) -> None:
    reader, writer = os.pipe()
    os.write(writer, "\ufeffWhich? ".encode())
    os.close(writer)
    assert read_prompts(None, Path(f"/dev/fd/{reader}")) == ["Which?"]
    os.close(reader)


def started(here: Path, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    settings = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.run([*COMMAND, *arguments], cwd=here, check=False, text=True, timeout=120, **settings)


def test_truncated_output_file_is_reported_and_removed(here: Path) -> None:
    (here / "cosmos.toml").write_text(COSMOS)
    ended = started(
        here,
        *("import", "cosmos.toml", "-o", "run.toml"),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100)),
    )
    assert ended.returncode == 2, ended.stderr
    assert ended.stderr.splitlines()[-1].startswith("error: run.toml: cannot be written: File too large")
    assert "Traceback" not in ended.stderr
    assert not (here / "run.toml").exists()


def test_closed_output_pipe_is_no_error(here: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    ended = started(here, "--version", stdout=writer)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_unencodable_characters_are_escaped(here: Path, encoding: str) -> None:
    (here / "cosmos.toml").write_text(COSMOS)
    ended = subprocess.run(
        [*COMMAND, "import", "cosmos.toml", "-o", "カメラ.toml"],
        cwd=here,
        check=False,
        capture_output=True,
        env=os.environ | {"PYTHONIOENCODING": encoding, "COLUMNS": "1", "TERM": "dumb", "NO_COLOR": "1"},
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr
    assert rb"\u30ab\u30e1\u30e9.toml" in ended.stdout + ended.stderr
    assert b"Traceback" not in ended.stderr and b"\x1b" not in ended.stdout + ended.stderr
