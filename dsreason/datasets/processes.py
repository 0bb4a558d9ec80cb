"""Work on many rows or files in worker processes; where one dies, the task it worked on is known."""

from __future__ import annotations

import itertools
import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, Generic, Protocol, TypeVar, cast

import torch

T = TypeVar("T")
R = TypeVar("R")

# As the DataLoader does it: what was opened and loaded is shared, and nothing is imported again.
FORK = multiprocessing.get_context("fork")

Advance = Callable[[int], None]
"""Call with the number of units just done."""


class Track(Protocol):
    """A progress bar for long work: `with track("reading", 100, "rows") as advance: … advance(1)`."""

    def __call__(self, name: str, total: int, unit: str) -> AbstractContextManager[Advance]: ...


@contextmanager
def untracked(name: str, total: int, unit: str) -> Iterator[Advance]:
    yield lambda count: None


@dataclass(frozen=True)
class Failure:
    """A task that raised, or that its process did not survive."""

    reason: str


def run_tasks(work: Callable[[T], R], tasks: Sequence[T], *, workers: int) -> Iterator[tuple[int, R | Failure]]:
    """(number of the task, result) as they come, from `workers` processes; 0 works in this one.

    A process that dies (a decoder that crashes, memory that ran out) costs its task only: another one takes its place.
    """
    if workers == 0:
        for number, task in enumerate(tasks):
            yield number, attempt(work, task)
        return
    numbers = iter(range(len(tasks)))
    running: dict[Connection, Worker[T, R]] = {}
    try:
        for number in itertools.islice(numbers, workers):
            worker = Worker(work)
            running[worker.give(number, tasks[number])] = worker
        while running:
            for connection in cast(list[Connection], wait(list(running))):
                worker = running.pop(connection)
                done, result = worker.number, worker.result()
                number = next(numbers, -1)
                if number < 0:
                    worker.stop()
                else:
                    worker = worker if worker.process.is_alive() else Worker(work)
                    running[worker.give(number, tasks[number])] = worker
                yield done, result
    finally:
        for worker in running.values():
            worker.process.terminate()


def tracked(
    work: Callable[[T], R], tasks: Sequence[T], workers: int, track: Track, name: str, unit: str
) -> list[R | Failure]:
    """The results of `run_tasks` in the order of the tasks."""
    results: dict[int, R | Failure] = {}
    with track(name, len(tasks), unit) as advance:
        for number, result in run_tasks(work, tasks, workers=workers):
            results[number] = result
            advance(1)
    return [results[number] for number in range(len(tasks))]


def attempt(work: Callable[[T], R], task: T) -> R | Failure:
    try:
        return work(task)
    except Exception as error:  # noqa: BLE001 (reported with the task's name; the other tasks go on)
        return Failure(f"{type(error).__name__}: {error}")


class Worker(Generic[T, R]):
    """One process, which works on one task at a time."""

    def __init__(self, work: Callable[[T], R]) -> None:
        self.number = -1
        self.connection, theirs = FORK.Pipe()
        self.process = FORK.Process(target=serve, args=(work, theirs, self.connection), daemon=True)
        self.process.start()
        theirs.close()  # so that its exit_reason is the end of the stream

    def give(self, number: int, task: T) -> Connection:
        """The end at which the result will arrive."""
        self.number = number
        self.connection.send((task,))
        return self.connection

    def result(self) -> R | Failure:
        try:
            found: R | Failure = self.connection.recv()
        except (EOFError, ConnectionResetError):
            self.process.join()
            return Failure(f"the process that worked on it {exit_reason(self.process.exitcode or 0)}")
        return found

    def stop(self) -> None:
        if self.process.is_alive():
            self.connection.send(None)  # closing would not reach it: processes forked later hold this end as well
        self.process.join()


def exit_reason(exit_code: int) -> str:
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    name = signal.Signals(-exit_code).name
    return f"was killed by {name}" + (" (out of memory is the usual reason)" if name == "SIGKILL" else "")


def serve(work: Callable[[Any], Any], connection: Connection, parents: Connection) -> None:
    """Until the parent sends None, or dies."""
    parents.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends its workers
    torch.set_num_threads(1)  # decoders and tensors: the workers run side by side
    while True:
        try:
            given = connection.recv()
        except EOFError:
            return
        if given is None:
            return
        connection.send(attempt(work, *given))
