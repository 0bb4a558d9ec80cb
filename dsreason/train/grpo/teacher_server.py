"""A teacher behind an OpenAI-compatible server that returns log-probabilities of prompt tokens, such as vLLM."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import compress
from typing import TYPE_CHECKING, Annotated

import torch
from pydantic import BaseModel, FailFast, Field, ValidationError
from torch import Tensor

from dsreason.config.schema_grpo import DistillConfig
from dsreason.data.messages import list_media_paths
from dsreason.data.types import Sample
from dsreason.errors import ConfigError, DataError, DsReasonError, Stopped
from dsreason.job.ranks import World, gather_in_group, share_errors
from dsreason.media.frames import describe_video_path
from dsreason.problems import describe_first_problem
from dsreason.rewards.http import Refused, Retry, RewardServer
from dsreason.stopping import pause
from dsreason.train.grpo.rollouts import Rollout, RolloutMicroBatch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

KEY = "TEACHER_API_KEY"
"""Name of the environment variable that holds the server's API key."""
FIRST_PAUSE = 1.0
"""Seconds before the first retry."""
PROBES = 256
"""Number of tokens, spread evenly over the student's vocabulary, that are compared with those of the server."""
ROUNDING = 1e-3
"""Amount by which rounding errors may raise a log-probability above 0."""
LOWEST = -1e6
"""Lower bound for a token's log-probability. Models never return less, and a value such as -1e300 does not fit into float32."""
UNREADABLE = "\N{REPLACEMENT CHARACTER}"


class ScoredToken(BaseModel):
    logprob: float
    decoded_token: str | None = None


class ScoredChoice(BaseModel):
    prompt_logprobs: Annotated[list[dict[str, ScoredToken] | None], FailFast()]


class ScoredPrompt(BaseModel):
    """The fields of the server's response that the client uses."""

    choices: list[ScoredChoice] = Field(min_length=1, max_length=1)


class TeacherServer:
    """A `Teacher` on a server, which gets each prompt and completion as token ids. Media are not supported.

    The student must not sample media tokens. Unlike `TeacherModel`, the server does not ban these tokens, so they keep
    their probability.
    """

    def __init__(self, config: DistillConfig, world: World) -> None:
        self.client, self.world, self.concurrency = Client(config), world, config.concurrency
        self.fingerprint = str(config.server_model)

    def compute_logprobs(self, micro_batches: Sequence[RolloutMicroBatch]) -> list[Tensor]:
        """Return the log-probabilities of the sampled tokens, `[N]` per micro-batch. Collective.

        Ranks that compute rows together hold the same rollouts, so each of them queries the server only for its part.
        """
        rollouts = [rollout for micro_batch in micro_batches for rollout in micro_batch.rollouts]
        part = self.world.row_part
        with share_errors(), ThreadPoolExecutor(self.concurrency) as threads:
            local_logprobs = list(threads.map(self.client.request_logprobs, rollouts[part.number :: part.total]))
        all_logprobs: list[list[float]] = [[]] * len(rollouts)
        for number, rank_logprobs in enumerate(gather_in_group(local_logprobs, self.world)):
            all_logprobs[number :: part.total] = rank_logprobs
        values = iter(all_logprobs)
        by_batch = [[value for _ in micro_batch.rollouts for value in next(values)] for micro_batch in micro_batches]
        return [torch.tensor(batch_logprobs, dtype=torch.float32).to(self.world.device) for batch_logprobs in by_batch]


