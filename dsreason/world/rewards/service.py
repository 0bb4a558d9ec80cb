"""A client for cosmos-rl's reward service. It enqueues clips and polls for their scores.

`wire.py` describes the wire format, and `server.py` is a compatible server. The URLs and the token come from the environment
variables REMOTE_REWARD_ENQUEUE_URL, REMOTE_REWARD_FETCH_URL and REMOTE_REWARD_TOKEN, or the same names with WFM_ instead of
REMOTE_; the configuration can override the URLs. REMOTE_REWARD_URL, the server for text rewards, is not used.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from dsreason import stopping
from dsreason.errors import ConfigError, RewardError
from dsreason.problems import describe_first_problem
from dsreason.rewards.http import Refused, Retry, RewardServer, read_variable
from dsreason.rewards.remote import ScoreEntry, ScoresAnswer
from dsreason.world.rewards.wire import (
    ENQUEUE_TYPE,
    FORM_TYPE,
    REPLICA,
    ScoringRequest,
    build_enqueue_body,
    build_pull_body,
)
from dsreason.world.schema import WorldRewardConfig

log = logging.getLogger(__name__)

MOST_TOTAL = 5.0
"""The sum of the services' weighted scores is clipped to ± this value."""
FAILED_PULLS = 6
"""Number of consecutive failures after which the client gives up: about half a minute, including the pauses."""
LONGEST_POLL = 5.0
REQUEST_LIMIT = 60.0
"""Time limit in seconds for the response to a pull."""
LONGEST_NAME = 1000
"""Maximum length of a job id or a replica id, in characters."""


@dataclass(frozen=True)
class Ticket:
    """An enqueued request; `subject` names its clips in messages."""

    uuid: str
    description: str
    """Description of the job for messages, with the quoted uuid."""
    replica: str | None
    subject: str
    deadline: float


class RewardService:
    """A client for a reward service; its URLs come from the configuration or the environment.

    Args:
        pause: seconds before the first retry, doubled for each further retry.
        poll: seconds between the first two polls for scores, multiplied by 1.5 after each poll.

    Raises:
        ConfigError: a URL is missing or invalid, or the token cannot be sent.
    """

    def __init__(self, config: WorldRewardConfig, *, pause: float = 1.0, poll: float = 0.2) -> None:
        self.config, self.pause, self.poll = config, pause, poll
        token = read_variable("TOKEN")
        self.enqueue = RewardServer(_find_url(config.enqueue_url, "enqueue_url"), token)
        self.fetch = RewardServer(_find_url(config.fetch_url, "fetch_url"), token)
        self._stop = threading.Event()

    def close(self) -> None:
        """Cancel pending requests; each request stops once the response that it is waiting for has arrived."""
        self._stop.set()

    def score(
        self, array: NDArray[np.generic], prompts: Sequence[str], fps: float, subject: str
    ) -> dict[str, list[float]]:
        """Enqueue clips and wait up to `reward.time_limit` for their scores; return them by `<name>/<score key>`.

        Args:
            array: uint8 `[B, 3, T, H, W]`, or float16 latents if `reward.media` is `latent`.
            subject: description of the clips for messages.

        Raises:
            RewardError: the service refuses the request, fails, or does not return the scores in time.
        """
        keys = list_score_keys(self.config)
        infos = [{"video_fps": fps}] * len(prompts)
        request = ScoringRequest(prompts, choose_sent_weights(self.config), infos, self.config.media, array)
        ticket = self._enqueue(build_enqueue_body(request), subject, time.monotonic() + self.config.time_limit)
        return {
            f"{name}/{key}": values
            for name, wanted_keys in keys.items()
            for key, values in self._pull(ticket, name, wanted_keys, len(prompts)).items()
        }

    def _enqueue(self, body: bytes, subject: str, deadline: float) -> Ticket:
        attempt = 0
        while True:
            seconds_left = max(0.1, deadline - time.monotonic())
            try:
                _, answer = self.enqueue.post(body, {"Content-Type": ENQUEUE_TYPE}, seconds_left)
                return self._read_ticket(answer, subject, deadline)
            except Refused as error:
                raise self._make_error(self.enqueue, subject, str(error)) from None
            except Retry as error:
                pause, attempt = error.pause(self.pause, attempt), attempt + 1
                if time.monotonic() + pause >= deadline:
                    limit = self.config.time_limit
                    raise self._make_error(
                        self.enqueue, subject, f"{error} ({attempt} attempts within {limit:g} s)"
                    ) from error
                log.warning("reward service %s: %s; retrying in %.1f s", self.enqueue.place, error, pause)
            if stopping.pause(pause, self._stop):
                raise self._make_error(self.enqueue, subject, "cancelled")

    def _read_ticket(self, answer: bytes, subject: str, deadline: float) -> Ticket:
        quoted_answer = self.enqueue.quote(answer.decode(errors="replace"))
        try:
            ticket_fields = json.loads(answer)
            uuid, replica = ticket_fields["uuid"], ticket_fields.get("replica_id")
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            uuid = replica = None
        if not (isinstance(uuid, str) and 0 < len(uuid) <= LONGEST_NAME):
            raise self._make_error(self.enqueue, subject, f'the response must be {{"uuid": …}}; got {quoted_answer}')
        if replica is not None and not is_valid_header_value(replica):
            raise self._make_error(
                self.enqueue, subject, f"the response has a replica_id that is not valid in a header: {quoted_answer}"
            )
        return Ticket(uuid, f"job {self.enqueue.quote(uuid)}", replica or None, subject, deadline)

    def _pull(self, ticket: Ticket, name: str, keys: Sequence[str], count: int) -> dict[str, list[float]]:
        headers = {"Content-Type": FORM_TYPE} | ({REPLICA: ticket.replica} if ticket.replica else {})
        body = build_pull_body(ticket.uuid, name)
        failures, pause, last_answer = 0, self.poll, "none"
        while (seconds_left := ticket.deadline - time.monotonic()) > 0:
            try:
                status, answer = self.fetch.post(body, headers, min(seconds_left, REQUEST_LIMIT), expected=[400])
                if status != 400:
                    return self._read_scores(answer, ticket, name, keys, count)
                failures, wait, pause = 0, pause, min(pause * 1.5, LONGEST_POLL)
                last_answer = f"status 400 ({self.fetch.quote(answer.decode(errors='replace').strip())})"
            except Refused as error:
                raise self._make_error(
                    self.fetch, ticket.subject, f'scores of "{name}", {ticket.description}: {error}'
                ) from None
            except Retry as error:
                wait, failures, last_answer = error.pause(self.pause, failures), failures + 1, str(error)
                if failures == FAILED_PULLS:
                    text = f'scores of "{name}", {ticket.description}: {error} ({failures} attempts in a row)'
                    raise self._make_error(self.fetch, ticket.subject, text) from error
            if stopping.pause(min(wait, max(0.0, ticket.deadline - time.monotonic())), self._stop):
                raise self._make_error(self.fetch, ticket.subject, "cancelled")
        raise self._make_error(
            self.fetch,
            ticket.subject,
            f'no scores of "{name}" within {self.config.time_limit:g} s; last response for {ticket.description}: {last_answer}. '
            "The service may have dropped the job; check its log, or raise reward.time_limit",
        )

    def _read_scores(
        self, answer: bytes, ticket: Ticket, name: str, keys: Sequence[str], count: int
    ) -> dict[str, list[float]]:
        scores_by_key: dict[str, list[float]] = {}
        try:
            scores = ScoresAnswer.model_validate_json(answer).scores
            for key in keys:
                if key not in scores:
                    listed = self.fetch.quote(", ".join(sorted(scores)))
                    raise self._make_error(self.fetch, ticket.subject, f'"{name}" has no score {key}; it has {listed}')
                scores_by_key |= ScoreEntry(scores={key: scores[key]}).scores
        except ValidationError as error:
            problem = self.fetch.quote(describe_first_problem(error, self.fetch.mask_token))
            raise self._make_error(
                self.fetch, ticket.subject, f'the scores of "{name}" cannot be used: {problem}'
            ) from None
        for key, values in scores_by_key.items():
            if len(values) != count:
                raise self._make_error(
                    self.fetch, ticket.subject, f"{name}/{key}: got {len(values)} scores for {count} clips"
                )
        return scores_by_key

    def _make_error(self, server: RewardServer, subject: str, text: str) -> RewardError:
        return RewardError(f"reward service {server.place}, {subject}: {text}")


