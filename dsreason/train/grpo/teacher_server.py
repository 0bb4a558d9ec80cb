"""A teacher behind an OpenAI-compatible server, which gives the log-probabilities of a prompt's tokens (vLLM)."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import compress
from typing import TYPE_CHECKING, Annotated

import torch
from pydantic import BaseModel, FailFast, Field, ValidationError
from torch import Tensor

from dsreason.config.schema_grpo import DistillConfig
from dsreason.data.messages import media_paths
from dsreason.data.types import Sample
from dsreason.errors import ConfigError, DataError, DsReasonError
from dsreason.job.ranks import World, errors_on_all_ranks, gather_in_group
from dsreason.problems import first_problem
from dsreason.rewards.http import Refused, Retry, RewardServer
from dsreason.train.grpo.rollouts import MicroBatch, Rollout

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

KEY = "TEACHER_API_KEY"
"""Environment variable of the server's key."""
FIRST_PAUSE = 1.0
PROBES = 256
"""Tokens from all over the vocabulary, of which the server says what they are."""
ROUNDING = 1e-3
"""By which a log-probability may exceed 0."""
LOWEST = -1e6
"""No token of a model has a lower one, and 32 bits hold none of -1e300."""
UNREADABLE = "\N{REPLACEMENT CHARACTER}"


class Token(BaseModel):
    logprob: float
    decoded_token: str | None = None


class Choice(BaseModel):
    prompt_logprobs: Annotated[list[dict[str, Token] | None], FailFast()]


class Answer(BaseModel):
    """What is read of a response."""

    choices: list[Choice] = Field(min_length=1, max_length=1)


class TeacherServer:
    """A `Teacher` that is asked for each completion with its prompt, as token ids; they stand for no media.

    What the student may not draw (media tokens) keeps its probability here, unlike in a model's own forward.
    """

    def __init__(self, config: DistillConfig, world: World) -> None:
        self.client, self.world, self.concurrency = Client(config), world, config.concurrency
        self.fingerprint = str(config.server_model)

    def logprobs(self, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
        """Those that compute rows together have the same rollouts, and ask for some of them each."""
        rollouts = [rollout for micro_batch in micro_batches for rollout in micro_batch.rollouts]
        part = self.world.row_part
        with errors_on_all_ranks(), ThreadPoolExecutor(self.concurrency) as threads:
            own_logprobs = list(threads.map(self.client.ask, rollouts[part.number :: part.total]))
        all_logprobs: list[list[float]] = [[]] * len(rollouts)
        for number, rank_logprobs in enumerate(gather_in_group(own_logprobs, self.world)):
            all_logprobs[number :: part.total] = rank_logprobs
        values = iter(all_logprobs)
        by_batch = [[value for _ in micro_batch.rollouts for value in next(values)] for micro_batch in micro_batches]
        return [torch.tensor(batch_logprobs, dtype=torch.float32).to(self.world.device) for batch_logprobs in by_batch]


class Client:
    """Asks for log-probabilities. The key is read from the environment only.

    Args:
        config: with a `teacher` that is an address, below which `/completions` lies, and a `server_model`.
    """

    def __init__(self, config: DistillConfig) -> None:
        self.config = config
        address = f"{config.teacher}".rstrip("/").removesuffix("/completions") + "/completions"
        key = os.environ.get(KEY, "").strip() or None
        self.server = RewardServer(address, key, what="teacher", token_name=KEY)

    def ask(self, rollout: Rollout) -> list[float]:
        """Ask for the log-probabilities of the completion's sampled tokens."""
        prompt, completion = rollout.prompt.prompt_ids, rollout.completion
        tokens = self.request([*prompt, *completion.ids], f"sample {rollout.prompt.sample.id!r}")
        return [token.logprob for token in compress(tokens[-completion.num_tokens :], completion.sampled)]

    def request(self, ids: list[int], what: str) -> list[Token]:
        """Return what the server says of each token but the first, which follows nothing.

        DsReasonError if there is no answer, or one that does not fit.
        """
        request = {"model": self.config.server_model, "prompt": ids, "max_tokens": 1, "prompt_logprobs": 0}
        body, attempt = json.dumps(request).encode(), 0
        while True:
            try:
                _, answer = self.server.post(body, {"Content-Type": "application/json"}, self.config.time_limit)
                return read_tokens(answer, ids)
            except Retry as error:
                if attempt == self.config.retries:
                    raise self.failed(what, f"{error} ({attempt + 1} attempts)") from None
                time.sleep(error.pause(FIRST_PAUSE, attempt))
                attempt += 1
            except Refused as error:
                raise self.failed(what, str(error)) from None
            except ValidationError as error:
                raise self.unreadable(what, first_problem(error, self.server.without_token)) from None
            except ValueError as error:
                raise self.unreadable(what, str(error)) from None

    def unreadable(self, what: str, problem: str) -> DsReasonError:
        quoted = self.server.quoted(problem)
        return self.failed(what, f"no log-probabilities of the prompt as vLLM gives them: {quoted}")

    def failed(self, what: str, text: str) -> DsReasonError:
        return DsReasonError(f"distill.teacher ({self.server.place}), {what}: {text}")


def read_tokens(answer: bytes, ids: Sequence[int]) -> list[Token]:
    """Of all tokens but the first; ValueError if the answer does not fit them."""
    entries = Answer.model_validate_json(answer).choices[0].prompt_logprobs
    if len(entries) != len(ids):
        raise ValueError(f"entries of {len(entries)} tokens instead of {len(ids)}")
    tokens = []
    for place, (number, entry) in enumerate(zip(ids[1:], entries[1:], strict=True), start=1):
        token = (entry or {}).get(str(number))
        if token is None:
            raise ValueError(f"nothing of token {place}, whose id is {number}")
        if not LOWEST < token.logprob < ROUNDING:
            raise ValueError(f"{token.logprob} for token {place}")
        tokens.append(token)
    return tokens


def check_server(config: DistillConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ConfigError if the server cannot be asked, or reads tokens otherwise than the student."""
    client = Client(config)
    plain = sorted(set(tokenizer.get_vocab().values()) - set(tokenizer.all_special_ids))
    ids = plain[:: max(1, len(plain) // PROBES)][: PROBES + 1]
    try:
        tokens = client.request(ids, "tokens of the student's vocabulary")
    except DsReasonError as error:
        raise ConfigError(str(error)) from None
    for number, token in zip(ids[1:], tokens, strict=True):
        decoded = tokenizer.decode([number])
        if UNREADABLE in decoded or token.decoded_token is None:  # a part of a character
            continue
        if token.decoded_token != decoded:
            raise ConfigError(
                f"distill.teacher ({client.server.place}): the server's vocabulary is another one than model.path's: token "
                f"{number} is {client.server.quoted(token.decoded_token)!r} there and {decoded!r} here; serve a model "
                "with the same"
            )


def check_no_media(sample: Sample) -> None:
    """DataError for a row that a server cannot be asked about."""
    if media := media_paths(sample.messages):
        raise DataError(
            f"sample {sample.id!r}: shows {media[0]}, and distill.teacher is a server, which is given token ids alone; leave "
            "such rows out (data.on_bad_row), or let distill.teacher be a model folder"
        )
