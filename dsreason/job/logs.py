"""A rank's logging: all messages go to logs/rank_N.log, but only those that the user needs to see go to the screen."""

from __future__ import annotations

import faulthandler
import logging
import os
import stat
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from dsreason.errors import ConfigError
from dsreason.job.failures import CRASH_LOG, format_crash
from dsreason.screen import write
from dsreason.secrets import HidingFormatter

LIBRARIES = ("DeepSpeed", "transformers", "huggingface_hub", "datasets", "vllm", "torch", "accelerate", "wandb")


class RankFormatter(HidingFormatter):
    """A formatter for lines such as `2026-01-31 12:00:00 rank 1 step 7 INFO dsreason.train.sft.loop: text`."""

    step: int | None = None

    def __init__(self, rank: int) -> None:
        super().__init__("%(asctime)s rank %(rank)d%(step)s %(levelname)s %(name)s: %(message)s", "%Y-%m-%d %H:%M:%S")
        self.rank = rank

    def format(self, record: logging.LogRecord) -> str:
        record.rank = self.rank
        record.step = "" if RankFormatter.step is None else f" step {RankFormatter.step}"
        return super().format(record)


class ScreenHandler(logging.Handler):
    """A handler that looks up `sys.stderr` for every line, because the progress bar replaces it to print lines above itself."""

    def emit(self, record: logging.LogRecord) -> None:
        write(self.format(record), file=sys.stderr)


def is_for_screen(record: logging.LogRecord, rank: int) -> bool:
    """Return whether to show a record on the screen.

    Rank 0 shows dsreason's messages from INFO and those of libraries from WARNING; other ranks show only errors. Python warnings
    and crash tracebacks go only to the log file.
    """
    if record.name in (CRASH_LOG, "py.warnings"):
        return False
    is_own = record.name.startswith("dsreason")
    return record.levelno >= (logging.ERROR if rank else logging.INFO if is_own else logging.WARNING)


def build_once_filter() -> Callable[[logging.LogRecord], bool]:
    """Build a filter that lets each message pass only once, because some libraries repeat the same warning at every step."""
    logged: set[str] = set()

    def is_new(record: logging.LogRecord) -> bool:
        before = len(logged)
        logged.add(record.getMessage())
        return len(logged) > before

    return is_new


def set_step(step: int | None) -> None:
    """Set the step number to show in subsequent log lines; None omits it."""
    RankFormatter.step = step


def setup_logs(output_dir: Path, rank: int) -> Path:
    """Set up a rank's logging to the screen and to `output_dir/logs/rank_N.log`, and return the path of that file.

    Messages and crashes are appended to the file. Call this after importing torch, transformers and deepspeed, which install
    their own screen handlers at import.
    """
    path = output_dir / "logs" / f"rank_{rank}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    if os.path.lexists(path) and not stat.S_ISREG(path.lstat().st_mode):
        raise ConfigError(
            f"{path}: exists but is not a regular file, so the log cannot be appended; remove it, or choose another folder"
        )
    to_file = logging.FileHandler(path)
    to_screen = ScreenHandler()
    to_screen.addFilter(lambda record: is_for_screen(record, rank))
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
        old.close()
    for handler in (to_file, to_screen):
        handler.setFormatter(RankFormatter(rank))
        root.addHandler(handler)
    root.setLevel(logging.INFO)
    for name in LIBRARIES:  # let the root handlers format and filter the libraries' messages
        library = logging.getLogger(name)
        library.handlers.clear()
        library.propagate = True
    logging.captureWarnings(True)
    logging.getLogger("py.warnings").addFilter(build_once_filter())
    log_crashes(to_file)
    return path


def get_log_file() -> str:
    """Return the absolute path of this rank's log file; "" if it has none."""
    files = [h.baseFilename for h in logging.getLogger().handlers if isinstance(h, logging.FileHandler)]
    return next(iter(files), "")


def log_crashes(handler: logging.FileHandler) -> None:
    """Log uncaught exceptions in threads, and write all stacks to the log file on a fatal signal."""

    def log_thread_exception(args: threading.ExceptHookArgs) -> None:
        name = args.thread.name if args.thread else "?"
        exception = args.exc_type, args.exc_value or args.exc_type(), args.exc_traceback
        logging.getLogger(CRASH_LOG).critical("uncaught exception in thread %s", name, exc_info=exception)
        # An OSError in a library's thread also reaches the code that waits for the thread, which reports it to the user.
        text = f"{exception[1]}\n" if isinstance(exception[1], OSError) else format_crash(exception[1])
        write(f"Exception in thread {name}:\n{text}", file=sys.stderr, end="")

    threading.excepthook = log_thread_exception
    assert handler.stream is not None, "the log file is not open yet"
    faulthandler.enable(handler.stream)
