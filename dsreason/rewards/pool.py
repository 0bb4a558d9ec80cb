"""A pool of worker processes that run reward functions. The pool schedules the calls and enforces their time limits."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import signal
import socket
import subprocess
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, Self

import psutil

from dsreason.errors import ConfigError, RewardError
from dsreason.rewards import worker as messages
from dsreason.stopping import check_stop

log = logging.getLogger(__name__)

GRACE = 1.0
"""Seconds that a worker may exceed the time limit of an async call, which it normally enforces itself, before it is killed."""
TICK = 0.5
"""Maximum number of seconds between two checks for a stop request and for workers that died without closing their pipe."""

WITHOUT_RANKS = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
"""Environment variables for workers that are not started by a training rank but, for example, by `dsreason reward try`;
reward functions may read them."""

CAUSES: dict[int, str] = {
    signal.SIGKILL: ", often because memory is exhausted; see the kernel log, or lower reward.workers",
    signal.SIGSEGV: ", caused by native code that the function calls",
    signal.SIGABRT: ", caused by native code that the function calls",
}
"""Signal → usual reason why it killed a worker, for messages."""


@dataclass(frozen=True)
class RewardCall:
    """A call to a reward function, given by its index, for one completion or for several completions or clips."""

    function: int
    arguments: tuple[Any, ...]
    subject: str
    """What the call is about, for messages, such as `sample "7"`."""


class RewardWorker:
    """One worker process, as seen by the trainer."""

    def __init__(self, start: messages.Start) -> None:
        trainer_end, worker_end = socket.socketpair()
        with worker_end:
            # In a separate session, Ctrl-C does not reach the worker, and processes that a function starts can be killed
            # together with it.
            self.process = subprocess.Popen(
                messages.build_command(worker_end.fileno()),
                pass_fds=[worker_end.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env=WITHOUT_RANKS | os.environ,
            )
        self.connection: Connection[Any, Any] = Connection(trainer_end.detach())
        self.traits: list[messages.Trait] | None = None
        """Properties of the functions, by index; None until the worker has imported the functions."""
        self.function = 0
        self.pending: list[int] = []
        """Indices of the calls without a result. Async calls that have begun come first, starting with the most recent."""
        self.since = time.monotonic()
        """Time, on the monotonic clock, when the worker last sent a message or was given a task."""
        self.connection.send(start)

    @property
    def idle(self) -> bool:
        return self.traits is not None and not self.pending

    def give(self, job: messages.WorkerTask) -> None:
        self.function, self.pending = job.function, [item[0] for item in job.items]
        self.since = time.monotonic()
        self.connection.send(job)

    def received(self) -> list[Any]:
        """Return the messages that have arrived; raise EOFError or OSError if the worker has died."""
        results: list[Any] = []
        exited = self.process.poll() is not None  # checked first: earlier messages may still be in the pipe
        while self.connection.poll():
            try:
                results.append(self.connection.recv())
            except (EOFError, OSError):
                if results:
                    break  # return the last messages; the next call raises
                raise
            self.since = time.monotonic()
        if exited and not results:
            raise EOFError
        return results

    def kill(self, *, show_stack: bool = False) -> None:
        if self.connection.closed:
            return  # already killed; the process ID may belong to another process by now
        if show_stack and self.process.poll() is None:
            self.process.send_signal(signal.SIGUSR1)
            time.sleep(0.2)  # the worker prints its stack to stderr
        descendants: list[psutil.Process] = []  # includes processes in a session of their own
        if self.process.poll() is None:
            with contextlib.suppress(psutil.Error):
                descendants = psutil.Process(self.process.pid).children(recursive=True)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        for process in descendants:
            with contextlib.suppress(psutil.Error):
                process.kill()
        self.process.wait()
        self.connection.close()


class Pool:
    """A pool of worker processes that call reward functions of one kind. `functions` is a list of (name, options)."""

    def __init__(
        self,
        kind: messages.FunctionKind,
        functions: Sequence[tuple[str, Mapping[str, Any]]],
        *,
        workers: int,
        time_limit: float,
        start_limit: float,
    ) -> None:
        self.names = [name for name, _ in functions]
        self.start_limit = start_limit
        self._start = messages.Start(kind, functions, time_limit)
        self._count = workers if functions else 0
        self._workers: list[RewardWorker] = []

    def __enter__(self) -> Self:
        try:
            for _ in range(self._count):
                self._workers.append(RewardWorker(self._start))
            while any(worker.traits is None for worker in self._workers):
                self._listen([], {}, deque())
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill all workers, even those that are executing a call."""
        for worker in self._workers:
            worker.kill()
        self._workers = []

    @property
    def traits(self) -> list[messages.Trait]:
        """Properties of the functions, by index."""
        if self.names and not self._workers:
            raise RuntimeError(
                "the workers are not running: use the pool in a with statement, and do not use it after an error"
            )
        return (self._workers[0].traits or []) if self._workers else []

    def run(self, calls: Sequence[RewardCall]) -> list[messages.ScoredCall]:
        """Run the calls and return their results in the same order. Any error kills all workers.

        Raises:
            RewardError: a call or a worker failed.
            Stopped: this process was asked to stop.
        """
        results: dict[int, messages.ScoredCall] = {}
        jobs = self._group_calls(calls)
        try:
            while len(results) < len(calls):
                for worker in self._workers:
                    if jobs and worker.idle:
                        self._give(worker, jobs.popleft(), calls)
                self._listen(calls, results, jobs)
        except BaseException:
            self.close()
            raise
        return [results[number] for number in range(len(calls))]

    def _group_calls(self, calls: Sequence[RewardCall]) -> deque[list[int]]:
        """Group calls to the same function into tasks: one task per worker if it is async, else several, to balance the load."""
        jobs: deque[list[int]] = deque()
        for function, trait in enumerate(self.traits):
            numbers = [number for number, call in enumerate(calls) if call.function == function]
            parts = len(self._workers) * (1 if trait.is_async else 4)
            size = max(1, -(-len(numbers) // parts))
            jobs.extend(numbers[first : first + size] for first in range(0, len(numbers), size))
        return jobs

    def _give(self, worker: RewardWorker, numbers: list[int], calls: Sequence[RewardCall]) -> None:
        items = [(number, calls[number].arguments) for number in numbers]
        try:
            worker.give(messages.WorkerTask(calls[numbers[0]].function, items))
        except OSError:
            raise self._build_death_error(worker, calls) from None
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            subject = self._describe_subject(calls[numbers[0]])
            raise RewardError(
                f"{subject} this call, or another one of the same task, cannot be sent to a worker: {error}"
            ) from error

    def _listen(
        self, calls: Sequence[RewardCall], results: dict[int, messages.ScoredCall], jobs: deque[list[int]]
    ) -> None:
        """Wait for messages and process them, then deal with workers that exceed their time limit.

        Raises:
            Stopped: this process was asked to stop.
        """
        check_stop()
        busy = [worker for worker in self._workers if not worker.idle]
        remaining = min((self._compute_deadline(worker) - time.monotonic() for worker in busy), default=TICK)
        wait([worker.connection for worker in busy], timeout=min(max(remaining, 0.0), TICK))
        for worker in busy:
            try:
                new_messages = worker.received()
            except (EOFError, OSError):
                raise self._build_death_error(worker, calls) from None
            for message in new_messages:
                self._take(worker, message, calls, results)
            if not worker.idle and time.monotonic() > self._compute_deadline(worker):
                self._handle_timeout(worker, calls, results, jobs)

    def _take(
        self, worker: RewardWorker, message: Any, calls: Sequence[RewardCall], results: dict[int, messages.ScoredCall]
    ) -> None:
        match message:
            case messages.Ready(traits):
                worker.traits = traits
            case ConfigError():
                raise message
            case messages.ScoredCall(call):
                results[call] = message
                worker.pending.remove(call)
            case messages.Begun(call):
                worker.pending.remove(call)
                worker.pending.insert(0, call)
            case messages.Failed(call, text):
                raise RewardError(f"{self._describe_subject(calls[call])} {text}")

    def _get_trait(self, worker: RewardWorker) -> messages.Trait:
        assert worker.traits is not None
        return worker.traits[worker.function]

    def _compute_deadline(self, worker: RewardWorker) -> float:
        if worker.traits is None:
            return worker.since + self.start_limit
        trait = self._get_trait(worker)
        return worker.since + trait.time_limit + (GRACE if trait.is_async else 0.0)

    def _handle_timeout(
        self,
        worker: RewardWorker,
        calls: Sequence[RewardCall],
        results: dict[int, messages.ScoredCall],
        jobs: deque[list[int]],
    ) -> None:
        """Kill a worker that exceeded its time limit, and replace it if the function has a `score_on_timeout`.

        Raise RewardError if the function has no `score_on_timeout`, or if the worker has not finished its imports.
        """
        starting = worker.traits is None
        worker.kill(show_stack=True)
        if starting:
            raise RewardError(
                f"a reward worker has not imported {', '.join(self.names)} within the time limit of {self.start_limit:g} s "
                "(see its stack above); move slow imports into the function's first call"
            )
        call, *other_pending = worker.pending
        if self._get_trait(worker).is_async:
            other_calls = f" (or one of {len(other_pending)} concurrent calls)" if other_pending else ""
            raise RewardError(
                f"{self._describe_timeout(worker, calls[call])}{other_calls}: it blocks the event loop (see its stack "
                "above); use await for everything that waits"
            )
        score = self._get_trait(worker).score_on_timeout
        if score is None:
            raise RewardError(f"{self._describe_timeout(worker, calls[call])} (see its stack above)")
        log.warning("%s; its score is %g", self._describe_timeout(worker, calls[call]), score)
        results[call] = messages.ScoredCall(call, score, {"timeouts": 1.0}, self._get_trait(worker).time_limit)
        if other_pending:
            jobs.appendleft(other_pending)
        self._workers[self._workers.index(worker)] = RewardWorker(self._start)

    def _describe_subject(self, call: RewardCall) -> str:
        return f'reward "{self.names[call.function]}", {call.subject}:'

    def _describe_timeout(self, worker: RewardWorker, call: RewardCall) -> str:
        return f"{self._describe_subject(call)} {messages.describe_timeout(self._get_trait(worker).time_limit)}"

    def _build_death_error(self, worker: RewardWorker, calls: Sequence[RewardCall]) -> RewardError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            worker.process.wait(2)  # the pipe closes shortly before the process ends
        worker.kill()
        code = worker.process.returncode
        cause = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        cause += CAUSES.get(-code, "")
        if not worker.pending:
            return RewardError(
                f"a reward worker died while importing {', '.join(self.names)} ({cause}); see its output above"
            )
        return RewardError(f"{self._describe_subject(calls[worker.pending[0]])} its worker process died ({cause})")
