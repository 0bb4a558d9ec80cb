"""The launcher, which starts ranks if a command is called without torchrun or `deepspeed`, and the startup code for every rank.

torch's elastic agent starts and monitors the processes. If the user can fix an error, this module prints it only once and exits
with its exit code; for any other error, it prints the traceback from the rank that failed first. It also ensures that no rank
outlives the launcher. It does not import torch before `prepare_environment` has run.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import logging
import os
import signal
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Literal

from dsreason.errors import ConfigError, DsReasonError, Stopped
from dsreason.files.atomic import write_file
from dsreason.imports import make_imports_fast
from dsreason.job.failures import (
    CRASH_LOG,
    ERROR_DIR,
    Failure,
    RankError,
    add_last_log_line,
    build_failure,
    find_first_failure,
    get_exit_codes,
    record_failure,
    to_readable_error,
)
from dsreason.job.gpu import find_cuda_fault
from dsreason.job.launchers import end_with_launchers
from dsreason.job.leftovers import (
    build_prefix,
    get_user_folder,
    keep_sockets_together,
    make_temporary_folder,
    remove_leftovers,
)
from dsreason.job.signals import LAUNCHER_PID, forward_signals
from dsreason.screen import print_message, write
from dsreason.secrets import hide_secrets

LOG_DIR = "DSREASON_LOG_DIR"
RESTARTS = "TORCHELASTIC_RESTART_COUNT"
DEEPSPEED_NODE = "CROSS_RANK"
"""Environment variable that only `deepspeed` sets."""

NUMBERS = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "LOCAL_SIZE",
    "MASTER_PORT",
    RESTARTS,
    DEEPSPEED_NODE,
)
"""Integer-valued environment variables that launchers set."""
PR_SET_PDEATHSIG = 1
NEVER = 10**8
"""Interval in seconds that never elapses, for periodic events that must not happen."""


def is_rank() -> bool:
    """Return whether a launcher (this one, torchrun or `deepspeed`) started this process as a rank of a job.

    All three variables must be set, because Kubernetes operators set RANK and WORLD_SIZE to count nodes.
    """
    return all(name in os.environ for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))


def is_first_rank() -> bool:
    """Return whether this process is rank 0 or not part of a job; only such processes report to the user."""
    return not is_rank() or os.environ["RANK"] == "0"


def is_started_by_us() -> bool:
    return is_rank() and ERROR_DIR in os.environ


def is_started_by_torchrun() -> bool:
    return RESTARTS in os.environ and not is_started_by_us()


# Startup of every rank


def prepare_environment() -> None:
    """Set the variables that torch, tokenizers and DeepSpeed read at import. Call this before importing any of them."""
    # DeepSpeed finds ninja through PATH, but PATH lacks .venv/bin if Python was called as .venv/bin/python.
    folder = str(Path(sys.executable).parent)
    path = os.environ.get("PATH", os.defpath)
    if folder not in path.split(os.pathsep):
        os.environ["PATH"] = folder + os.pathsep + path
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a warning about a lost peer has 30 lines of native frames
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # otherwise, tokenizers warns in every forked data worker
    if "DS_ACCELERATOR" not in os.environ and find_cuda_fault() is None and count_gpus() == 0:
        os.environ["DS_ACCELERATOR"] = "cpu"


def check_rank_variables() -> None:
    """Raise ConfigError if a variable in `NUMBERS` is not a whole number."""
    texts = {name: os.environ[name] for name in NUMBERS if name in os.environ}
    if is_rank() and (odd := [f"{name}={text!r:.60}" for name, text in texts.items() if not is_number(text)]):
        raise ConfigError(
            f"environment: {', '.join(odd)}: each must be a whole number; start with torchrun or deepspeed, or unset them"
        )


def is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 10


def enter_rank() -> None:
    """Set up a rank: tie it to its launcher, redirect the output of ranks above 0 to log files, and prepare the environment."""
    kill_children_on_exit()
    # Each rank has its own session and would otherwise outlive its launcher. If the user set the variables in a shell, there
    # is no launcher, and the shell may end before the rank does.
    if any(name in os.environ for name in (ERROR_DIR, RESTARTS, DEEPSPEED_NODE)):
        die_with_parent()
        if LAUNCHER_PID in os.environ and os.getppid() != int(os.environ[LAUNCHER_PID]):
            os.kill(os.getpid(), signal.SIGKILL)  # the launcher ended before die_with_parent was called
        exit_if_failed_before()
        end_with_launchers()
    if not is_started_by_us() and os.environ.get("LOCAL_RANK") == "0":
        remove_leftovers()
    keep_sockets_together()
    if is_started_by_us() and not is_first_rank():
        send_output_to_file(Path(os.environ[LOG_DIR]) / f"rank_{os.environ['RANK']}.log")
    prepare_environment()


def kill_children_on_exit() -> None:
    """Make the kernel kill this process's forked children when it ends.

    Otherwise, torch's data workers would outlive a killed rank and keep its connections open, so its peers would not notice
    that it has died.
    """
    os.register_at_fork(after_in_child=die_with_parent)


def die_with_parent() -> None:
    """Make the kernel kill this process when the thread that started it ends."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")


