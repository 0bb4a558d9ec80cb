"""Rewards from a server over HTTP.

    POST <url>  {"prompts": [str], "completions": [str], "answers": [str | null], "media": [[part]], "meta": [{…}]}
    200         {"scores": {"<name>": [float]}}

One entry for each completion. `media` are the sample's image and video parts, paths as the trainer sees them; `meta` has the
sample's `id`, its `options` and its own `meta`. The token goes into the `Authorization` header and nowhere else.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, NoReturn
from urllib.parse import urlsplit

from pydantic import BaseModel, FailFast, Field, ValidationError

from dsreason.config.schema_grpo import RemoteRewardConfig
from dsreason.data.chat import prompt_messages
from dsreason.data.messages import media_parts, text_of
from dsreason.data.types import Sample
from dsreason.errors import ConfigError, RewardError
from dsreason.problems import first_problem
from dsreason.secrets import quiet_libraries

if TYPE_CHECKING:
    import httpx2

LONGEST_PAUSE = 30.0
MAX_ANSWER_BYTES = 64 * 2**20
PREFIXES = ("REMOTE_REWARD_", "WFM_REWARD_")
"""cosmos-rl's names of the environment variables, the new and the old ones."""


class Answer(BaseModel):
    scores: dict[str, Any] = Field(min_length=1)


class Score(BaseModel):
    """One entry of `scores`. pydantic would collect all errors of a long answer in memory; here it stops at the first."""

    scores: dict[str, Annotated[list[Annotated[float, Field(strict=True, allow_inf_nan=False)]], FailFast()]]


class _Retry(Exception):
    """A failure that may pass: no connection, too slow, or a status that says so."""

    def __init__(self, text: str, wait: float = 0.0) -> None:
        super().__init__(text)
        self.wait = wait


