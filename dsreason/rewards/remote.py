"""Rewards from a server over HTTP.

    POST <url>  {"prompts": [str], "completions": [str], "answers": [str | null], "media": [[part]], "meta": [{…}]}
    200         {"scores": {"<name>": [float]}}

Each list has one element per completion. `media` holds the sample's image and video parts, with the paths that the trainer uses.
`meta` holds the sample's `id`, `options`, `other_answers` (if any) and everything in its own `meta`. The token is sent only in
the `Authorization` header.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Annotated, Any, NoReturn

from pydantic import BaseModel, FailFast, Field, ValidationError

from dsreason.config.schema_grpo import RemoteRewardConfig
from dsreason.data.messages import get_text, list_media_parts, prompt_messages
from dsreason.data.types import Sample
from dsreason.errors import ConfigError, RewardError
from dsreason.media.frames import expand_part
from dsreason.problems import describe_first_problem
from dsreason.rewards.http import Refused, Retry, RewardServer, read_variable
from dsreason.rewards.worker import LARGEST
from dsreason.stopping import pause

Name = Annotated[str, Field(min_length=1, max_length=100, pattern=r"^[^\x00-\x1f\x7f-\x9f]+$")]
"""Name of a score, which is also used as the name of a metric."""


class ScoresAnswer(BaseModel):
    scores: dict[Name, Any] = Field(min_length=1, max_length=1000)


class ScoreEntry(BaseModel):
    """One entry in `scores`. It is validated only up to the first error, because pydantic would otherwise keep all errors
    in a long response in memory."""

    scores: dict[
        str,
        Annotated[list[Annotated[float, Field(strict=True, allow_inf_nan=False, ge=-LARGEST, le=LARGEST)]], FailFast()],
    ]


class RemoteReward:
    """Rewards from a server. The token is read from the environment, as are all settings that the configuration leaves unset.

    The variables are `REMOTE_REWARD_URL` (or `…_ENQUEUE_URL`), `…_TOKEN` and `…_ENQUEUE_TIMEOUT_S`, or the same names with the
    prefix `WFM_REWARD_`.

    Args:
        pause: seconds before the first retry; doubled before each further retry.
    """

    def __init__(self, config: RemoteRewardConfig, *, pause: float = 1.0) -> None:
        self.config, self.pause = config, pause
        url = config.url or read_variable("URL") or read_variable("ENQUEUE_URL")
        self.time_limit = config.time_limit or _parse_seconds(read_variable("ENQUEUE_TIMEOUT_S") or "60")
        if not url:
            raise ConfigError(
                "a remote reward needs the server's URL: set REMOTE_REWARD_URL (or WFM_REWARD_URL) in the environment, "
                "or reward.remote.url"
            )
        self.server = RewardServer(url, read_variable("TOKEN"))

    def score(
        self, completions: Sequence[str], samples: Sequence[Sample], names: Sequence[str] = ()
    ) -> dict[str, list[float]]:
        """Request scores for each completion as an answer to its sample. Return them by name; those in `names` are required."""
        pairs = list(zip(completions, samples, strict=True))
        batches = [
            pairs[first : first + self.config.batch_size] for first in range(0, len(pairs), self.config.batch_size)
        ]
        stop = threading.Event()
        with ThreadPoolExecutor(self.config.concurrency) as executor:
            running = [executor.submit(self._score_batch, batch, names, stop) for batch in batches]
            try:
                done, _ = wait(running, return_when=FIRST_EXCEPTION)
                for future in done:
                    future.result()  # raises the first failure
            finally:
                stop.set()  # the other threads end after their current request
                executor.shutdown(wait=False, cancel_futures=True)
        return self._join([future.result() for future in running])

    def _join(self, answers: Sequence[dict[str, list[float]]]) -> dict[str, list[float]]:
        for answer in answers:
            if answer.keys() != answers[0].keys():
                first, other = self._list_names(answers[0]), self._list_names(answer)
                raise RewardError(
                    f"reward server {self.server.place}: one batch has the scores {first}, but another has {other}"
                )
        return {
            name: [score for answer in answers for score in answer[name]] for name in (answers[0] if answers else ())
        }

    def _score_batch(
        self, batch: Sequence[tuple[str, Sample]], names: Sequence[str], stop: threading.Event
    ) -> dict[str, list[float]]:
        ids = [sample.id for _, sample in batch]
        body = _build_body(batch)
        for attempt in range(self.config.retries + 1):
            try:
                _, answer = self.server.post(body, {"Content-Type": "application/json"}, self.time_limit)
                return self._parse(answer, ids, names)
            except Refused as error:
                self._fail(ids, str(error))
            except Retry as error:
                if attempt == self.config.retries:
                    self._fail(ids, f"{error} ({attempt + 1} attempts)", cause=error)
                if pause(error.pause(self.pause, attempt), stop):
                    self._fail(ids, "cancelled because another request failed", cause=error)
        raise AssertionError("unreachable")

    def _parse(self, answer: bytes, ids: Sequence[str], names: Sequence[str]) -> dict[str, list[float]]:
        scores: dict[str, list[float]] = {}
        try:
            for name, values in ScoresAnswer.model_validate_json(answer).scores.items():
                scores |= ScoreEntry(scores={name: values}).scores
        except ValidationError as error:
            path = error.errors()[0]["loc"]
            if len(path) == 3 and isinstance(path[2], int) and path[2] < len(ids):  # scores, name, index
                ids = [ids[int(path[2])]]
            problem = self.server.quote(describe_first_problem(error, self.server.mask_token))
            queue = "; cosmos-rl's queue for generated media, which delivers scores later, is not supported"
            self._fail(
                ids,
                f'the response is not {{"scores": {{name: [number]}}}}: {problem} in '
                f"{self.server.quote(answer.decode(errors='replace'))}{queue if b'uuid' in answer else ''}",
            )
        missing = [name for name in names if name not in scores]
        if missing:
            self._fail(ids, f"the response has no score {', '.join(missing)}; it has {self._list_names(scores)}")
        for name, values in scores.items():
            if len(values) != len(ids):
                self._fail(
                    ids,
                    f'score "{self.server.quote(name)}" has {len(values)} numbers, but there are {len(ids)} completions',
                )
        return scores

    def _list_names(self, names: Iterable[str]) -> str:
        return self.server.quote(", ".join(sorted(names)))

    def _fail(self, ids: Sequence[str], text: str, *, cause: Exception | None = None) -> NoReturn:
        subject = f'sample "{ids[0]}"' if len(ids) == 1 else f'samples "{ids[0]}" to "{ids[-1]}"'
        raise RewardError(f"reward server {self.server.place}, {subject}: {text}") from cause


def _parse_seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not seconds > 0 or math.isinf(seconds):
        raise ConfigError(f"REMOTE_REWARD_ENQUEUE_TIMEOUT_S must be a positive number of seconds; got {text!r}")
    return seconds


def _build_body(batch: Sequence[tuple[str, Sample]]) -> bytes:
    body: dict[str, list[Any]] = {"prompts": [], "completions": [], "answers": [], "media": [], "meta": []}
    for completion, sample in batch:
        prompt = prompt_messages(sample)
        text = "\n".join(filter(None, map(get_text, prompt)))
        entry = [text, completion, sample.answer, list(map(expand_part, list_media_parts(prompt)))]
        meta = {"id": sample.id, "options": sample.options, **sample.meta}
        if sample.other_answers:
            meta["other_answers"] = sample.other_answers
        try:
            json.dumps([entry, meta], allow_nan=False)
        except (TypeError, ValueError) as error:
            raise RewardError(f'sample "{sample.id}": its media or meta cannot be encoded as JSON: {error}') from error
        for values, value in zip(body.values(), [*entry, meta], strict=True):
            values.append(value)
    return json.dumps(body).encode()
