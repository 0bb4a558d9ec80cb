"""Questions answered by an OpenAI-compatible server (vLLM, or any other)."""

from __future__ import annotations

import os
import threading
import time
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from queue import SimpleQueue
from typing import Any
from urllib.parse import urlsplit

import openai
from pydantic import BaseModel, Field, ValidationError

from dsreason.config.schema_eval import ServerConfig
from dsreason.errors import ConfigError, DataError, DsReasonError
from dsreason.evaluation.ask.asking import Reply, Request
from dsreason.evaluation.ask.server_messages import as_request
from dsreason.evaluation.types import Question
from dsreason.problems import first_problem, listed, nearest
from dsreason.rollout.protocol import Sampling

CHECK_SECONDS = 20.0
"""In which a server that is up says which models it has."""
LISTED = 10
"""Names of models in a message, at most."""


class Message(BaseModel):
    """Of an answer. A server with a reasoning parser takes the thoughts out of `content`; vLLM has called them both ways."""

    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None

    def whole(self) -> str:
        thoughts, content = self.reasoning or self.reasoning_content, self.content or ""
        return f"<think>{thoughts}</think>\n{content}" if thoughts else content


class Choice(BaseModel):
    message: Message
    finish_reason: str | None = None


class Usage(BaseModel):
    completion_tokens: int = 0


class Answer(BaseModel):
    """What is read of a response; servers differ in the rest."""

    choices: list[Choice] = Field(min_length=1)
    usage: Usage | None = None


class ServerAnswerer:
    """An `Answerer` that asks `concurrency` questions at a time.

    Raises:
        ConfigError: at the start or later: no server at the address, the key is refused, no such model.
        DsReasonError: the server went away while it was being asked.
    """

    def __init__(self, config: ServerConfig) -> None:
        if config.url is None:
            raise ValueError("server.url is not set")
        self.config, self.url, self.key = config, base_url(config.url), read_key(config.api_key_env)
        self.client = openai.OpenAI(
            base_url=self.url,
            api_key=self.key or "none",  # the client insists on one; servers without keys do not look
            timeout=config.time_limit,
            max_retries=config.max_retries,
        )
        self.listed = self._list_models()
        self.model = config.model or self._only_model()

    def batches(self, batches: Sequence[Sequence[Question]]) -> Iterator[Sequence[Question]]:
        yield from batches

    def ask(self, requests: Sequence[Request]) -> Iterator[tuple[Request, Reply]]:
        waiting = deque(requests)
        done: SimpleQueue[tuple[Request, Reply | Exception]] = SimpleQueue()

        def work() -> None:
            while waiting:
                try:
                    request = waiting.popleft()
                except IndexError:  # another thread was faster
                    return
                try:
                    done.put((request, self._ask(request)))
                except Exception as error:  # noqa: BLE001 - raised where the replies are taken
                    done.put((request, error))

        for _ in range(min(self.config.concurrency, len(requests))):
            threading.Thread(target=work, daemon=True).start()  # who interrupts does not wait for a server that hangs
        try:
            for _ in requests:
                request, reply = done.get()
                if isinstance(reply, Exception):
                    raise reply
                yield request, reply
        finally:
            waiting.clear()

    def close(self) -> None:
        self.client.close()

    def _ask(self, request: Request) -> Reply:
        started = time.perf_counter()
        fields: dict[str, Any] = {}
        try:
            messages, fields = as_request(request.question.sample, self.config.video)
            drawn, more = sampling_fields(request)
            response = self.client.chat.completions.with_raw_response.create(
                model=self.model,
                messages=messages,  # type: ignore[arg-type]  # dictionaries of the form that openai's TypedDicts describe
                extra_body={**more, **fields},
                **drawn,
            )
            answer = Answer.model_validate_json(response.http_response.text)
        except ValidationError as error:
            problem = first_problem(error, self._without_key)
            return Reply(error=f"the server's response is not a chat completion: {problem}")
        except DataError as error:
            return Reply(error=str(error), sent=False)
        except (openai.AuthenticationError, openai.PermissionDeniedError, openai.NotFoundError) as error:
            raise self._refusal(error) from None
        except openai.APIStatusError as error:
            if fields and any(name in error.message for name in fields):
                raise self._failed(
                    f"the server rejects the settings for reading clips ({self._said(error)}); start vLLM "
                    'with --trust-request-mm-kwargs, or set server.video = "frames"'
                ) from None
            return Reply(error=f"the server answers {self._said(error)}")
        except openai.APIConnectionError as error:
            self._check_alive(error)
            return Reply(error=self._without_key(f"no answer from the server: {reason(error)}"))
        choice = answer.choices[0]
        tokens = answer.usage.completion_tokens if answer.usage else 0
        return Reply(choice.message.whole(), choice.finish_reason or "", tokens, time.perf_counter() - started)

    def _list_models(self) -> list[str]:
        """Names of the models that the server has; empty where it does not say."""
        client = self.client.with_options(timeout=CHECK_SECONDS, max_retries=1)
        try:
            response = client.models.with_raw_response.list().http_response.text
            return [model.id for model in ModelList.model_validate_json(response).data]
        except (ValidationError, openai.NotFoundError):  # servers that only chat
            return []
        except (openai.AuthenticationError, openai.PermissionDeniedError) as error:
            raise self._refusal(error) from None
        except openai.APIStatusError as error:
            raise self._failed(f"the server answers {self._said(error)}") from None
        except openai.APIConnectionError as error:
            raise self._failed(f"no server answers there ({reason(error)}); start it, or correct the address") from None

    def _only_model(self) -> str:
        if len(self.listed) == 1:
            return self.listed[0]
        found = (
            f"it has {listed(self.listed, LISTED, separator=', ')}"
            if self.listed
            else "it does not say which models it has"
        )
        raise self._failed(f"set server.model to the model that shall answer; {found}")

    def _refusal(self, error: openai.APIStatusError) -> ConfigError:
        said, variable = self._said(error), self.config.api_key_env
        if not isinstance(error, openai.NotFoundError):
            done = "rejects the key in" if self.key else "requires a key, and none is in"
            return self._failed(
                f"the server {done} the environment variable {variable} ({said}); set it, or set server.api_key_env to "
                "another one"
            )
        near = nearest(self.model, self.listed)
        has = (
            f" It has {listed(self.listed, LISTED, separator=', ')}" + (f"; did you mean {near}?" if near else ".")
            if self.listed
            else ""
        )
        return self._failed(
            f"the server has no model {self.model!r}, or no chat at this address ({said}); correct server.model or "
            f"server.url.{has}"
        )

    def _failed(self, text: str) -> ConfigError:
        return ConfigError(self._without_key(f"server.url ({self.url}): {text}"))

    def _check_alive(self, error: openai.APIConnectionError) -> None:
        """A request that failed may be at fault itself; a server that does not answer another one either is down."""
        try:
            self._list_models()
        except ConfigError:
            raise DsReasonError(
                f"server.url ({self.url}): the server went away ({reason(error)}). The answers until then are saved: start "
                "it again, and the same command continues"
            ) from None

    def _said(self, error: openai.APIStatusError) -> str:
        """Status and message. The key is masked before the message is cut: half a key is a secret too."""
        return f"{error.status_code}: {self._without_key(error.message):.500}"

    def _without_key(self, text: str) -> str:
        return text.replace(self.key, "[key]") if self.key else text