class Client:
    """A client that requests log-probabilities from the server. The API key is read only from the environment.

    Args:
        config: settings with `server_model`, and with `teacher` as the base URL of the `/completions` endpoint.
    """

    def __init__(self, config: DistillConfig) -> None:
        self.config = config
        url = f"{config.teacher}".rstrip("/").removesuffix("/completions") + "/completions"
        key = os.environ.get(KEY, "").strip() or None
        self.server = RewardServer(url, key, what="teacher", token_name=KEY)

    def request_logprobs(self, rollout: Rollout) -> list[float]:
        """Request the log-probabilities of the completion's sampled tokens."""
        prompt, completion = rollout.prompt.prompt_ids, rollout.completion
        tokens = self.request_tokens([*prompt, *completion.ids], f"sample {rollout.prompt.sample.id!r}")
        return [token.logprob for token in compress(tokens[-completion.num_tokens :], completion.sampled)]

    def request_tokens(self, ids: list[int], subject: str) -> list[ScoredToken]:
        """Request the log-probability of each token except the first, which has no context.

        Args:
            ids: token ids.
            subject: description of the tokens, for error messages.

        Raises:
            DsReasonError: the request failed, or the response does not match the tokens.
        """
        document = {"model": self.config.server_model, "prompt": ids, "max_tokens": 1, "prompt_logprobs": 0}
        body, attempt = json.dumps(document).encode(), 0
        while True:
            try:
                _, response = self.server.post(body, {"Content-Type": "application/json"}, self.config.time_limit)
                return read_tokens(response, ids)
            except Retry as error:
                if attempt == self.config.retries:
                    raise self.build_error(subject, f"{error} ({attempt + 1} attempts)") from None
                pause(error.pause(FIRST_PAUSE, attempt))
                attempt += 1
            except Refused as error:
                raise self.build_error(subject, str(error)) from None
            except ValidationError as error:
                raise self.build_unreadable_error(
                    subject, describe_first_problem(error, self.server.mask_token)
                ) from None
            except ValueError as error:
                raise self.build_unreadable_error(subject, str(error)) from None

    def build_unreadable_error(self, subject: str, problem: str) -> DsReasonError:
        quoted = self.server.quote(problem)
        return self.build_error(subject, f"the response has no prompt log-probabilities in vLLM's format: {quoted}")

    def build_error(self, subject: str, message: str) -> DsReasonError:
        return DsReasonError(f"distill.teacher ({self.server.place}), {subject}: {message}")


def read_tokens(response: bytes, ids: Sequence[int]) -> list[ScoredToken]:
    """Read the response's entries for all tokens except the first. Raise ValueError if the response does not match `ids`."""
    entries = ScoredPrompt.model_validate_json(response).choices[0].prompt_logprobs
    if len(entries) != len(ids):
        raise ValueError(f"it has entries for {len(entries)} tokens, but the request has {len(ids)}")
    tokens = []
    for index, (number, entry) in enumerate(zip(ids[1:], entries[1:], strict=True), start=1):
        token = (entry or {}).get(str(number))
        if token is None:
            raise ValueError(f"token {index} (id {number}) has no entry")
        if not LOWEST < token.logprob < ROUNDING:
            raise ValueError(f"token {index} has log-probability {token.logprob}; it must be from {LOWEST:g} to 0")
        tokens.append(token)
    return tokens


def check_server(config: DistillConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ConfigError if the server cannot be queried or its vocabulary differs from the student's."""
    client = Client(config)
    plain_ids = sorted(set(tokenizer.get_vocab().values()) - set(tokenizer.all_special_ids))
    ids = plain_ids[:: max(1, len(plain_ids) // PROBES)][: PROBES + 1]
    try:
        tokens = client.request_tokens(ids, "tokens of the student's vocabulary")
    except Stopped:
        raise
    except DsReasonError as error:
        raise ConfigError(str(error)) from None
    for number, token in zip(ids[1:], tokens, strict=True):
        decoded = tokenizer.decode([number])
        # The token is only part of a character, or the server has no text for it.
        if UNREADABLE in decoded or token.decoded_token is None:
            continue
        if token.decoded_token != decoded:
            raise ConfigError(
                f"distill.teacher ({client.server.place}): the server's vocabulary differs from that of model.path: token "
                f"{number} is {client.server.quote(token.decoded_token)!r} on the server, but {decoded!r} in model.path; serve a "
                "model with the same vocabulary"
            )


def check_no_media(sample: Sample) -> None:
    """Raise DataError if the row has media, which cannot be sent to a teacher server."""
    if media := list_media_paths(sample.messages):
        raise DataError(
            f"sample {sample.id!r}: contains {describe_video_path(media[0])}, but distill.teacher is a server, which gets only "
            "token ids; skip such rows (data.on_bad_row), or set distill.teacher to a model folder"
        )