class RemoteReward:
    """A reward server. What the configuration does not say comes from the environment, the token from there alone.

    Read are `REMOTE_REWARD_URL` (or `_ENQUEUE_URL`), `_TOKEN` and `_ENQUEUE_TIMEOUT_S`, or the same with `WFM_REWARD_`.

    Args:
        pause: seconds before the first retry; doubled for every further one.
    """

    def __init__(self, config: RemoteRewardConfig, *, pause: float = 1.0) -> None:
        self.config, self.pause = config, pause
        self.url, self.token = config.url or _variable("URL") or _variable("ENQUEUE_URL") or "", _variable("TOKEN")
        self.time_limit = config.time_limit or _seconds(_variable("ENQUEUE_TIMEOUT_S") or "60")
        if not self.url:
            raise ConfigError(
                "a remote reward needs the server's address: set REMOTE_REWARD_URL (or WFM_REWARD_URL) in the environment, "
                "or reward.remote.url"
            )
        if urlsplit(self.url).scheme not in ("http", "https") or not urlsplit(self.url).hostname:
            raise ConfigError(f"the reward server's address must be http://host… or https://host…: {self.place}")
        if "@" in urlsplit(self.url).netloc:
            raise ConfigError(f"no user and password in the reward server's address; use a token: {self.place}")
        if self.token is not None and not (self.token.isascii() and self.token.isprintable()):
            raise ConfigError(
                "the reward server's token has characters that an HTTP header cannot hold (a line break?)"
            )

    @property
    def place(self) -> str:
        """The address without user, password and query, which may hold secrets."""
        parts = urlsplit(self.url)
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"

    def score(
        self, completions: Sequence[str], samples: Sequence[Sample], names: Sequence[str] = ()
    ) -> dict[str, list[float]]:
        """Every score that the server gives, `names` at least, for `completions[i]` as an answer to `samples[i]`."""
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
                    future.result()  # raises what went wrong first
            finally:
                stop.set()  # the others end after the request that they are in
                executor.shutdown(wait=False, cancel_futures=True)
        return self._joined([future.result() for future in running])

    def _joined(self, answers: Sequence[dict[str, list[float]]]) -> dict[str, list[float]]:
        for answer in answers:
            if answer.keys() != answers[0].keys():
                one, other = self._listed(answers[0]), self._listed(answer)
                raise RewardError(f"reward server {self.place}: one batch has the scores {one}, another {other}")
        return {
            name: [score for answer in answers for score in answer[name]] for name in (answers[0] if answers else ())
        }

    @cached_property
    def _client(self) -> httpx2.Client:
        """Redirects are not followed: they would carry the token to another address."""
        import httpx2  # a fifth of a second, for those who need it

        quiet_libraries()  # its log lines hold the whole address
        token = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        return httpx2.Client(headers={"Content-Type": "application/json", **token}, timeout=self.time_limit)

    def _score_batch(
        self, batch: Sequence[tuple[str, Sample]], names: Sequence[str], stop: threading.Event
    ) -> dict[str, list[float]]:
        ids = [sample.id for _, sample in batch]
        body = _body(batch)
        for attempt in range(self.config.retries + 1):
            try:
                return self._parsed(self._post(body, ids), ids, names)
            except _Retry as error:
                pause = min(max(self.pause * 2**attempt, error.wait), LONGEST_PAUSE)
                if attempt == self.config.retries:
                    self._fail(ids, f"{error} ({attempt + 1} attempts)", cause=error)
                if stop.wait(pause):
                    self._fail(ids, "cancelled, since another request failed", cause=error)
        raise AssertionError("unreachable")

    def _post(self, body: bytes, ids: Sequence[str]) -> bytes:
        import httpx2

        deadline = time.monotonic() + self.time_limit
        try:
            with self._client.stream("POST", self.url, content=body) as response:
                answer = self._read(response, deadline)
        except (httpx2.TimeoutException, TimeoutError):
            raise _Retry(f"no answer within {self.time_limit:g} s") from None
        except (httpx2.RequestError, httpx2.InvalidURL) as error:
            raise _Retry(f"{type(error).__name__}: {error}") from None
        if not response.is_success:
            self._raise_for_status(response, answer, ids)
        return answer

    def _read(self, response: httpx2.Response, deadline: float) -> bytes:
        answer = bytearray()
        for part in response.iter_bytes():
            answer += part
            if len(answer) > MAX_ANSWER_BYTES:
                raise RewardError(f"reward server {self.place}: the response is longer than {MAX_ANSWER_BYTES} bytes")
            if time.monotonic() > deadline:
                raise TimeoutError
        return bytes(answer)

    def _raise_for_status(self, response: httpx2.Response, said: bytes, ids: Sequence[str]) -> NoReturn:
        status = response.status_code
        text = f"status {status} {self._quoted(response.reason_phrase)}"
        if said:
            text += f" ({self._quoted(said.decode(errors='replace').strip())})"
        if status in (408, 425, 429) or status >= 500:
            after = response.headers.get("Retry-After", "")
            raise _Retry(text, wait=float(after) if after.isdecimal() else 0.0)
        if status in (401, 403):
            given = "the server rejects the token" if self.token else "the server requires a token"
            text += f": {given}, check REMOTE_REWARD_TOKEN"
        elif status < 400:
            text += ": redirects are not followed, since they would carry the token along; set the final address"
        self._fail(ids, text)

    def _parsed(self, answer: bytes, ids: Sequence[str], names: Sequence[str]) -> dict[str, list[float]]:
        scores: dict[str, list[float]] = {}
        try:
            for name, values in Answer.model_validate_json(answer).scores.items():
                scores |= Score(scores={name: values}).scores
        except ValidationError as error:
            place = error.errors()[0]["loc"]
            if len(place) == 3 and int(place[2]) < len(ids):  # scores, name, number
                ids = [ids[int(place[2])]]
            problem = self._quoted(first_problem(error, self._without_token))
            queue = "; cosmos-rl's queue for generated media, where scores are fetched later, is not supported"
            self._fail(
                ids,
                f'the response is not {{"scores": {{name: [number]}}}}: {problem} in '
                f"{self._quoted(answer.decode(errors='replace'))}{queue if b'uuid' in answer else ''}",
            )
        missing = [name for name in names if name not in scores]
        if missing:
            self._fail(ids, f"the response has no score {', '.join(missing)}; it has {self._listed(scores)}")
        for name, values in scores.items():
            if len(values) != len(ids):
                self._fail(ids, f'score "{self._quoted(name)}": {len(values)} numbers for {len(ids)} completions')
        return scores

    def _listed(self, names: Iterable[str]) -> str:
        return self._quoted(", ".join(sorted(names)))

    def _quoted(self, text: str) -> str:
        """The beginning of what the server said, without the token, should it be in there."""
        clean = self._without_token(text)
        return clean if len(clean) <= 200 else f"{clean[:200]}…"

    def _without_token(self, text: str) -> str:
        return text.replace(self.token, "***") if self.token else text

    def _fail(self, ids: Sequence[str], text: str, *, cause: Exception | None = None) -> NoReturn:
        of = f'sample "{ids[0]}"' if len(ids) == 1 else f'samples "{ids[0]}" to "{ids[-1]}"'
        raise RewardError(f"reward server {self.place}, {of}: {text}") from cause


def _variable(name: str) -> str | None:
    new, old = (os.environ.get(prefix + name, "").strip() or None for prefix in PREFIXES)
    if new is not None and old is not None and new != old:
        raise ConfigError(f"{PREFIXES[0]}{name} and {PREFIXES[1]}{name} are set and differ; unset one")
    return new or old


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not seconds > 0 or math.isinf(seconds):
        raise ConfigError(f"REMOTE_REWARD_ENQUEUE_TIMEOUT_S is {text!r}; it must be a number of seconds")
    return seconds


def _body(batch: Sequence[tuple[str, Sample]]) -> bytes:
    found: dict[str, list[Any]] = {"prompts": [], "completions": [], "answers": [], "media": [], "meta": []}
    for completion, sample in batch:
        prompt = prompt_messages(sample)
        text = "\n".join(filter(None, map(text_of, prompt)))
        entry = [text, completion, sample.answer, media_parts(prompt)]
        meta = {"id": sample.id, "options": sample.options, **sample.meta}
        try:
            json.dumps([entry, meta], allow_nan=False)
        except (TypeError, ValueError) as error:
            raise RewardError(f'sample "{sample.id}": its media or meta cannot be sent as JSON: {error}') from error
        for values, value in zip(found.values(), [*entry, meta], strict=True):
            values.append(value)
    return json.dumps(found).encode()
