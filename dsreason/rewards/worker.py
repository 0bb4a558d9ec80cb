"""A worker process: it finds the reward functions by name, calls them, and says after each call what came of it.

It is started as a new Python, not forked: the trainer holds CUDA, threads and locks. Results become plain numbers here,
so nothing of a user's types crosses the pipe.
"""

from __future__ import annotations

import asyncio
import faulthandler
import functools
import inspect
import math
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from numbers import Real
from typing import Any

from dsreason.data.types import Sample
from dsreason.errors import ConfigError
from dsreason.rewards.functions import RewardFn, find_reward
from dsreason.user_code import restore_script_folders

CONCURRENT_CALLS = 64
"""Of one async function in one worker."""


@dataclass(frozen=True)
class Start:
    """First message to a worker: the functions by name with their options, and the seconds a call may take."""

    functions: Sequence[tuple[str, Mapping[str, Any]]]
    time_limit: float


@dataclass(frozen=True)
class Job:
    """Calls of one function: `items` are (number of the call, completion, sample)."""

    function: int
    items: list[tuple[int, str, Sample]]


@dataclass(frozen=True)
class Trait:
    """What the scheduler has to know of a function."""

    is_async: bool
    score_on_timeout: float | None


@dataclass(frozen=True)
class Ready:
    traits: list[Trait]


@dataclass(frozen=True)
class Begun:
    """An async call that has begun; plain ones follow each other."""

    call: int


@dataclass(frozen=True)
class Scored:
    call: int
    score: float
    metrics: dict[str, float]


@dataclass(frozen=True)
class Failed:
    """What is wrong with a call: `raised …`, `returned …`, or that an async one was still waiting at the time limit."""

    call: int
    text: str


Send = Callable[[Begun | Scored | Failed], None]


def main(descriptor: int) -> None:
    """Serves until the other end of the pipe closes."""
    os.set_inheritable(descriptor, False)  # what a reward function starts must not hold the pipe open
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # asked for before a hanging worker is killed
    threading.Thread(target=_exit_with_parent, args=(os.getppid(),), daemon=True).start()
    with Connection(descriptor) as connection, asyncio.Runner() as runner:
        try:
            start: Start = connection.recv()
            restore_script_folders()
            functions = [find_reward(name, options) for name, options in start.functions]
            connection.send(Ready([_trait(function) for function in functions]))
            while True:
                _run(connection.recv(), functions, runner, connection.send, start.time_limit)
        except ConfigError as error:
            connection.send(ConfigError(str(error)))  # of a function that cannot be loaded
        except (EOFError, BrokenPipeError, ConnectionResetError):
            return


def _exit_with_parent(parent: int) -> None:
    """A killed trainer leaves nobody behind, not even a function that hangs."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _trait(function: RewardFn) -> Trait:
    inner = function.func if isinstance(function, functools.partial) else function
    is_async = inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(type(inner).__call__)
    score = getattr(inner, "score_on_timeout", None)
    return Trait(is_async, None if is_async or score is None else float(score))


def _run(job: Job, functions: Sequence[RewardFn], runner: asyncio.Runner, send: Send, time_limit: float) -> None:
    function = functions[job.function]
    if _trait(function).is_async:
        runner.run(_call_all(function, job.items, send, time_limit))
        return
    for call, completion, sample in job.items:
        try:
            result = function(completion, sample)
            if inspect.isawaitable(result):
                result = runner.run(_wait(result))
        except Exception as error:  # noqa: BLE001  somebody else's code; the trainer raises it
            send(Failed(call, _described(error)))
        else:
            send(_checked(call, result))


async def _wait(result: Any) -> Any:
    return await result


async def _call_all(
    function: RewardFn, items: Sequence[tuple[int, str, Sample]], send: Send, time_limit: float
) -> None:
    gate = asyncio.Semaphore(CONCURRENT_CALLS)

    async def one(call: int, completion: str, sample: Sample) -> None:
        async with gate:
            send(Begun(call))
            running = function(completion, sample)
            send(await _answer(call, running, time_limit))  # type: ignore[arg-type]  # of an async function

    await asyncio.gather(*(one(*item) for item in items))


async def _answer(call: int, running: Coroutine[Any, Any, Any], time_limit: float) -> Scored | Failed:
    scope = asyncio.timeout(time_limit)
    try:
        async with scope:
            result = await running
    except Exception as error:  # noqa: BLE001  somebody else's code; the trainer raises it
        # The function may itself raise a TimeoutError: one of its requests took too long.
        return Failed(call, no_result_within(time_limit) if scope.expired() else _described(error))
    return _checked(call, result)


def no_result_within(time_limit: float) -> str:
    return f"no result within the time limit of {time_limit:g} s"


def _described(error: Exception) -> str:
    """`raised ValueError: …`, and below it the traceback from the function on."""
    own = error.__traceback__
    while own is not None and own.tb_frame.f_code.co_filename == __file__:
        own = own.tb_next
    lines = "".join(traceback.format_exception(type(error), error, own)).rstrip()
    return f"raised {type(error).__name__}: {error}\n{lines}"


def _checked(call: int, result: Any) -> Scored | Failed:
    """The result as plain numbers, or what is wrong with it."""
    score, metrics = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
    if not _is_number(score):
        return Failed(call, f"returned {_shown(result)}; a reward is a finite number, or (number, dict of metrics)")
    if not isinstance(metrics, Mapping):
        return Failed(call, f"returned {_shown(metrics)} beside the number; metrics are a dict of names and numbers")
    for name, value in metrics.items():
        if not isinstance(name, str) or not _is_number(value):
            return Failed(call, f"returned the metric {name!r}: {_shown(value)}; metrics have names and finite numbers")
    return Scored(call, float(score), {str(name): float(value) for name, value in metrics.items()})


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and math.isfinite(value)


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{text[:200]}… ({type(value).__name__})" if len(text) > 200 else f"{text} ({type(value).__name__})"


def command(descriptor: int) -> list[str]:
    """The command line of a worker that talks through `descriptor`; it has this process's import path."""
    code = (
        f"import sys; sys.path[:] = {[path or os.getcwd() for path in sys.path]!r}; "
        f"from {__name__} import main; main({descriptor})"
    )
    return [sys.executable, "-c", code]
