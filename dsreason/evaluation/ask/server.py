"""An answerer that queries an OpenAI-compatible server, such as vLLM."""

from __future__ import annotations

import json
import os
import random
import threading
import time
import zlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from queue import SimpleQueue
from typing import Annotated, Any
from urllib.parse import urlsplit

import torch
from pydantic import BaseModel, FailFast, Field, ValidationError

from dsreason import stopping
from dsreason.config.schema_eval import ServerConfig
from dsreason.data.chat import Encoder
from dsreason.data.render import NO_ARGUMENTS
from dsreason.errors import CheckpointError, ConfigError, DataError, DsReasonError
from dsreason.evaluation.ask.asking import QuestionRequest, Reply
from dsreason.evaluation.ask.server_messages import build_request
from dsreason.evaluation.types import Question
from dsreason.files import http
from dsreason.models.load import read_model_config
from dsreason.models.processors.loading import open_encoder
from dsreason.problems import describe_first_problem, find_nearest, join_first
from dsreason.rollout.protocol import Sampling
from dsreason.screen import to_one_line
from dsreason.secrets import add_secret_variable, is_header_safe

CHECK_SECONDS = 20.0
"""Time limit, in seconds, for the request that lists the server's models."""
MOST_BYTES = 8 * 2**20
"""Maximum size of a response, in bytes."""
MOST_TOKENS = 10**9
LONGEST_NAME = 255
"""Maximum length of a model's name in bytes; the results folder is named after the model."""
PASSING = (408, 409, 425, 429)
"""HTTP status codes below 500 for which a retry may succeed."""
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 60.0
LISTED = 10
"""Maximum number of model names to list in an error message."""


class Message(BaseModel):
    """The message in a response. A server with a reasoning parser moves the thoughts from `content` to a separate field, which
    is called `reasoning` or `reasoning_content`, depending on the version of vLLM."""

    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None

    def join_text(self) -> str:
        """Return the full text of the answer, with the thoughts, if any, in a `<think>` block."""
        thoughts, content = self.reasoning or self.reasoning_content, self.content or ""
        return f"<think>{thoughts}</think>\n{content}" if thoughts else content


class ChatChoice(BaseModel):
    message: Message
    finish_reason: str | None = Field(None, max_length=100)


class Usage(BaseModel):
    completion_tokens: int = Field(0, ge=0, le=MOST_TOKENS)


class ChatCompletion(BaseModel):
    """The fields of a response that are used; servers differ in all others."""

    choices: Annotated[list[ChatChoice], FailFast()] = Field(min_length=1)
    usage: Usage | None = None


