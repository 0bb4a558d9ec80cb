"""Worker process that finds reward functions by name, calls them, and reports the result of each call.

The worker is started as a new Python process instead of being forked, because the trainer holds CUDA, threads and locks. It
converts results to plain numbers, so that no object of a user-defined type is sent through the pipe.
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
import textwrap
import threading
import time
import traceback
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from numbers import Real
from typing import Any

from dsreason.errors import ConfigError, DataError
from dsreason.user_code import restore_script_folders

CONCURRENT_CALLS = 64
"""Maximum number of concurrent calls to one async function in one worker."""
ERROR_CHARACTERS = 4000
"""Maximum number of characters in a reported error's message, and in each line of its traceback."""
LARGEST = 1e12
"""Maximum absolute value of a reward; the sum of many squares of this size is still finite in float32."""
BOUND = f"a reward must be between {-LARGEST:g} and {LARGEST:g}; scale it"


Function = Callable[..., Any]


@dataclass(frozen=True)
class FunctionKind:
    """The kind of function that a pool runs. Both fields are pickled by name, so they must be module-level functions."""

    find: Callable[[str, Mapping[str, Any]], Function]
    """(name, options) → function with its options bound. Raises ConfigError if the function does not exist."""
    check: Callable[[Any, tuple[Any, ...]], tuple[Any, dict[str, float]]]
    """(result, arguments of the call) → score and metrics as plain numbers. Raises ValueError if the result is invalid."""


@dataclass(frozen=True)
class Start:
    """First message to a worker: the functions' names and options, and the maximum number of seconds per call."""

    kind: FunctionKind
    functions: Sequence[tuple[str, Mapping[str, Any]]]
    time_limit: float


@dataclass(frozen=True)
class WorkerTask:
    """Calls to one function, which is given by its index. `items` is a list of (index of the call, arguments)."""

    function: int
    items: list[tuple[int, tuple[Any, ...]]]


@dataclass(frozen=True)
class Trait:
    """Properties of a function that the scheduler needs to know."""

    is_async: bool
    score_on_timeout: float | None
    time_limit: float
    """Maximum number of seconds that one call may take."""
    concurrent_calls: int
    """Maximum number of concurrent calls in one worker; used only for async functions."""
    is_batched: bool
    """Whether one call scores several completions."""


@dataclass(frozen=True)
class Ready:
    traits: list[Trait]


@dataclass(frozen=True)
class Begun:
    """Message that an async call has begun. Plain calls run one after another and do not send this message."""

    call: int


@dataclass(frozen=True)
class ScoredCall:
    call: int
    score: Any
    """Score, as returned by `FunctionKind.check`."""
    metrics: dict[str, float]
    seconds: float = 0.0
    """Duration of the call in seconds."""


@dataclass(frozen=True)
class Failed:
    """Message that a call has failed. `text` says what it raised or returned, or that an async call exceeded its time limit."""

    call: int
    text: str


Send = Callable[[Begun | ScoredCall | Failed], None]


def main(descriptor: int) -> None:
    """Serve calls until the other end of the pipe closes."""
    os.set_inheritable(descriptor, False)  # processes that a reward function starts must not hold the pipe open
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # the signal is sent before a hanging worker is killed
    threading.Thread(target=_exit_with_parent, args=(os.getppid(),), daemon=True).start()
    with Connection(descriptor) as connection, asyncio.Runner() as runner:
        os.register_at_fork(after_in_child=connection.close)  # a forked copy of this process must not send messages
        try:
            start: Start = connection.recv()
            restore_script_folders()
            functions = [start.kind.find(name, options) for name, options in start.functions]
            connection.send(Ready([_get_trait(function, start.time_limit) for function in functions]))
            while True:
                job: WorkerTask = connection.recv()
                _run(job, functions[job.function], start, runner, connection.send)
        except ConfigError as error:
            connection.send(ConfigError(str(error)))  # one of the functions cannot be loaded
        except (EOFError, OSError):
            return


def _exit_with_parent(parent: int) -> None:
    """End this process once the trainer has exited, even if a function hangs."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _get_trait(function: Function, time_limit: float) -> Trait:
    """Return a function's properties. `time_limit` applies unless the function has `call_limits`, as `judge` does."""
    inner, options = (function.func, function.keywords) if isinstance(function, functools.partial) else (function, {})
    is_async = inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(type(inner).__call__)
    score = getattr(inner, "score_on_timeout", None)
    limits = getattr(inner, "call_limits", None)
    seconds, calls = limits(**options) if limits is not None else (time_limit, CONCURRENT_CALLS)
    is_batched = getattr(inner, "is_batched", False)
    return Trait(is_async, None if is_async or score is None else float(score), seconds, calls, is_batched)


def _run(job: WorkerTask, function: Function, start: Start, runner: asyncio.Runner, send: Send) -> None:
    trait = _get_trait(function, start.time_limit)
    if trait.is_async:
        runner.run(_call_all(function, job.items, send, start.kind, trait))
        return
    for call, arguments in job.items:
        started = time.perf_counter()
        try:
            result = function(*arguments)
            if inspect.isawaitable(result):
                result = runner.run(_wait(result))
            answer = _check_result(call, result, arguments, start.kind, time.perf_counter() - started)
            if isinstance(answer, ScoredCall) and trait.score_on_timeout is not None:
                answer = replace(answer, metrics={"timeouts": 0.0} | answer.metrics)
        except BaseException as error:  # noqa: BLE001  user code may call sys.exit; the trainer raises the error
            answer = Failed(call, describe_error(error))
        send(answer)


