"""Work on many rows or files in worker processes; if one dies, the task it worked on is known."""

from __future__ import annotations

import itertools
import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, Generic, TypeVar, cast

import torch

from dsreason.errors import DataError
from dsreason.media.time_limit import read_last_words
from dsreason.monitor.progress import track

T = TypeVar("T")
R = TypeVar("R")

# As the DataLoader does it: what was opened and loaded is shared, and nothing is imported again.
FORK = multiprocessing.get_context("fork")


def run_tasks(
    work: Callable[[T], R], tasks: Sequence[T], place: Callable[[T], str], *, workers: int
) -> Iterator[tuple[int, R | DataError]]:
    """(number of the task, result) as they come, from `workers` processes; 0 works in this one.

    A task that fails has a DataError as its result: what `work` raised, or one that begins with its `place`. A process that
    dies (a decoder that crashes, memory that ran out) costs its task only: another one takes its place.
    """
    if workers == 0:
        for number, task in enumerate(tasks):
            yield number, attempt(work, task, place)
        return
    numbers = iter(range(len(tasks)))
    running: dict[Connection, TaskWorker[T, R]] = {}
    try:
        for number in itertools.islice(numbers, workers):
            worker = TaskWorker(work, place)
            running[worker.give(number, tasks[number])] = worker
        while running:
            for connection in cast(list[Connection], wait(list(running))):
                worker = running.pop(connection)
                done, result = worker.number, worker.result()
                number = next(numbers, -1)
                if number < 0:
                    worker.end()
                else:
                    worker = worker if worker.process.is_alive() else TaskWorker(work, place)
                    running[worker.give(number, tasks[number])] = worker
                yield done, result
    finally:
        for worker in running.values():
            worker.end()


def run_tracked(
    work: Callable[[T], R], tasks: Sequence[T], place: Callable[[T], str], workers: int, name: str, unit: str
) -> list[R | DataError]:
    """The results of `run_tasks` in the order of the tasks."""
    results: dict[int, R | DataError] = {}
    with track(name, len(tasks), unit) as advance:
        for number, result in run_tasks(work, tasks, place, workers=workers):
            results[number] = result
            advance(1)
    return [results[number] for number in range(len(tasks))]


def attempt(work: Callable[[T], R], task: T, place: Callable[[T], str]) -> R | DataError:
    try:
        return work(task)
    except DataError as error:
        return error
    except Exception as error:  # noqa: BLE001 (reported with the task's place; the other tasks go on)
        return DataError(f"{place(task)}: {type(error).__name__}: {error}")


class TaskWorker(Generic[T, R]):
    """One process, which works on one task at a time."""

    number: int
    task: T

    def __init__(self, work: Callable[[T], R], place: Callable[[T], str]) -> None:
        self.place = place
        self.connection, worker_end = FORK.Pipe()
        self.process = FORK.Process(target=serve, args=(work, place, worker_end, self.connection), daemon=True)
        self.process.start()
        worker_end.close()  # so that its end is the end of the stream

    def give(self, number: int, task: T) -> Connection:
        """The end at which the result will arrive."""
        self.number, self.task = number, task
        self.connection.send(task)
        return self.connection

    def result(self) -> R | DataError:
        try:
            result: R | DataError = self.connection.recv()
        except (EOFError, ConnectionResetError):
            self.process.join()
            words = read_last_words(str(self.process.pid))
            reason = words or f"the process that worked on it {exit_reason(self.process.exitcode or 0)}"
            return DataError(f"{self.place(self.task)}: {reason}")
        return result

    def end(self) -> None:
        self.process.kill()  # closing would not reach it: processes forked later hold this end as well
        self.process.join()


def exit_reason(exit_code: int) -> str:
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    name = signal.Signals(-exit_code).name
    return f"was killed by {name}" + (" (often: out of memory; see the kernel log)" if name == "SIGKILL" else "")


def serve(work: Callable[[Any], Any], place: Callable[[Any], str], connection: Connection, parents: Connection) -> None:
    """Until the parent ends it, or dies."""
    parents.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends its workers
    torch.set_num_threads(1)  # decoders and tensors: the workers run side by side
    while True:
        try:
            task = connection.recv()
        except EOFError:
            return
        connection.send(attempt(work, task, place))