class Model(BaseModel):
    id: str


class ModelList(BaseModel):
    data: list[Model]


def base_url(url: str) -> str:
    """The address below which the interface lies; `/v1` is added where it has no path."""
    return url.rstrip("/") if urlsplit(url).path.strip("/") else f"{url.rstrip('/')}/v1"


def read_key(variable: str) -> str | None:
    key = os.environ.get(variable, "").strip()
    if not (key.isascii() and key.isprintable()):
        raise ConfigError(f"the key in {variable} has characters that an HTTP header cannot hold; set it again")
    return key or None


def sampling_fields(request: Request) -> tuple[dict[str, Any], dict[str, Any]]:
    """The sampling in the fields of OpenAI's interface, and in those that vLLM adds; only what differs from their defaults.

    Many servers refuse the latter, so a top_k of 1 is said as temperature 0, which is the same.
    """
    sampling = request.sampling
    greedy = sampling.temperature == 0 or sampling.top_k == 1
    standard: dict[str, Any] = {
        "temperature": 0.0 if greedy else sampling.temperature,
        "max_tokens": sampling.max_completion_length,
        "seed": request_seed(sampling, request.question.id),
    }
    if not greedy and sampling.top_p != 1:
        standard["top_p"] = sampling.top_p
    penalties = {"presence_penalty": sampling.presence_penalty, "frequency_penalty": sampling.frequency_penalty}
    standard |= {name: value for name, value in penalties.items() if value}
    more: dict[str, Any] = {"top_k": sampling.top_k} if sampling.top_k and not greedy else {}
    if sampling.repetition_penalty != 1:
        more["repetition_penalty"] = sampling.repetition_penalty
    return standard, more


def request_seed(sampling: Sampling, question_id: str) -> int:
    """Another one for each question and attempt, the same whatever else is asked; 31 bits, which every server takes."""
    return zlib.crc32(f"{sampling.seed}/{question_id}".encode()) >> 1


def reason(error: openai.APIConnectionError) -> str:
    """The cause has the words: `[Errno 111] Connection refused`."""
    if isinstance(error, openai.APITimeoutError):
        return "it takes too long; see server.time_limit"
    return f"{error.__cause__ or error}" or type(error.__cause__).__name__