def send_output_to_file(file: Path) -> None:
    """Append this process's stdout and stderr, including output from native code, to `file`."""
    file.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def report(error: Exception) -> int:
    """Report the error that ends this process, and return the exit code. An error that several ranks raise is printed only once.

    For a bug, the launcher prints the traceback from the rank that failed first.
    """
    error = to_readable_error(error)
    failure = build_failure(error)
    if is_rank():
        record_failure(failure)
        if not failure.restarts and is_started_by_torchrun():
            # torchrun restarts the ranks even after an error that the user has to fix. This file stops the next attempt.
            with suppress(OSError):  # the error to report may be a full disk
                write_file(get_shared_path("final"), json.dumps(asdict(failure)))
    if isinstance(error, DsReasonError):
        if should_print_error(str(error)):
            print_message(hide_secrets(f"{error.label}{error}"), err=True)
        return error.exit_code
    has_log = bool(logging.getLogger().handlers)
    if has_log:
        logging.getLogger(CRASH_LOG).critical("uncaught %s\n%s", type(error).__name__, failure.text)
    if should_print_error(failure.text) and not (is_started_by_us() and has_log):
        write(failure.text, file=sys.stderr, end="")
    return 1


def report_and_exit(error: Exception) -> None:
    """Report an error and end the process immediately, because closing its resources might wait for other ranks."""
    os._exit(report(error))


def should_print_error(text: str) -> bool:
    """Return whether this rank should write an error to stderr.

    dsreason's launcher prints the error itself. Rank 0 shares the launcher's terminal and therefore stays silent; ranks above 0
    write to their log file instead of a terminal. Other launchers, such as torchrun, show the output of all ranks, so only the
    first rank on each host that meets an error writes it. Errors are compared by their last line, because the text before it
    may differ between ranks.
    """
    if is_started_by_us():
        return not is_first_rank()
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return True
    last = text.rstrip().rpartition("\n")[2]
    with suppress(OSError):  # if the file cannot be written, every rank prints the error
        try:
            get_shared_path(f"{get_attempt()} {last}").touch(exist_ok=False)
        except FileExistsError:
            return False
    return True


def get_attempt() -> int:
    """Return how many times torchrun has restarted the ranks."""
    return int(os.environ.get(RESTARTS, 0))


def exit_if_failed_before() -> None:
    """Exit immediately if an earlier attempt has reported an error that the user has to fix."""
    mark = get_shared_path("final")
    if get_attempt() and mark.exists():
        failure = Failure(**json.loads(mark.read_text()))
        record_failure(failure)
        sys.exit(failure.exit_code)


def share_value(word: str, value: str) -> str:
    """Return the value that the first rank on this host passed for `word`. All its ranks get that value, even after restarts."""
    file = get_shared_path(word)
    own_file = file.with_suffix(f".{os.getpid()}")
    own_file.write_text(value)
    with suppress(FileExistsError):
        os.link(own_file, file)
    own_file.unlink()
    return file.read_text()


def get_shared_path(word: str) -> Path:
    """Return the path of a file shared by all ranks on this host, including ranks that the same launcher starts later.

    The file name begins with the process id and start time of the ranks' parent. Other users cannot write to the folder.
    """
    parent = os.getppid()
    return get_user_folder() / (build_prefix(parent) + hashlib.sha256(word.encode()).hexdigest()[:32])


# Functions for the parent


def count_gpus() -> int:
    """Return the number of visible GPUs, without allocating memory on them."""
    with make_imports_fast():
        import torch

    return int(torch.cuda.device_count())


def count_ranks(nproc: int | None, gpus: int, *, on_cpu: int = 1) -> int:
    """Return the number of ranks to start on this machine: `nproc` if set, otherwise one per GPU, or `on_cpu` without GPUs."""
    if gpus and nproc is not None and nproc > gpus:
        raise ConfigError(
            f"--nproc {nproc} exceeds the number of GPUs of this machine ({gpus}); set it to at most {gpus}"
        )
    return nproc or gpus or on_cpu