class ServerAnswerer:
    """An `Answerer` that asks `concurrency` questions at a time.

    Raises:
        ConfigError: on construction or later, no server responds at the URL, the key is rejected, or the model does not exist.
        DsReasonError: the server went down during the evaluation.
    """

    def __init__(self, config: ServerConfig, template_arguments: Mapping[str, Any] = NO_ARGUMENTS) -> None:
        if config.url is None:
            raise ValueError("server.url is not set")
        self.config, self.url, self.key = config, complete_url(config.url), read_key(config.api_key_env)
        self.template_fields = {"chat_template_kwargs": dict(template_arguments)} if template_arguments else {}
        self.folders = self._list_models()
        self.listed = list(self.folders)
        self.model = config.model or self._get_only_model()
        if not is_name(self.model):
            raise self._make_error(
                f"the model name {self.model[:80]!r} cannot be used as the name of the results folder: it must be "
                f"printable and have at most {LONGEST_NAME} bytes; serve the model under another name, and set server.model"
            )

    def batches(self, batches: Sequence[Sequence[Question]]) -> Iterator[Sequence[Question]]:
        yield from batches

    def ask(self, requests: Sequence[QuestionRequest]) -> Iterator[tuple[QuestionRequest, Reply]]:
        _ = self.encoder  # open the encoder before the threads need it
        waiting = deque(requests)
        done: SimpleQueue[tuple[QuestionRequest, Reply | Exception]] = SimpleQueue()

        def work() -> None:
            while waiting:
                try:
                    request = waiting.popleft()
                except IndexError:  # another thread has taken the last request
                    return
                try:
                    done.put((request, self._ask(request)))
                except Exception as error:  # noqa: BLE001 - re-raised by the consumer below
                    done.put((request, error))

        for _ in range(min(self.config.concurrency, len(requests))):
            threading.Thread(target=work, daemon=True).start()  # daemon: a hanging server must not delay an interrupt
        try:
            for _ in requests:
                request, reply = done.get()
                if isinstance(reply, Exception):
                    raise reply
                yield request, reply
        finally:
            waiting.clear()

    def close(self) -> None:
        """Do nothing, because every request has its own connection."""

    def _ask(self, request: QuestionRequest) -> Reply:
        started = time.perf_counter()
        try:
            messages, fields = build_request(request.question.sample, self.config.video, self.encoder)
            body = {"model": self.model, "messages": messages, **build_sampling_fields(request), **fields}
            body |= self.template_fields
            response = self._request("POST", "/chat/completions", json.dumps(body).encode())
            if not response.is_success:
                return self._explain_refusal(response, fields)
            answer = ChatCompletion.model_validate_json(response.content)
        except ValidationError as error:
            problem = describe_first_problem(error, self._mask_key)
            return Reply(error=f"the server's response is not a chat completion: {problem}")
        except DataError as error:
            return Reply(error=str(error), sent=False)
        except http.BadAnswer as error:
            return Reply(error=self._mask_key(f"the server's response cannot be read: {error}"))
        except http.NoAnswer as error:
            self._check_alive(error)
            return Reply(error=self._mask_key(f"the server does not respond: {describe_no_answer(error)}"))
        choice = answer.choices[0]
        tokens = answer.usage.completion_tokens if answer.usage else 0
        return Reply(choice.message.join_text(), choice.finish_reason or "", tokens, time.perf_counter() - started)

    def _explain_refusal(self, answer: http.HttpResponse, fields: Mapping[str, Any]) -> Reply:
        """Return a reply with the server's error; raise the error if it would affect all questions."""
        if answer.status in (401, 403, 404):
            raise self._make_refusal(answer)
        if fields and any(name in answer.text for name in fields):
            raise self._make_error(
                f"the server rejects the settings for reading clips ({self._quote(answer)}); start vLLM "
                'with --trust-request-mm-kwargs, or set server.video = "frames"'
            )
        return Reply(error=f"the server responds with {self._quote(answer)}")

    def _request(
        self, method: str, path: str, content: bytes = b"", *, limit: float | None = None, retries: int | None = None
    ) -> http.HttpResponse:
        """Send a request, retry it after failures, and return the last response. Raise NoAnswer if the last attempt got none."""
        last = self.config.max_retries if retries is None else retries
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self.key}"} if self.key else {})
        for attempt in range(last + 1):
            pause = min(FIRST_PAUSE * 2.0**attempt, LONGEST_PAUSE) * random.uniform(0.75, 1)
            try:
                answer = http.ask(
                    *(method, f"{self.url}{path}"),
                    content=content,
                    headers=headers,
                    limit=limit or self.config.time_limit,
                    max_bytes=MOST_BYTES,
                )
            except http.NoAnswer:
                if attempt == last:
                    raise
            else:
                if attempt == last or not (answer.status in PASSING or answer.status >= 500):
                    return answer
                pause = min(answer.retry_after or pause, LONGEST_PAUSE)
            stopping.pause(pause)
        raise AssertionError("unreachable")

    @property
    def folder(self) -> Path | None:
        """The local folder of the server's model: `server.folder`, or the folder that the server reports if it exists locally."""
        named = self.config.folder or self.folders.get(self.model)
        folder = Path(named or "").expanduser()
        if named is not None and (folder / "config.json").is_file() and is_supported(folder):
            return folder
        if self.config.folder is not None:
            raise ConfigError(
                f"server.folder {self.config.folder}: is not the folder of a supported model (working folder: {Path.cwd()}); "
                "correct or remove it"
            )
        return None

    @cached_property
    def encoder(self) -> Encoder | None:
        """The encoder for the server's model, which plans media sizes; None if the model is unknown or text-only."""
        if self.folder is None:
            return None
        encoder = open_encoder(
            self.folder, dtype=torch.float32, max_length=MOST_TOKENS, max_length_key="the server's limit"
        )
        return encoder if encoder.sees else None

    def _list_models(self) -> dict[str, str | None]:
        """Return the server's models, with the folders that vLLM reports; {} if the server does not list its models."""
        try:
            response = self._request("GET", "/models", limit=CHECK_SECONDS, retries=1)
            if response.status in (401, 403):
                raise self._make_refusal(response)
            if not response.is_success and response.status != 404:
                raise self._make_error(f"the server responds with {self._quote(response)}")
            return {model.id: model.root for model in ModelList.model_validate_json(response.content).data}
        except ValidationError:  # some servers only support chat
            return {}
        except http.BadAnswer as error:
            raise self._make_error(f"the server's list of models cannot be read: {error}") from None
        except http.NoAnswer as error:
            why = f"listing its models takes more than {CHECK_SECONDS:g} s" if error.late else describe_no_answer(error)
            raise self._make_error(f"the server does not respond ({why}); start it, or correct the URL") from None

    def _get_only_model(self) -> str:
        if len(self.listed) == 1:
            return self.listed[0]
        models = (
            f"the server has {join_first(self.listed, LISTED, separator=', ')}"
            if self.listed
            else "the server does not list its models"
        )
        raise self._make_error(f"set server.model to the model to query; {models}")

    def _make_refusal(self, answer: http.HttpResponse) -> ConfigError:
        quoted, variable = self._quote(answer), self.config.api_key_env
        if answer.status != 404:
            problem = (
                f"the server rejects the key in the environment variable {variable} ({quoted}); correct it"
                if self.key
                else f"the server requires a key, but the environment variable {variable} is not set ({quoted}); set it"
            )
            return self._make_error(f"{problem}, or set server.api_key_env to another variable")
        if self.model in self.listed:
            return self._make_error(f"the server offers no chat completions at this URL ({quoted}); correct server.url")
        near = find_nearest(self.model, self.listed)
        has = (
            f" The server has {join_first(self.listed, LISTED, separator=', ')}"
            + (f"; did you mean {near}?" if near else ".")
            if self.listed
            else ""
        )
        return self._make_error(
            f"the server has no model {self.model!r}, or offers no chat completions at this URL ({quoted}); correct "
            f"server.model or server.url.{has}"
        )

    def _make_error(self, text: str) -> ConfigError:
        return ConfigError(self._mask_key(to_one_line(f"server.url ({self.url}): {text}")))

    def _check_alive(self, error: http.NoAnswer) -> None:
        """Raise DsReasonError if the server is down: it does not respond to another, simpler request either."""
        try:
            self._list_models()
        except ConfigError:
            raise DsReasonError(
                f"server.url ({self.url}): the server no longer responds ({describe_no_answer(error)}). All answers so far are "
                "saved; restart the server, and run the same command again to continue"
            ) from None

    def _quote(self, answer: http.HttpResponse) -> str:
        """Format a response's status and message. The key is masked before the message is truncated, because even a part of the
        key is secret."""
        text = http.REDIRECTED if 300 <= answer.status < 400 else answer.text or answer.reason
        return f"{answer.status}: {to_one_line(self._mask_key(text)):.500}"

    def _mask_key(self, text: str) -> str:
        return text.replace(self.key, "[key]") if self.key else text


