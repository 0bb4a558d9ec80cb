"""The job queue of the reward server. Jobs are scored one by one, and their scores are stored until they are fetched."""

from __future__ import annotations

import inspect
import json
import logging
import threading
import time
import traceback
import uuid
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from dsreason.errors import ConfigError
from dsreason.rewards.functions import bind_options
from dsreason.user_code import find_code
from dsreason.world.rewards.functions import BUILT_IN, ClipReward, check_scores
from dsreason.world.rewards.wire import ScoringRequest, decode_bfloat16
from dsreason.world.types import WorldRow

log = logging.getLogger(__name__)

KEPT = 4096
"""Maximum number of jobs whose scores are kept."""
KEPT_BYTES = 256 * 2**20
"""Maximum total size of the stored scores in bytes, as JSON."""
LONGEST_FAILURE = 64_000
"""Maximum number of characters to store of a function's error message."""


class Decoder(Protocol):
    def decode(self, latents: Tensor) -> Tensor: ...


@dataclass
class Job:
    """An enqueued request and its results: `answers[function]` is the HTTP status and JSON body of the response to a pull."""

    uuid: str
    request: ScoringRequest | None
    """The request; None after it is scored."""
    names: Sequence[str]
    """Names of the requested functions."""
    num_bytes: int
    answers: dict[str, tuple[int, bytes]] = field(default_factory=dict)


