"""Unusable options, files and environment variables, which end a command with one sentence and exit code 2."""

from __future__ import annotations

import logging
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dsreason import stopping
from dsreason.cli import demo, main
from dsreason.errors import ConfigError, Stopped
from dsreason.job import launch, leftovers, signals
from dsreason.job.failures import Failure, RankError
from dsreason.secrets import VisibleRecord
from tests.integration.command import COMMAND
from tests.unit.hostile.guard import refused


def stopped(text: str) -> RankError:
    return RankError(Failure(0, text, Stopped.exit_code, user_fixable=True, time=0.0))


@pytest.fixture(autouse=True)
def no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*launch.NUMBERS, launch.ERROR_DIR):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")


def call(*arguments: str, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", ["dsreason", *arguments])
    with pytest.raises(SystemExit) as caught:
        main.main()
    return int(caught.value.code or 0)


def told(capsys: pytest.CaptureFixture[str]) -> str:
    printed = capsys.readouterr().err
    assert "Traceback" not in printed
    assert sum(line.startswith("error: ") for line in printed.splitlines()) == 1
    return printed


def call_as_rank(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> int:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return call("sft", "--dry-run", monkeypatch=monkeypatch)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("WORLD_SIZE", "two"),
        ("RANK", "x"),
        ("RANK", "-1"),
        ("LOCAL_RANK", ""),
        ("MASTER_PORT", "port"),
        ("WORLD_SIZE", "1e3"),
        ("WORLD_SIZE", "1" * 5000),
        ("RANK", "\u0661"),  # the Arabic digit 1
        ("LOCAL_WORLD_SIZE", "x"),
    ],
)
def test_non_numeric_launcher_variable_is_reported(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    assert call_as_rank(settings | {name: value}, monkeypatch) == 2
    assert f"environment: {name}={value!r:.60}: each must be a whole number" in told(capsys)


def test_signal_wrapped_in_library_error_is_recognized(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def imports() -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
        except signals.Interrupted as stop:
            raise ModuleNotFoundError("transformers' words for whatever happens in an import") from stop

    before = [(number, signal.getsignal(number)) for number in signals.ASK_TO_STOP]
    monkeypatch.setattr(stopping, "_requests", [])
    monkeypatch.setattr(main, "app", imports)
    try:
        assert call(monkeypatch=monkeypatch) == Stopped.exit_code
    finally:
        for number, handler in before:
            signal.signal(number, handler)
    assert capsys.readouterr().err == "stopped by SIGTERM\n"


@pytest.mark.parametrize("home", ["/proc/none", "/dev/null"])
def test_unwritable_home_error_suggests_dsreason_cache(
    home: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("DSREASON_CACHE", "COSMOS_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", home)
    assert call("sft", "--dry-run", monkeypatch=monkeypatch) in (1, 2)
    assert "set DSREASON_CACHE to another folder" in told(capsys)


def test_records_of_libraries_are_made_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging, "_logRecordFactory", logging.LogRecord)
    assert call("--version", monkeypatch=monkeypatch) == 0
    assert logging.getLogRecordFactory() is VisibleRecord


@pytest.mark.parametrize("kind", ["file", "FIFO", "link", "open to all"])
def test_shared_folder_writable_by_others_is_rejected(here: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    folder = here / f"dsreason-{os.getuid()}"
    make = {"file": folder.touch, "FIFO": lambda: os.mkfifo(folder), "link": lambda: folder.symlink_to(here)}
    make.get(kind, folder.mkdir)()
    if kind == "open to all":
        folder.chmod(0o777)
    monkeypatch.setattr(leftovers.tempfile, "gettempdir", lambda: str(here))
    refused(
        lambda: launch.get_shared_path("x"),
        ConfigError,
        f"{folder}: must be a folder that you own and only you can access",
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("eval", "--model", "m", "--data", "x", "--tensor-parallel-size", "9" * 11), "--tensor-parallel-size"),
        (("sft", "--set", "data.prefetch=9007199254740992"), "data.prefetch"),
        (("sft", "--set", "data.workers=10000000"), "data.workers"),
        (("grpo", "--set", "rollout.tensor_parallel_size=1000000"), "rollout.tensor_parallel_size"),
        (("eval", "--data", "rows.pkl", "--server", "http://127.0.0.1:1/?a=b"), "server.url"),
        (("eval", "--data", "rows.pkl", "--server", "http://127.0.0.1:1/v1#c"), "server.url"),
        (
            ("eval", "--data", "rows.pkl", "--server", "http://127.0.0.1:1", "--results-dir", "rows.pkl"),
            "is a file, not",
        ),
        (("eval", "--data", "rows.pkl", "--set", 'results_dir=""'), "results_dir"),
        (("data", "inspect", "--path", "rows.pkl", "--output", "rows.pkl"), "rows.pkl is a file, not a folder"),
        (("export", "--checkpoint", "x", "--output", "rows.pkl/x"), "is a file, not a folder; choose another --output"),
        (("demo", "--output-dir", "."), ".: is not empty, but a demo starts from scratch; choose another --output-dir"),
        (("demo", "--output-dir", "d", "--set", "optim"), "optim"),
        (("demo", "--output-dir", "d", "--set", "grpo.betta=1"), "grpo.betta"),
        (("demo", "--world", "--output-dir", "d", "--set", "world.algoritm=1"), "world.algoritm"),
        (("data", "unpickle", "rows.pkl", "--output", "rows.pkl"), "--output rows.pkl"),
        (("data", "unpickle", "rows.pkl", "--output", "/dev/null/x"), "--output /dev/null/x"),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, tuple) else "",
)
def test_out_of_bounds_value_is_named(
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    words: str,
) -> None:
    (here / "rows.pkl").write_bytes(pickle.dumps([1]))
    assert call(*arguments, monkeypatch=monkeypatch) == 2
    printed = capsys.readouterr().err
    assert words in printed
    assert "Traceback" not in printed


@pytest.mark.parametrize(
    "arguments",
    [
        ("sft", "--dry-run", "--set", "data.adapter=jsonl", "--set", "data.path=rows"),
        ("world", "--dry-run", "--set", "data.format=prompts", "--set", "data.path=rows"),
        ("import", "rows"),
        ("data", "unpickle", "rows", "--output", "x"),
        ("eval", "--model", "m", "--data", "rows"),
    ],
    ids=" ".join,
)
def test_fifo_is_rejected_without_waiting(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    os.mkfifo(here / "rows")
    assert call(*arguments, monkeypatch=monkeypatch) in (2, 3)
    assert "is not a regular file" in told(capsys)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_reward_server_stops_on_signal(here: Path, number: signal.Signals) -> None:
    (here / "rewards.py").write_text("def zero(clips, samples):\n    return [0.0] * len(samples)\n")
    with subprocess.Popen(
        [*COMMAND, "reward-serve", "rewards.py", "--port", "0"],
        cwd=here,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as server:
        assert server.stdout is not None
        assert server.stdout.readline().startswith("serving zero at")
        server.send_signal(number)
        _, errors = server.communicate(timeout=60)
    assert server.returncode == 0
    assert errors.splitlines()[-1] == "the server has stopped"


@pytest.mark.parametrize(
    ("raised", "told"),
    [
        (signals.Interrupted("SIGINT"), "SIGINT; the output"),
        (signals.Interrupted("SIGINT; no step was in progress, and --resume auto continues"), "SIGINT; the output"),
        (
            stopped("stopped by SIGINT after step 3, which is saved; continue with --resume auto"),
            "stopped by SIGINT after",
        ),
    ],
)
def test_stopped_demo_does_not_suggest_resuming(raised: BaseException, told: str) -> None:
    with pytest.raises((signals.Interrupted, Stopped)) as caught, demo.rephrase_stop_messages(Path("d")):
        raise raised
    assert str(caught.value).startswith(told)
    assert str(caught.value).endswith("; the output so far is in d, but the next demo starts from scratch")
    assert "--resume" not in str(caught.value)