class ListedModel(BaseModel):
    id: str
    root: str | None = None


class ModelList(BaseModel):
    data: Annotated[list[ListedModel], FailFast()]


def complete_url(url: str) -> str:
    """Return the API's URL, with `/v1` appended if `url` has no path."""
    return url.rstrip("/") if urlsplit(url).path.strip("/") else f"{url.rstrip('/')}/v1"


def is_supported(folder: Path) -> bool:
    try:
        read_model_config(folder)
    except CheckpointError:
        return False
    return True


def is_name(model: str) -> bool:
    """Return whether a results folder can have this name; a leading `~` would be expanded to a home folder."""
    is_path = Path(model).name not in ("", "..") and not model.startswith("~")
    return is_path and model.isprintable() and len(model.encode()) <= LONGEST_NAME


def read_key(variable: str) -> str | None:
    add_secret_variable(variable)
    key = os.environ.get(variable, "").strip()
    if not is_header_safe(key):
        raise ConfigError(
            f"the key in {variable} contains characters that are not allowed in an HTTP header; correct it"
        )
    return key or None


def build_sampling_fields(request: QuestionRequest) -> dict[str, Any]:
    """Build the request fields for the sampling settings: those in OpenAI's API, and vLLM's extensions.

    Optional fields are sent only if they differ from their defaults. Because many servers reject the extensions, a top_k of 1
    is sent as temperature 0, which is equivalent.
    """
    sampling = request.sampling
    greedy = sampling.temperature == 0 or sampling.top_k == 1
    fields: dict[str, Any] = {
        "temperature": 0.0 if greedy else sampling.temperature,
        "max_tokens": sampling.max_completion_length,
        "seed": request_seed(sampling, request.question.id),
    }
    if not greedy and sampling.top_p != 1:
        fields["top_p"] = sampling.top_p
    penalties = {"presence_penalty": sampling.presence_penalty, "frequency_penalty": sampling.frequency_penalty}
    fields |= {name: value for name, value in penalties.items() if value}
    if sampling.top_k and not greedy:
        fields["top_k"] = sampling.top_k
    if sampling.repetition_penalty != 1:
        fields["repetition_penalty"] = sampling.repetition_penalty
    return fields


def request_seed(sampling: Sampling, question_id: str) -> int:
    """Compute a 31-bit seed, which every server accepts, from nothing but the question and the attempt."""
    return zlib.crc32(f"{sampling.seed}/{question_id}".encode()) >> 1


def describe_no_answer(error: http.NoAnswer) -> str:
    return "the request takes longer than server.time_limit" if error.late else to_one_line(str(error))