class Jobs:
    """A queue of requests in order of arrival. It rejects requests when it is full, so no accepted request is dropped.

    Args:
        most_waiting: maximum number of requests that are waiting or being scored.
        most_bytes: maximum total size of these requests' bodies, including the received parts of incomplete bodies.
    """

    def __init__(self, most_waiting: int, most_bytes: int) -> None:
        self.most_waiting, self.most_bytes = most_waiting, most_bytes
        self._changed = threading.Condition()
        self._waiting: deque[Job] = deque()
        self._known: OrderedDict[str, Job] = OrderedDict()
        self._count, self._bytes, self._kept_bytes = 0, 0, 0

    def has_room(self, num_bytes: int) -> bool:
        """Return whether the queue would accept another request of this size now."""
        with self._changed:
            return self._count < self.most_waiting and self._bytes + num_bytes <= self.most_bytes

    def reserve(self, num_bytes: int) -> bool:
        """Reserve memory for part of a request's body; return whether enough was available."""
        with self._changed:
            has_space = self._bytes + num_bytes <= self.most_bytes
            if has_space:
                self._bytes += num_bytes
            return has_space

    def release(self, num_bytes: int) -> None:
        with self._changed:
            self._bytes -= num_bytes

    def add(self, request: ScoringRequest, names: Sequence[str], num_bytes: int) -> str | None:
        """Add a job whose bytes have already been reserved; return its uuid, or None if the queue is full."""
        job = Job(str(uuid.uuid4()), request, names, num_bytes)
        with self._changed:
            if self._count >= self.most_waiting:
                return None
            self._count += 1
            self._waiting.append(job)
            self._known[job.uuid] = job
            self._drop_old()
            self._changed.notify()
        return job.uuid

    def keep(self, job: Job, name: str, answer: tuple[int, dict[str, Any]], replace: bool = True) -> None:
        """Store the response to a pull; if one is already stored, overwrite it only if `replace` is true."""
        status, content = answer
        data = json.dumps(content).encode()
        with self._changed:
            if job.uuid not in self._known or (name in job.answers and not replace):
                return
            self._kept_bytes += len(data) - len(job.answers.get(name, (0, b""))[1])
            job.answers[name] = status, data
            self._drop_old()

    def finish(self, job: Job) -> None:
        """Mark a job as scored, and release its slot and bytes in the queue."""
        with self._changed:
            job.request = None
            self._count, self._bytes = self._count - 1, self._bytes - job.num_bytes
            self._drop_old()

    def _drop_old(self) -> None:
        """Drop the oldest scored jobs while the limits are exceeded, but never the newest scored job."""
        scored = [name for name, job in self._known.items() if job.request is None]
        for name in scored[:-1]:
            if len(self._known) <= KEPT and self._kept_bytes <= KEPT_BYTES:
                break
            self._kept_bytes -= sum(len(data) for _, data in self._known.pop(name).answers.values())

    def find(self, name: str) -> Job | None:
        with self._changed:
            return self._known.get(name)

    def take(self) -> Job:
        """Wait for a job, remove the oldest one from the queue, and return it."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._waiting))
            return self._waiting.popleft()


def score_jobs(jobs: Jobs, functions: Mapping[str, ClipReward], decoder: Decoder | None) -> None:
    """Score jobs one by one, forever. Run this in a daemon thread."""
    while True:
        job = jobs.take()
        try:
            score_job(jobs, job, functions, decoder)
        except BaseException as error:  # noqa: BLE001  for example, out of memory; the server must keep running
            log.error("job %s failed", job.uuid, exc_info=error)
            for name in job.names:
                jobs.keep(job, name, build_failure(name, error), replace=False)
        jobs.finish(job)


def score_job(jobs: Jobs, job: Job, functions: Mapping[str, ClipReward], decoder: Decoder | None) -> None:
    """Score a job with the functions it requests. Scores that an external worker has pushed take precedence."""
    assert job.request is not None
    began = time.monotonic()
    clips = to_pixels(job.request, decoder)
    decoded = time.monotonic() - began
    samples = to_rows(job.uuid, job.request)
    for name in job.names:
        if name in job.answers:
            continue
        began = time.monotonic()
        try:
            with torch.no_grad():
                scores = name_scores(name, functions[name](clips, samples), samples)
        except BaseException as error:  # noqa: BLE001  user code, which may even exit; the response reports it
            log.error('job %s: reward "%s" failed', job.uuid, name, exc_info=error)
            jobs.keep(job, name, build_failure(name, error), replace=False)
        else:
            info = describe_input(job.request)
            durations = {"duration": f"{time.monotonic() - began:.2f}", "decoded_duration": f"{decoded:.2f}"}
            answer = {"scores": scores, "input_info": info, **durations, "type": name}
            jobs.keep(job, name, (200, answer), replace=False)


def build_failure(name: str, error: BaseException) -> tuple[int, dict[str, Any]]:
    """Build the response to a client that pulls the scores of a failed function.

    `traceback` formats the error, because it also handles errors whose conversion to a string fails.
    """
    text = "".join(traceback.format_exception_only(error)).strip()
    return 500, {"message": f'reward "{name}" failed: {text[:LONGEST_FAILURE]}'}


def select_functions(request: ScoringRequest, functions: Mapping[str, ClipReward]) -> list[str]:
    """Return the names of the requested functions. Raise ValueError if there are none, or one is not served."""
    names = [name for name, weight in request.reward_fn.items() if weight > 0]
    unknown = [name for name in names if name not in functions]
    if unknown or not names:
        problem = (
            f"the reward function {unknown[0]!r:.80} is not served"
            if unknown
            else "reward_fn has no function with a positive weight"
        )
        raise ValueError(f"{problem}; choose from {', '.join(functions)}")
    return names


def to_pixels(request: ScoringRequest, decoder: Decoder | None) -> Tensor:
    """Return the clips as float32 `[B, 3, T, H, W]` in [0, 1]; decode latents if necessary."""
    array = request.array
    if request.media_type == "latent":
        assert decoder is not None  # otherwise the request was rejected
        latents = decode_bfloat16(array) if array.dtype == np.uint8 else array.astype(np.float32)
        return decoder.decode(torch.from_numpy(np.ascontiguousarray(latents))).float().cpu()
    pixels = torch.from_numpy(array.astype(np.float32)).div_(255)
    return pixels.permute(0, 3, 1, 2)[:, :, None] if request.media_type == "image" else pixels


def to_rows(job: str, request: ScoringRequest) -> list[WorldRow]:
    """Return the rows for the reward functions, one per clip.

    `meta` has `fps` and the request's other fields; if a field is a list with one value per clip, each
    row gets its own value.
    """
    rows = []
    for number, (prompt, info) in enumerate(zip(request.prompts, request.video_infos, strict=True)):
        shared = {
            key: value[number] if isinstance(value, list) and len(value) == len(request.prompts) else value
            for key, value in request.extra.items()
        }
        row = WorldRow(f"{job}:{number}", prompt, None, {**shared, **info})
        rows.append(replace(row, meta={**row.meta, "fps": info.get("video_fps", info.get("fps"))}))
    return rows


def name_scores(name: str, result: Any, samples: Sequence[WorldRow]) -> dict[str, list[float]]:
    """Convert a function's result to the protocol's scores: `{name: [B]}`; a returned dict keeps its own keys."""
    scores_by_name = result if isinstance(result, Mapping) and result else {name: result}
    return {str(key): check_scores(values, ((), samples))[0] for key, values in scores_by_name.items()}


def describe_input(request: ScoringRequest) -> dict[str, Any]:
    array = request.array
    lowest, highest = (f"{float(value):.3f}" for value in (array.min(), array.max()))
    facts = {"shape": list(array.shape), "dtype": f"torch.{array.dtype}", "min": lowest, "max": highest}
    return {**facts, "video_infos": list(request.video_infos)}


def find_functions(name: str) -> dict[str, ClipReward]:
    """Return the reward functions in a file or module (name → function), or only `attr` if `name` ends with `:attr`.

    A function counts as a reward if it can be called as fn(clips, samples), is defined in the file or built in, and has a name
    without a leading underscore.

    Raises:
        ConfigError: the file has no reward function, or cannot be imported.
    """
    advice = "Specify a .py file or an installed module with functions fn(clips, samples)"
    code = find_code(name, f"reward-serve {name}", [], advice)
    if not isinstance(code, ModuleType):
        attribute = name.rpartition(":")[2]
        return {attribute: bind_options(code, {}, name, {"clips": None, "samples": []})}
    functions: dict[str, ClipReward] = {
        key: value
        for key, value in vars(code).items()
        if inspect.isfunction(value)
        and not key.startswith("_")
        and (value.__module__ == code.__name__ or value in BUILT_IN.values())
        and is_reward(value)
    }
    if not functions:
        raise ConfigError(f"reward-serve {name}: has no function that can be called as fn(clips, samples)")
    return functions


def is_reward(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind([], [])
    except TypeError:
        return False
    return True
