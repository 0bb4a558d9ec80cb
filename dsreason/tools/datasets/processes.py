"""Worker processes for tasks on many rows or files; if a worker dies, the task it was working on is reported."""

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

# Workers are forked, like those of the DataLoader, so they share everything that is open or loaded, and don't
# re-import anything.
FORK = multiprocessing.get_context("fork")


def run_tasks(
    work: Callable[[T], R], tasks: Sequence[T], describe_task: Callable[[T], str], *, workers: int
) -> Iterator[tuple[int, R | DataError]]:
    """Run the tasks in `workers` processes (0: in this process), and yield (task number, result) in the order of completion.

    The result of a failed task is a DataError: the one that `work` raised, or one whose message begins with
    `describe_task(task)`. If a process dies, because a decoder crashes or memory runs out, only its task fails, and another
    process replaces it.
    """
    if workers == 0:
        for number, task in enumerate(tasks):
            yield number, run_task(work, task, describe_task)
        return
    numbers = iter(range(len(tasks)))
    running: dict[Connection, TaskWorker[T, R]] = {}
    try:
        for number in itertools.islice(numbers, workers):
            worker = TaskWorker(work, describe_task)
            running[worker.give(number, tasks[number])] = worker
        while running:
            for connection in cast(list[Connection], wait(list(running))):
                worker = running.pop(connection)
                done, result = worker.number, worker.result()
                number = next(numbers, -1)
                if number < 0:
                    worker.end()
                else:
                    worker = worker if worker.process.is_alive() else TaskWorker(work, describe_task)
                    running[worker.give(number, tasks[number])] = worker
                yield done, result
    finally:
        for worker in running.values():
            worker.end()


def run_tracked(
    work: Callable[[T], R], tasks: Sequence[T], describe_task: Callable[[T], str], workers: int, name: str, unit: str
) -> list[R | DataError]:
    """Return the results of `run_tasks` in the order of the tasks, and display the progress."""
    results: dict[int, R | DataError] = {}
    with track(name, len(tasks), unit) as advance:
        for number, result in run_tasks(work, tasks, describe_task, workers=workers):
            results[number] = result
            advance(1)
    return [results[number] for number in range(len(tasks))]


def run_task(work: Callable[[T], R], task: T, describe_task: Callable[[T], str]) -> R | DataError:
    try:
        return work(task)
    except DataError as error:
        return error
    except Exception as error:  # noqa: BLE001 (reported with the task's location; the other tasks continue)
        return DataError(f"{describe_task(task)}: {type(error).__name__}: {error}")


class TaskWorker(Generic[T, R]):
    """A worker process that works on one task at a time."""

    number: int
    task: T

    def __init__(self, work: Callable[[T], R], describe_task: Callable[[T], str]) -> None:
        self.describe_task = describe_task
        self.connection, worker_end = FORK.Pipe()
        self.process = FORK.Process(target=serve, args=(work, describe_task, worker_end, self.connection), daemon=True)
        self.process.start()
        worker_end.close()  # otherwise this process never sees EOF when the worker exits

    def give(self, number: int, task: T) -> Connection:
        """Send a task to the worker; return the connection on which its result will arrive."""
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
            return DataError(f"{self.describe_task(self.task)}: {reason}")
        return result

    def end(self) -> None:
        self.process.kill()  # closing the connection would not end the worker: workers forked later hold this end, too
        self.process.join()


def exit_reason(exit_code: int) -> str:
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    name = signal.Signals(-exit_code).name
    return f"was killed by {name}" + (" (often: out of memory; see the kernel log)" if name == "SIGKILL" else "")


def serve(
    work: Callable[[Any], Any], describe_task: Callable[[Any], str], connection: Connection, parents: Connection
) -> None:
    """Run the tasks that arrive on `connection` until the parent kills this process or dies."""
    parents.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and ends its workers
    torch.set_num_threads(1)  # the workers run in parallel, so each uses one thread
    while True:
        try:
            task = connection.recv()
        except EOFError:
            return
        connection.send(run_task(work, task, describe_task))
