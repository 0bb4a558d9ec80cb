"""The watchdog, which ends the job if a rank dies or a phase takes too long; in the latter case, every rank writes its stacks."""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import MappingProxyType, TracebackType
from typing import Self

import torch.distributed as dist

from dsreason.config.schema import Phase as PhaseName
from dsreason.errors import DsReasonError
from dsreason.job import launch, lifeline
from dsreason.job.failures import (
    CRASH_LOG,
    TIME_LIMIT_EXIT_CODE,
    Failure,
    build_failure,
    build_peer_error,
    record_activity,
    record_failure,
)
from dsreason.job.logs import RankFormatter, get_log_file
from dsreason.job.ranks import World, connect_to_store
from dsreason.phases import record_phase

TICK = 1.0
"""Seconds between two checks of the current phase and of requests from other ranks."""
ANSWER_TIME = 10.0
"""Seconds that a rank waits for the others to write their stacks before it ends, after which the launcher kills them."""
GRACE = 5.0
"""Seconds beyond the time limit after which a rank is ended even if its watchdog thread cannot run."""
CLOSING_TIME = 20.0
"""Time limit in seconds for a rank to close its resources after an error."""

log = logging.getLogger(__name__)

WATCHERS = ("watchdog", "lifeline", "lifeline-server", "launchers", "stop signals")
"""Names of the monitoring threads. Their stacks are omitted, because a rank never hangs in them."""

ASKED = "dsreason_watchdog/asked"
"""Key in the job's store whose value is the rank that requests the stacks of all ranks."""
ANSWER = "dsreason_watchdog/answer"


@dataclass
class Phase:
    name: PhaseName
    started: float
    """Monotonic time, in seconds, at which the phase started, plus the duration of inner phases that have ended."""

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started


