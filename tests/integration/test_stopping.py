"""A signal to a trainer saves a checkpoint at the next step, and the resumed run equals an undisturbed one. Every command
reports what stopped it and what it has saved."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import socket
import subprocess
import sys
import termios
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file

from tests.integration.command import COMMAND, dsreason, metrics
from tests.integration.rows import write_mixed_rows

pytestmark = pytest.mark.integration

STOPPED = 75
STEPS = 16
CONFIG = """
[model]
path = "{model}"
[data]
adapter = "jsonl"
path = "{rows}"
workers = 1
vision.fps = 4.0
[train]
epochs = 100
max_steps = {steps}
global_batch_size = 4
micro_batch_size = 2
precision = "fp32"
[validation]
generate = false
[checkpoint]
every = 7
keep = 2
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_qwen2_5_vl: Path) -> Path:
    folder = tmp_path_factory.mktemp("stopping")
    rows = write_mixed_rows(folder / "data")
    (folder / "run.toml").write_text(CONFIG.format(model=tiny_qwen2_5_vl, rows=rows, steps=STEPS))
    return folder


def start(folder: Path, name: str) -> subprocess.Popen[str]:
    command = [*COMMAND, "sft", "--config", "run.toml", "--output-dir", name]
    command += ["--nproc", "2", "--resume", "auto"]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def steps_done(run: Path) -> int:
    return len([line for line in metrics(run) if "train/loss" in line]) if (run / "metrics.jsonl").exists() else 0


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGTERM,
        pytest.param(signal.SIGINT, marks=pytest.mark.nightly),
        *(pytest.param(number, marks=pytest.mark.nightly) for number in (signal.SIGUSR1, signal.SIGHUP)),
    ],
    ids=lambda number: number.name,
)
def test_signal_saves_checkpoint_and_resume_is_exact(folder: Path, number: signal.Signals) -> None:
    run = folder / number.name
    process = start(folder, number.name)
    while steps_done(run) < 2 and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(number)
    _, stderr = process.communicate(timeout=300)
    assert process.returncode == STOPPED, stderr
    last = stderr.strip().splitlines()[-1]
    assert last.startswith(f"stopped by {number.name} after step ")
    step = int(last.split("after step ")[1].split(",")[0])
    assert 2 <= step < STEPS
    assert (run / f"checkpoints/step_{step}/COMPLETE").exists()
    if number != signal.SIGINT:
        return  # the rest does not depend on the signal, and test_resume.py covers it in the short suite

    completed = dsreason("sft", "--config", "run.toml", "--output-dir", "whole", "--nproc", 2, cwd=folder)
    assert completed.returncode == 0, completed.stderr
    resumed = start(folder, number.name)
    _, stderr = resumed.communicate(timeout=600)
    assert resumed.returncode == 0, stderr
    assert [line["train/loss"] for line in metrics(run) if "train/loss" in line] == [
        line["train/loss"] for line in metrics(folder / "whole") if "train/loss" in line
    ]
    expected, result = (load_file(r / "export/final/model.safetensors") for r in (folder / "whole", run))
    assert all(expected[name].equal(result[name]) for name in expected)