def get_device_kind(gpus: int) -> Literal["cpu", "cuda"]:
    """Return "cuda" if the machine has a GPU and DS_ACCELERATOR does not select the CPU; otherwise return "cpu"."""
    return "cuda" if gpus and os.environ.get("DS_ACCELERATOR", "cuda") == "cuda" else "cpu"


def start_ranks(arguments: Callable[[int], Sequence[str]], *, ranks: int, log_dir: Path, max_restarts: int = 0) -> None:
    """Run `python ARGUMENTS` in `ranks` processes, the ranks of one job on this machine, and wait for them.

    Rank 0 writes to this terminal; every other rank N writes to `log_dir/rank_N.log`.

    Args:
        arguments: function that maps an attempt's number, from 0, to its arguments; every attempt after 0 should resume the run.
        max_restarts: maximum number of times that all ranks are restarted after a failure that a restart may fix.

    Raises:
        RankError: the rank that failed first raised a `DsReasonError`.
        SystemExit: the rank that failed first raised any other error, or was killed; its traceback has been printed.
    """
    remove_leftovers()
    attempt = 0
    while failure := _run_once(arguments(attempt), ranks, log_dir):
        text = f"rank {failure.rank} failed; its log: {log_dir / f'rank_{failure.rank}.log'}"
        attempt += 1
        if not failure.restarts or attempt > max_restarts:
            if failure.user_fixable:
                raise RankError(failure)
            write(f"error: {text}\n\n{failure.text.rstrip()}", file=sys.stderr)
            raise SystemExit(failure.exit_code)
        write(f"{failure.text.rstrip()}\n{text}; restart {attempt} of {max_restarts}", file=sys.stderr)


def _run_once(arguments: Sequence[str], ranks: int, log_dir: Path) -> Failure | None:
    """Start all ranks, wait for them, and return the first failure; None if all ranks succeeded."""
    with make_imports_fast():
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    with (
        make_temporary_folder() as error_dir,
        set_variables(_build_rank_environment(ranks, log_dir, error_dir)),
        forward_signals() as received,
    ):
        launch = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=ranks,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint=str(Path(error_dir) / "rendezvous"),
            # Every heartbeat would make the store's file longer.
            rdzv_configs={"store_type": "file", "keep_alive_interval": NEVER},
            local_addr="127.0.0.1",  # the host's name may not resolve
            max_restarts=0,  # start_ranks restarts ranks itself, because it knows when a restart may help
            logs_specs=DefaultLogsSpecs(log_dir=os.devnull),
            signals_to_handle="SIGQUIT",  # forward_signals sends the other signals to the ranks, which save before they end
        )
        logging.disable(logging.CRITICAL)  # the agent also logs failures, but less clearly than the parent reports them
        try:
            elastic_launch(launch, sys.executable)(*arguments)
        except ChildFailedError as error:
            reports = [Failure(**json.loads(file.read_text())) for file in Path(error_dir).glob("rank_*.json")]
            failure = find_first_failure(reports, get_exit_codes(error.failures))
            failure = add_last_log_line(failure, Path(error_dir), log_dir / f"rank_{failure.rank}.log")
            return replace(_convert_stopped_failure(failure, received), restarts=False) if received else failure
        except SignalException as error:
            print_message(f"stopped by {error.sigval.name}", err=True)
            raise SystemExit(128 + error.sigval) from None
        finally:
            logging.disable(logging.NOTSET)
    return None


def _convert_stopped_failure(failure: Failure, received: Sequence[str]) -> Failure:
    """If the received signals caused a failure, convert it to a "stopped" outcome; otherwise, return it unchanged."""
    name = received[0]
    if failure.exit_code == Stopped.exit_code:
        return replace(failure, text=failure.text.replace("SIGUSR1", name))
    if failure.signal == signal.SIGUSR1:  # the ranks did not yet handle SIGUSR1, so nothing could be saved
        return replace(failure, text=f"stopped by {name}", exit_code=Stopped.exit_code, user_fixable=True)
    if failure.signal == signal.SIGTERM and len(received) > 1:
        text, code = (
            f"ended immediately by a second {received[1]}; everything saved before is kept",
            128 + signal.SIGTERM,
        )
        return replace(failure, text=text, exit_code=code, user_fixable=True)
    return failure


def _build_rank_environment(ranks: int, log_dir: Path, error_dir: str) -> dict[str, str]:
    threads = max(1, len(os.sched_getaffinity(0)) // ranks)
    return {
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
        ERROR_DIR: error_dir,
        LOG_DIR: str(log_dir.absolute()),
        LAUNCHER_PID: str(os.getpid()),
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # ranks meet at a file (`network.open_store`), not at a port of the agent
    }


@contextmanager
def set_variables(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables inside the block, and restore their previous values afterwards."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