class Watchdog:
    """A monitor for this rank's phases, which ends the process if a phase exceeds its time limit.

    A thread checks the current phase once per second. It also checks the job's store, where a rank that has exceeded a time
    limit requests the stacks of all ranks. If other code holds the interpreter lock, so that the thread cannot run,
    faulthandler's timer writes the stacks to the log and ends the process. The lifeline reports ranks that die. Enter the
    watchdog after the run's other context managers, so that it still prints the error and ends the process if a rank fails and
    its cleanup hangs.
    """

    def __init__(
        self, world: World, *, time_limit: float, time_limits: Mapping[PhaseName, float] = MappingProxyType({})
    ) -> None:
        self.world, self.time_limit, self.time_limits = world, time_limit, time_limits
        self._idle_since = time.monotonic()
        self._phases: list[Phase] = []
        self._store = connect_to_store()
        self._store_lost = False
        self._outputs = get_output_descriptors()
        self.lifeline = lifeline.get_lifeline(world.rank, world.size, self._store)
        self._over = threading.Event()
        self._is_closing = self._is_late = False
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Self:
        # At exit, a child forked while the timer runs would wait for the timer's thread, which does not exist in the child.
        os.register_at_fork(before=faulthandler.cancel_dump_traceback_later)
        self.lifeline.open(self._end_with)
        self.lifeline.report_log(get_log_file())
        self._end_in(self.time_limit + GRACE)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close_in_time(kind, error, trace)
        finally:
            self._over.set()
            if error is None:
                self.lifeline.send_goodbye()
            if not isinstance(error, Exception):
                self._thread.join(timeout=2 * TICK)
                faulthandler.cancel_dump_traceback_later()

    def close_in_time(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        """Limit the time for closing resources after an error, because closing may wait for dead ranks. For an `ExitStack`.

        Raises:
            RankError: another rank's failure caused this rank's error.
        """
        if error is None or self._is_closing:
            return
        self._is_closing = True
        failure = build_failure(error)
        first = self.lifeline.fail(failure)
        followed = first.rank != self.world.rank and not isinstance(error, DsReasonError)
        record_failure(first if followed else failure)
        reason = build_peer_error(first) if followed else error
        if isinstance(reason, Exception):
            self._end_soon(reason)
        if followed:
            logging.getLogger(CRASH_LOG).critical("rank %d failed before this:", first.rank, exc_info=error)
            raise reason from None

    def _end_with(self, first: Failure) -> None:
        """End this rank because another rank failed; it may be waiting in a collective that never completes."""
        if first.rank != self.world.rank and not self._is_closing and not self._is_late:
            error = build_peer_error(first)
            self._end_soon(error)
            logging.getLogger(CRASH_LOG).critical("%s", error)

    def _end_soon(self, error: Exception) -> None:
        """Report the error and end this rank, unless it ends by itself within `CLOSING_TIME`."""
        self._over.set()
        self._end_in(CLOSING_TIME + GRACE)
        timer = threading.Timer(CLOSING_TIME, launch.report_and_exit, [error])
        timer.daemon = True
        timer.start()

    @contextmanager
    def track_phase(self, name: PhaseName) -> Iterator[None]:
        """Apply the time limit for phase `name` to the block. While an inner phase runs, the outer phase's clock stops."""
        started = time.monotonic()
        self._phases.append(Phase(name, started))
        self._report_activity()
        try:
            with record_phase(name):
                yield
        finally:
            for outer in self._phases[-2:-1]:
                outer.started += time.monotonic() - started
            self._phases.pop()
            self._idle_since = time.monotonic()
            self._report_activity()

    def _report_activity(self) -> None:
        activity = f'in phase "{self._phases[-1].name if self._phases else "other"}"'
        if RankFormatter.step is not None:
            activity += f" after step {RankFormatter.step}"
        self.lifeline.report_activity(activity)
        record_activity(activity)

    def _watch(self) -> None:
        while not self._over.wait(TICK):
            phase = next(iter(self._phases[-1:]), Phase("other", self._idle_since))
            seconds, limit = phase.seconds, self.time_limits.get(phase.name, self.time_limit)
            self._end_in(max(0.0, limit - seconds) + GRACE)
            situation = f'in phase "{phase.name}" for {seconds:.0f} s'
            if seconds > limit:
                key = "monitor.phase_time_limits" if phase.name in self.time_limits else "monitor.phase_time_limit"
                self._end(f"{situation}, but the time limit is {limit:g} s; raise {key} if it needs more time")
            asking = self._find_requesting_rank()
            if asking is not None:
                self._end(f"{situation} when rank {asking} exceeded its time limit")

    def _end_in(self, seconds: float) -> None:
        """End the process after `seconds`, regardless of what its threads are doing."""
        faulthandler.dump_traceback_later(seconds, exit=True, file=self._outputs[0])

    def _find_requesting_rank(self) -> int | None:
        """Return the rank that has requested the stacks of all ranks; None if no rank has."""
        if self._store_lost:
            return None
        try:
            return int(self._store.get(ASKED)) if self._store.check([ASKED]) else None
        except dist.DistError as error:
            self._store_lost = True
            if not self._over.wait(TICK) and not self.lifeline.rank_0_has_ended:
                log.warning(
                    "lost the connection to the job's store (%s), so ranks can no longer report an exceeded time limit",
                    error,
                )
            return None

    def _end(self, situation: str) -> None:
        """Write this rank's stacks, request those of the other ranks, and end the process."""
        self._end_in(3 * ANSWER_TIME)
        self._is_late = True
        self.lifeline.send_goodbye()  # otherwise, the other ranks would think that this rank died and not write their stacks
        try:
            step = "" if RankFormatter.step is None else f" step {RankFormatter.step}"
            *other_stacks, main = format_stacks(self.world.rank)
            main += f"rank {self.world.rank}{step}: {situation}\n"
            record_failure(Failure(self.world.rank, main, TIME_LIMIT_EXIT_CODE, user_fixable=False, time=time.time()))
            with suppress(dist.DistError):
                self._store.compare_set(ASKED, "", str(self.world.rank))  # has no effect if another rank was faster
            self._write("".join([*other_stacks, main]))
            with suppress(dist.DistError):
                self._wait_for_others()
        finally:
            os._exit(TIME_LIMIT_EXIT_CODE)

    def _wait_for_others(self) -> None:
        keys = [f"{ANSWER}/{rank}" for rank in range(self.world.size)]
        self._store.set(keys[self.world.rank], "")
        started = time.monotonic()
        while not self._store.check(keys):
            if time.monotonic() - started > ANSWER_TIME:
                silent = ", ".join(str(rank) for rank, key in enumerate(keys) if not self._store.check([key]))
                self._write(
                    f"no response from rank {silent}: it is stopped, or runs code that holds the interpreter lock (GIL)\n"
                )
                return
            time.sleep(0.2)

    def _write(self, text: str) -> None:
        for descriptor in reversed(self._outputs):  # write the log last, because its file system may hang
            with suppress(OSError), open(descriptor, "w", closefd=False) as file:
                file.write(text)


def get_output_descriptors() -> list[int]:
    """Return the file descriptors of this rank's log, if any, and of stderr, unless the launcher prints the log anyway."""
    handlers = logging.getLogger().handlers
    logs = [h.stream.fileno() for h in handlers if isinstance(h, logging.FileHandler) and h.stream is not None]
    stderr = 2
    return logs if logs and launch.is_started_by_us() else [*logs, stderr]


def format_stacks(rank: int) -> list[str]:
    """Return the formatted stack of each thread except those in `WATCHERS`; the main thread comes last."""
    main, names = threading.main_thread().ident, {thread.ident: thread.name for thread in threading.enumerate()}
    frames = [(ident, frame) for ident, frame in sys._current_frames().items() if names.get(ident) not in WATCHERS]
    return [
        f"rank {rank}, thread {names.get(ident, ident)} (most recent call last):\n"
        + "".join(traceback.format_stack(frame))
        for ident, frame in sorted(frames, key=lambda item: item[0] == main)
    ]