@pytest.mark.long
def test_sigterm_to_torchrun_saves_checkpoint(folder: Path) -> None:
    """Send SIGTERM, which torchrun forwards to the entire process group of each rank, including data workers."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "dsreason"]
    command += ["sft", "--config", "run.toml", "--output-dir", "torchrun"]
    environment = os.environ | {"DS_ACCELERATOR": "cpu", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "600"}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=folder, env=environment, stdout=pipe, stderr=pipe, text=True) as process:
        while steps_done(folder / "torchrun") < 2 and process.poll() is None:
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=300)
    (step,) = map(int, re.findall(r"^stopped by SIGTERM after step (\d+), which is saved", stderr, re.MULTILINE))
    assert (folder / f"torchrun/checkpoints/step_{step}/COMPLETE").exists()


@pytest.mark.nightly
def test_closed_terminal_stops_run(folder: Path) -> None:
    """Check that this also works for rank 0, whose progress bar is drawn on that terminal."""
    run, dsreason_result = folder / "closed", os.openpty()
    command = [*COMMAND, "sft", "--config", "run.toml", "--output-dir", "closed", "--nproc", "2"]
    process = subprocess.Popen(
        command,
        cwd=folder,
        stdin=dsreason_result[1],
        stdout=dsreason_result[1],
        stderr=dsreason_result[1],
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(dsreason_result[1])
    while steps_done(run) < 2 and process.poll() is None:
        with suppress(OSError):
            os.read(dsreason_result[0], 65536)
    os.close(dsreason_result[0])  # the kernel sends SIGHUP
    assert process.wait(timeout=300) == STOPPED
    last = max(int(folder.name.removeprefix("step_")) for folder in (run / "checkpoints").iterdir())
    assert 2 <= last < STEPS
    assert (run / f"checkpoints/step_{last}/COMPLETE").exists()


@pytest.mark.nightly
def test_nohup_run_survives_closed_terminal(folder: Path) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the child process inherits this setting
    try:
        process = start(folder, "nohup")
    finally:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    while steps_done(folder / "nohup") < 2 and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGHUP)
    _, stderr = process.communicate(timeout=300)
    assert process.returncode == 0, stderr
    assert steps_done(folder / "nohup") == STEPS


def test_signal_before_first_step_gives_same_exit_code(folder: Path) -> None:
    process = start(folder, "early")
    while len(psutil.Process(process.pid).children()) < 2 and process.poll() is None:
        time.sleep(0.05)  # the ranks have not started yet
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == STOPPED, stderr
    assert stderr.strip().splitlines()[-1].startswith("stopped by SIGTERM")
    assert stderr.strip().splitlines()[-1] == (
        "stopped by SIGTERM; no step was in progress, saved checkpoints are kept, and --resume auto continues"
    )


@pytest.mark.long
@pytest.mark.parametrize("nproc", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_signal_ends_evaluation_and_keeps_answers(tmp_path: Path, tiny_qwen2_5_vl: Path, nproc: int) -> None:
    command = [*COMMAND, "eval", "--model", str(tiny_qwen2_5_vl), "--adapter", "builtin", "--limit", "4000"]
    command += ["--nproc", str(nproc), "--results-dir", "results", "--set", "evaluation.batch_size=16"]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    while process.poll() is None and not list(tmp_path.glob("results/*/*/*/*.json")):
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=60)
    assert_stopped(process.returncode, stderr, signal.SIGTERM)


each = pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP], ids=lambda number: number.name)


@each
def test_signal_during_imports_is_reported_without_traceback(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "typer.py").write_text("import time\nprint('importing', flush=True)\ntime.sleep(60)\n")
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    command = [*COMMAND, "--version"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd="/", env=environment, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "importing\n"
        process.send_signal(number)
        _, stderr = process.communicate(timeout=60)
    assert (process.returncode, stderr) == (STOPPED, f"stopped by {number.name}\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_ignored_signal_stays_ignored(number: signal.Signals) -> None:
    code = f"""
import signal
signal.signal({int(number)}, signal.SIG_IGN)
from dsreason.__main__ import end_at_signals
from dsreason.job import signals
end_at_signals()
signals.end_at_signals()
signal.raise_signal({int(number)})
print("goes on")
"""
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "goes on\n"), done.stderr


@each
def test_second_signal_ends_command_at_once(number: signal.Signals) -> None:
    code = f"""
import signal, time
from dsreason.job import signals
signals.ECHO_TIME = 0.0
signals.end_at_signals()
try:
    signal.raise_signal({int(number)})
except signals.Interrupted:
    signal.raise_signal({int(number)})
"""
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (128 + number, f"ended immediately by a second {number.name}\n")


@each
def test_signal_ends_wait_for_server(tmp_path: Path, number: signal.Signals) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        command = [*COMMAND, "eval", "--server", url, "--adapter", "builtin", "--results-dir", "results"]
        process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
        server.settimeout(120)
        with server.accept()[0]:
            process.send_signal(number)
            _, stderr = process.communicate(timeout=60)
    assert_stopped(process.returncode, stderr, number)


def assert_stopped(returncode: int | None, said: str, number: signal.Signals) -> None:
    assert returncode == STOPPED, said
    assert said.strip().splitlines()[-1] == (
        f"stopped by {number.name}; the answers so far are in results; repeat the command to continue"
    )
    assert "Traceback" not in said