def is_valid_header_value(value: object) -> bool:
    return isinstance(value, str) and value.isascii() and value.isprintable() and len(value) <= LONGEST_NAME


def list_score_keys(config: WorldRewardConfig) -> dict[str, list[str]]:
    """Return the score keys to read for each function, such as `{"dance_grpo": ["vq_reward", "mq_reward"]}`."""
    keys_by_name: dict[str, list[str]] = {}
    for service in config.services:
        keys = keys_by_name.setdefault(service.name, [])
        keys += [key for key in service.score_key.split("+") if key not in keys]
    return keys_by_name


def choose_sent_weights(config: WorldRewardConfig) -> dict[str, float]:
    """Return each function's largest weight; 0 is replaced by 1, because the service ignores functions with weight 0."""
    weights: dict[str, float] = {}
    for service in config.services:
        weights[service.name] = max(weights.get(service.name, 0.0), service.weight)
    return {name: weight or 1.0 for name, weight in weights.items()}


def compute_total(config: WorldRewardConfig, values: Mapping[str, Sequence[float]]) -> NDArray[np.float64]:
    """Return clip(sum of clip(score, clip_min, clip_max)·weight, ± 5)·scale, like cosmos-rl's client: `[B]`."""
    total: NDArray[np.float64] | float = 0.0
    for service in config.services:
        score = sum(np.asarray(values[f"{service.name}/{key}"]) for key in service.score_key.split("+"))
        total = total + np.clip(score, service.clip_min, service.clip_max) * service.weight
    return np.clip(total, -MOST_TOTAL, MOST_TOTAL) * config.scale


def _find_url(given: str | None, key: str) -> str:
    url = given or read_variable(key.upper())
    if not url:
        name = key.upper()
        raise ConfigError(
            f"reward.services requires the service's URLs; set REMOTE_REWARD_{name} (or WFM_REWARD_{name}) in the environment, "
            f"or reward.{key}"
        )
    return url