async def _wait(result: Any) -> Any:
    return await result


async def _call_all(
    function: Function, items: Sequence[tuple[int, tuple[Any, ...]]], send: Send, kind: FunctionKind, trait: Trait
) -> None:
    gate = asyncio.Semaphore(trait.concurrent_calls)

    async def run_call(call: int, arguments: tuple[Any, ...]) -> None:
        async with gate:
            send(Begun(call))
            send(await _answer(call, function(*arguments), arguments, kind, trait.time_limit))

    await asyncio.gather(*(run_call(*item) for item in items))


async def _answer(
    call: int, running: Coroutine[Any, Any, Any], arguments: tuple[Any, ...], kind: FunctionKind, time_limit: float
) -> ScoredCall | Failed:
    scope, started = asyncio.timeout(time_limit), time.perf_counter()
    try:
        async with scope:
            result = await running
        return _check_result(call, result, arguments, kind, time.perf_counter() - started)
    except BaseException as error:  # noqa: BLE001  user code may call sys.exit; the trainer raises the error
        # The function itself may raise TimeoutError if one of its requests takes too long.
        return Failed(call, describe_timeout(time_limit) if scope.expired() else describe_error(error))


def describe_timeout(time_limit: float) -> str:
    return f"returned no result within the time limit of {time_limit:g} s"


def describe_error(error: BaseException) -> str:
    """Describe an error as `raised ValueError: …`, followed by the indented traceback, starting at the user's function.

    For an error about the row (DataError), return only its message.
    """
    if isinstance(error, DataError):
        return str(error)
    user_traceback = error.__traceback__
    while user_traceback is not None and user_traceback.tb_frame.f_code.co_filename == __file__:
        user_traceback = user_traceback.tb_next
    formatted = traceback.TracebackException(type(error), error, user_traceback)
    lines = "".join(line[:ERROR_CHARACTERS] for line in formatted.format()).rstrip()
    return (
        f"raised {type(error).__name__}: {str(formatted)[:ERROR_CHARACTERS].rstrip()}\n{textwrap.indent(lines, '  ')}"
    )


def _check_result(
    call: int, result: Any, arguments: tuple[Any, ...], kind: FunctionKind, seconds: float
) -> ScoredCall | Failed:
    try:
        return ScoredCall(call, *kind.check(result, arguments), seconds)
    except ValueError as error:
        return Failed(call, str(error))


def check_score(result: Any, arguments: tuple[Any, ...]) -> tuple[float | None | list[float | None], dict[str, float]]:
    """Check a reward function's result and return (score, metrics) as plain numbers; used as `FunctionKind.check`.

    The function may return a number, None if the reward does not apply to the sample, (number, dict of metrics), or, as in verl,
    a dict with `score` whose other numbers are metrics. A batched call, whose first argument is a list, returns a number or None
    for each completion.
    """
    if isinstance(arguments[0], str):
        return _check_single(result)
    values = result.tolist() if hasattr(result, "tolist") else result
    if not isinstance(values, list | tuple) or len(values) != len(arguments[0]):
        count = f"{len(values)} values" if isinstance(values, list | tuple) else describe_value(result)
        raise ValueError(
            f"returned {count} for {len(arguments[0])} completions; it must return a list with a number or None for each"
        )
    return [None if value is None else _check_number(value, value) for value in values], {}


def _check_single(result: Any) -> tuple[float | None, dict[str, float]]:
    score, metrics = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
    if isinstance(result, Mapping) and "score" in result:
        score = result["score"]
        metrics = {key: value for key, value in result.items() if key != "score" and isinstance(to_plain(value), Real)}
    if not isinstance(metrics, Mapping):
        raise ValueError(f"returned {describe_value(metrics)} as metrics; they must be a dict of names and numbers")
    for name, value in metrics.items():
        if not isinstance(name, str) or not _is_number(value):
            raise ValueError(
                f"returned the metric {name!r} = {describe_value(value)}; metric names must be strings, and metric "
                "values must be finite numbers"
            )
    number = None if score is None else _check_number(score, result)
    return number, {str(name): float(to_plain(value)) for name, value in metrics.items()}


def _check_number(score: Any, result: Any) -> float:
    """Return the score as a plain number. Raise ValueError, quoting the result, if it is not a number within bounds."""
    if not _is_number(score):
        raise ValueError(
            f"returned {describe_value(result)}; it must return a finite number, None, (number, dict of metrics), or a dict "
            "with score"
        )
    if abs(to_plain(score)) > LARGEST:
        raise ValueError(f"returned {describe_value(result)}; {BOUND}")
    return float(to_plain(score))


def to_plain(value: Any) -> Any:
    """Convert a NumPy scalar, or an array or tensor without dimensions, to a Python number; return anything else unchanged."""
    return value.item() if getattr(value, "ndim", None) == 0 else value


def _is_number(value: Any) -> bool:
    return isinstance(number := to_plain(value), Real) and math.isfinite(number)


def describe_value(value: Any) -> str:
    text = repr(value)
    return f"{text[:200]}… ({type(value).__name__})" if len(text) > 200 else f"{text} ({type(value).__name__})"


def build_command(descriptor: int) -> list[str]:
    """Return the command line for a worker that communicates through `descriptor` and has this process's import path."""
    code = (
        f"import sys; sys.path[:] = {[path or os.getcwd() for path in sys.path]!r}; "
        f"from {__name__} import main; main({descriptor})"
    )
    return [sys.executable, "-c", code]
