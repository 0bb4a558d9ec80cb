"""The work of a reward server: requests that wait and are scored one after the other, and scores until they are asked for."""

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
"""Jobs of which the scores, a few numbers, are kept."""
KEPT_BYTES = 256 * 2**20
"""Largest size of all those scores together, as JSON."""
LONGEST_FAILURE = 64_000
"""Characters of a function's error."""


class Decoder(Protocol):
    def decode(self, latents: Tensor) -> Tensor: ...


@dataclass
class Job:
    """An enqueued request, and what came of it: `answers[function]` are status and JSON of the answer to a pull."""

    uuid: str
    request: ScoringRequest | None
    """None once it was scored."""
    names: Sequence[str]
    """The functions that it asks for."""
    num_bytes: int
    answers: dict[str, tuple[int, bytes]] = field(default_factory=dict)


class Jobs:
    """Requests in the order in which they came. A full queue takes no more, so nothing that was taken is dropped.

    Args:
        most_waiting: requests that wait or are being scored, at most.
        most_bytes: of their bodies together, and of what has come of those being received.
    """

    def __init__(self, most_waiting: int, most_bytes: int) -> None:
        self.most_waiting, self.most_bytes = most_waiting, most_bytes
        self._changed = threading.Condition()
        self._waiting: deque[Job] = deque()
        self._known: OrderedDict[str, Job] = OrderedDict()
        self._count, self._bytes, self._kept_bytes = 0, 0, 0

    def has_room(self, num_bytes: int) -> bool:
        """Return whether one more of this size would be taken now."""
        with self._changed:
            return self._count < self.most_waiting and self._bytes + num_bytes <= self.most_bytes

    def reserve(self, num_bytes: int) -> bool:
        """Reserve room for this much of a body; return whether there was enough."""
        with self._changed:
            free = self._bytes + num_bytes <= self.most_bytes
            if free:
                self._bytes += num_bytes
            return free

    def release(self, num_bytes: int) -> None:
        with self._changed:
            self._bytes -= num_bytes

    def add(self, request: ScoringRequest, names: Sequence[str], num_bytes: int) -> str | None:
        """The job's name; None if too many wait. Its bytes are held."""
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
        """The answer to a pull; it is dropped if there is one already and `replace` is false."""
        status, content = answer
        data = json.dumps(content).encode()
        with self._changed:
            if job.uuid not in self._known or (name in job.answers and not replace):
                return
            self._kept_bytes += len(data) - len(job.answers.get(name, (0, b""))[1])
            job.answers[name] = status, data
            self._drop_old()

    def finish(self, job: Job) -> None:
        """Its room is free again."""
        with self._changed:
            job.request = None
            self._count, self._bytes = self._count - 1, self._bytes - job.num_bytes
            self._drop_old()

    def _drop_old(self) -> None:
        """Drop the scores of the oldest jobs if there are too many. Those of the last one stay, however long."""
        scored = [name for name, job in self._known.items() if job.request is None]
        for name in scored[:-1]:
            if len(self._known) <= KEPT and self._kept_bytes <= KEPT_BYTES:
                break
            self._kept_bytes -= sum(len(data) for _, data in self._known.pop(name).answers.values())

    def find(self, name: str) -> Job | None:
        with self._changed:
            return self._known.get(name)

    def take(self) -> Job:
        """The oldest that waits; waits for one."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._waiting))
            return self._waiting.popleft()


def score_jobs(jobs: Jobs, functions: Mapping[str, ClipReward], decoder: Decoder | None) -> None:
    """Score one job after the other, for ever; run it in a daemon thread."""
    while True:
        job = jobs.take()
        try:
            score_job(jobs, job, functions, decoder)
        except BaseException as error:  # noqa: BLE001  such as memory that does not suffice; the server goes on
            log.error("job %s failed", job.uuid, exc_info=error)
            for name in job.names:
                jobs.keep(job, name, build_failure(name, error), replace=False)
        jobs.finish(job)


def score_job(jobs: Jobs, job: Job, functions: Mapping[str, ClipReward], decoder: Decoder | None) -> None:
    """Scores from a worker elsewhere have precedence."""
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
        except BaseException as error:  # noqa: BLE001  somebody else's code, which may exit; the answer says so
            log.error('job %s, reward "%s" failed', job.uuid, name, exc_info=error)
            jobs.keep(job, name, build_failure(name, error), replace=False)
        else:
            info = describe_input(job.request)
            durations = {"duration": f"{time.monotonic() - began:.2f}", "decoded_duration": f"{decoded:.2f}"}
            answer = {"scores": scores, "input_info": info, **durations, "type": name}
            jobs.keep(job, name, (200, answer), replace=False)


def build_failure(name: str, error: BaseException) -> tuple[int, dict[str, Any]]:
    """The answer to a pull. An error's own text may fail as well, which `traceback` bears."""
    text = "".join(traceback.format_exception_only(error)).strip()
    return 500, {"message": f'reward "{name}" failed: {text[:LONGEST_FAILURE]}'}


def select_functions(request: ScoringRequest, functions: Mapping[str, ClipReward]) -> list[str]:
    """Return the names of the functions that a request asks for. ValueError if it names none, or one that is not served."""
    names = [name for name, weight in request.reward_fn.items() if weight > 0]
    unknown = [name for name in names if name not in functions]
    if unknown or not names:
        problem = (
            f"no reward function {unknown[0]!r:.80}" if unknown else "reward_fn names no function of positive weight"
        )
        raise ValueError(f"{problem}; served are {', '.join(functions)}")
    return names


def to_pixels(request: ScoringRequest, decoder: Decoder | None) -> Tensor:
    """float32 `[B, 3, T, H, W]` in 0..1."""
    array = request.array
    if request.media_type == "latent":
        assert decoder is not None  # otherwise the request was not taken
        latents = decode_bfloat16(array) if array.dtype == np.uint8 else array.astype(np.float32)
        return decoder.decode(torch.from_numpy(np.ascontiguousarray(latents))).float().cpu()
    pixels = torch.from_numpy(array.astype(np.float32)).div_(255)
    return pixels.permute(0, 3, 1, 2)[:, :, None] if request.media_type == "image" else pixels


def to_rows(job: str, request: ScoringRequest) -> list[WorldRow]:
    """Return what functions get to know of the clips: `meta` has `fps`, and what else the request says of each clip or of all."""
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
    """A function's result as the protocol's scores: `{name: [B]}`, or its own keys where it returns a dict of them."""
    scores_by_name = result if isinstance(result, Mapping) and result else {name: result}
    return {str(key): check_scores(values, ((), samples))[0] for key, values in scores_by_name.items()}


def describe_input(request: ScoringRequest) -> dict[str, Any]:
    array = request.array
    lowest, highest = (f"{float(value):.3f}" for value in (array.min(), array.max()))
    facts = {"shape": list(array.shape), "dtype": f"torch.{array.dtype}", "min": lowest, "max": highest}
    return {**facts, "video_infos": list(request.video_infos)}


def find_functions(name: str) -> dict[str, ClipReward]:
    """Find the reward functions in a file or module, by name; with `:attr` behind it that one only.

    Those are served that can be called as fn(clips, samples), are written there and whose name begins with no underscore.

    Raises:
        ConfigError: the file has no reward function, or does not import.
    """
    advice = "Name a .py file or an installed module with functions fn(clips, samples)"
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
        raise ConfigError(f"reward-serve {name}: no function there can be called as fn(clips, samples)")
    return functions


def is_reward(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind([], [])
    except TypeError:
        return False
    return True
