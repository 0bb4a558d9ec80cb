"""Misbehaving servers: each client raises an error in time that names the server, and sends nothing elsewhere."""

from __future__ import annotations

import asyncio
import gzip
import importlib
import os
import socket
import threading
import time
import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from pydantic import BaseModel, ValidationError

from dsreason import stopping
from dsreason.config.schema_eval import ServerConfig
from dsreason.config.schema_grpo import DistillConfig, RemoteRewardConfig, RewardConfig
from dsreason.data.types import Sample
from dsreason.errors import ConfigError, DsReasonError, RewardError, Stopped
from dsreason.evaluation.ask import server as eval_server
from dsreason.evaluation.ask.asking import QuestionRequest
from dsreason.evaluation.ask.server import ServerAnswerer
from dsreason.evaluation.types import Question
from dsreason.files import http
from dsreason.rewards.remote import RemoteReward
from dsreason.rewards.scoring import Scorer
from dsreason.rollout.protocol import Sampling
from dsreason.train.grpo import teacher_server
from dsreason.world.rewards.service import RewardService
from dsreason.world.schema import WorldRewardConfig
from tests.unit.hostile.server import (
    BROKEN,
    NEVER,
    REDIRECTS,
    TOO_LONG,
    Behaviour,
    Hostile,
    answer,
    content,
    loop,
    misbehaving,
    nested,
    silent,
)

judge_module = importlib.import_module("dsreason.rewards.judge")  # in the package, this name is a function
SAMPLE = Sample("sample-7", [{"role": "user", "content": "Which?"}], answer="A")
MODELS = answer({"data": [{"id": "m"}]})
TOKEN = "very-secret-token"
SHORT, LONG = 0.15, 20.0


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name in ("REMOTE_REWARD_TOKEN", "TEACHER_API_KEY", "JUDGE_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.setenv(name, TOKEN)
    for module in (eval_server, judge_module, teacher_server):
        monkeypatch.setattr(module, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(eval_server, "CHECK_SECONDS", SHORT)


def ask_eval(url: str, limit: float) -> str:
    """Return the error of a question, or of the client, which then names the server."""
    settings = {"url": url, "model": "m", "max_retries": 0, "time_limit": limit}
    question = Question("d/sample-7/0", "d", "sample-7", "multiple_choice", SAMPLE, "A", {"A": "a"})
    [(request, reply)] = ServerAnswerer(ServerConfig.model_validate(settings)).ask(
        [QuestionRequest(question, Sampling())]
    )
    assert reply.error is not None, reply
    return f"{request.question.id}: {reply.error}"


def ask_models(url: str, limit: float) -> str:
    eval_server.CHECK_SECONDS = limit
    with pytest.raises(ConfigError) as caught:
        ServerAnswerer(ServerConfig.model_validate({"url": url, "max_retries": 0}))
    return str(caught.value)


def ask_remote(url: str, limit: float) -> str:
    settings = RemoteRewardConfig.model_validate({"url": url, "time_limit": limit, "retries": 0})
    with pytest.raises(RewardError) as caught:
        RemoteReward(settings, pause=0.01).score(["A"], [SAMPLE])
    return str(caught.value)


def ask_judge(url: str, limit: float) -> str:
    with pytest.raises(RewardError) as caught:
        asyncio.run(judge_module.judge("A", SAMPLE, url=url, model="m", time_limit=limit, retries=0))
    return str(caught.value)


def ask_teacher(url: str, limit: float) -> str:
    settings = {"teacher": url, "server_model": "m", "retries": 0, "time_limit": limit}
    rollout: Any = SimpleNamespace(
        prompt=SimpleNamespace(prompt_ids=[1], sample=SAMPLE), completion=SimpleNamespace(ids=[2])
    )
    with pytest.raises(DsReasonError) as caught:
        teacher_server.Client(DistillConfig.model_validate(settings)).request_logprobs(rollout)
    return str(caught.value)


def ask_world(enqueue_url: str, fetch_url: str, limit: float) -> str:
    settings = WorldRewardConfig.model_validate(
        {
            "services": [{"name": "s", "score_key": "k", "weight": 1.0}],
            "time_limit": limit,
            "enqueue_url": enqueue_url,
            "fetch_url": fetch_url,
        }
    )
    service = RewardService(settings, pause=0.01, poll=0.01)
    with pytest.raises(RewardError) as caught:
        service.score(np.zeros([1, 3, 1, 2, 2], np.uint8), ["p"], 1.0, 'clip of "sample-7"')
    return str(caught.value)


def ask_enqueue(url: str, limit: float) -> str:
    return ask_world(url, url, limit)


def ask_fetch(url: str, limit: float) -> str:
    with misbehaving(answer({"uuid": "job"})) as polite:
        return ask_world(polite.url, url, limit)


Ask = Callable[[str, float], str]
CLIENTS: dict[str, Ask] = {
    "eval": ask_eval,
    "models": ask_models,
    "remote": ask_remote,
    "judge": ask_judge,
    "teacher": ask_teacher,
    "enqueue": ask_enqueue,
    "fetch": ask_fetch,
}
"""Clients by name: functions that take a URL and a limit in seconds, and return the error message."""


def serving(client: str, behaviour: Behaviour) -> AbstractContextManager[Hostile]:
    """Run a server that misbehaves; for `eval`, only on requests with a question."""
    return misbehaving(behaviour, b"POST", MODELS) if client == "eval" else misbehaving(behaviour)


def check_named(client: str, said: str, url: str) -> None:
    assert url in said if client == "models" else "sample-7" in said
    assert TOKEN not in said
    assert len(said) < 1500


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("behaviour", NEVER)
def test_endless_answer_times_out(client: str, behaviour: str) -> None:
    with serving(client, NEVER[behaviour]) as server:
        clients = CLIENTS[client](server.url, SHORT)
    check_named(client, clients, server.url)
    assert any(
        words in clients
        for words in ("no response within", "takes longer than", "takes more than", "it takes ", "no scores of")
    )


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("behaviour", TOO_LONG)
def test_oversized_response_is_rejected_early(client: str, behaviour: str) -> None:
    with serving(client, TOO_LONG[behaviour]) as server:
        clients = CLIENTS[client](server.url, LONG)
    check_named(client, clients, server.url)
    assert "the response is longer than" in clients


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("behaviour", BROKEN)
def test_broken_answer_is_reported(client: str, behaviour: str) -> None:
    with serving(client, BROKEN[behaviour]) as server:
        check_named(client, CLIENTS[client](server.url, 1.0), server.url)


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("status", REDIRECTS)
def test_redirects_are_not_followed(client: str, status: str) -> None:
    with misbehaving(answer({})) as other:
        moved = content(b"", f"Location: {other.url}/v1", status=status)
        with serving(client, moved) as server:
            clients = CLIENTS[client](server.url, LONG)
    check_named(client, clients, server.url)
    assert other.requests == []
    assert "redirects are not followed" in clients


@pytest.mark.parametrize("client", CLIENTS)
def test_redirect_loop_is_never_followed(client: str) -> None:
    with serving(client, loop) as server:
        clients = CLIENTS[client](server.url, LONG)
    check_named(client, clients, server.url)
    assert not [request for request in server.requests if b"/again" in request]


# ---------------------------------------------------------------- fields


DIGITS = b"9" * 400


def chat(usage: bytes = b"{}", message: bytes = b'{"content": "A"}', reason: bytes = b'"stop"') -> bytes:
    return b'{"choices": [{"message": %s, "finish_reason": %s}], "usage": %s}' % (message, reason, usage)


def tokens(logprob: bytes, key: bytes = b"2") -> bytes:
    return b'{"choices": [{"prompt_logprobs": [null, {"%s": {"logprob": %s}}]}]}' % (key, logprob)


FIELDS: dict[str, list[bytes]] = {
    "eval": [
        *(chat(b'{"completion_tokens": %s}' % item) for item in (DIGITS, b"-" + DIGITS, b"-3", b"NaN", b"1e999", b"[]")),
        chat(b'{"completion_tokens": %s}' % (b"9" * 5000)),
        chat(message=nested('{"content": ')),
        chat(message=b'{"content": "\\ud800"}'),
        chat(message=b'{"content": "\xff\xfe"}'),
        chat(message=b'{"content": {"text": "A"}}'),
        chat(reason=b'"%s"' % (b"x" * 10_000)),
        chat().decode().encode("utf-16"),
        nested(""),
        nested('{"choices": '),
        b"",
        b"null",
    ],
    "remote": [
        *(b'{"scores": {"a": [%s]}}' % item for item in (DIGITS, b"-" + DIGITS, b"NaN", b"1e999", b"1e200", b"true", b'"1"')),
        b'{"scores": {"%s": [1]}}' % (b"x" * 5000),
        b'{"scores": {"a\\nerror: all is lost": [1]}}',
        b'{"scores": {"": [1]}}',
        b'{"scores": {%s}}' % b", ".join(b'"s%d": [1]' % item for item in range(2000)),
        nested('{"scores": '),
        b"\xff\xfe",
    ],
    "judge": [
        *(chat(message=b'{"content": "{\\"score\\": %s}"}' % item) for item in (DIGITS, b"-3", b"NaN", b"1e999")),
        chat(message=nested('{"content": ')),
        b'{"choices": [{"message": {"content": "\\ud800"}}]}',
        nested(""),
        b"\xff\xfe",
    ],
    "teacher": [
        *(tokens(item) for item in (DIGITS, b"-" + DIGITS, b"NaN", b"-1e999", b"-1e300", b"3", b'"x"')),
        tokens(b"-1", DIGITS),
        nested('{"choices": '),
        b"\xff\xfe",
    ],
    "enqueue": [
        b'{"uuid": "%s"}' % (b"x" * 5000),
        b'{"uuid": 7}',
        b'{"uuid": "job", "replica_id": "%s"}' % (b"x" * 5000),
        b'{"uuid": "job", "replica_id": "a\\r\\nX: y"}',
        nested('{"uuid": '),
        nested(""),
        b"\xff\xfe",
    ],
    "fetch": [
        *(b'{"scores": {"k": [%s]}}' % item for item in (DIGITS, b"NaN", b"1e999", b"1e200", b"null")),
        b'{"scores": {"k": [1, 2]}}',
        nested('{"scores": '),
        b"\xff\xfe",
    ],
    "models": [
        b'{"data": [{"id": "%s"}]}' % (b"x" * 5000),
        *(b'{"data": [{"id": "%s"}]}' % item for item in (b"", b".", b"..", b"/", b"~nobody", b"a\\nerror: b", b"a\\u202eb")),
        b'{"data": [{"id": "a\\u0000b"}]}',
        nested('{"data": '),
        b"\xff\xfe",
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("client", "number"), [(client, number) for client, bodies in FIELDS.items() for number in range(len(bodies))]
)
def test_out_of_range_field_is_rejected(client: str, number: int) -> None:
    with serving(client, content(FIELDS[client][number])) as server:
        clients = CLIENTS[client](server.url, LONG)
    check_named(client, clients, server.url)


@pytest.mark.parametrize(
    ("answer", "content"),
    [
        (eval_server.ChatCompletion, '{"choices": [%s3]}'),
        (eval_server.ModelList, '{"data": [%s3]}'),
        (teacher_server.ScoredChoice, '{"prompt_logprobs": [%s3]}'),
    ],
)
def test_only_first_of_many_errors_is_reported(answer: type[BaseModel], content: str) -> None:
    """Check that errors are not collected, because the errors for 8 MB of values would take gigabytes."""
    with pytest.raises(ValidationError) as caught:
        answer.model_validate_json(content % ("3," * 1000))
    assert caught.value.error_count() == 1


@pytest.mark.parametrize("charset", ["utf-7", "rot13", "no-such-charset", "utf-16", "x" * 1000])
def test_json_is_always_read_as_utf_8(charset: str) -> None:
    odd = b'{"scores": {"a": ["no number"]}}'
    with misbehaving(content(odd, f"Content-Type: application/json; charset={charset}")) as server:
        assert "scores.a.0 is 'no number'" in ask_remote(server.url, LONG)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SSL_CERT_FILE", "/no/such/file"),
        ("SSL_CERT_FILE", "/proc/version"),
        ("http_proxy", "nonsense://proxy"),
        ("all_proxy", "http://proxy:port"),
    ],
)
def test_unusable_network_environment_is_reported(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    http.get_tls_context.cache_clear()
    with (
        misbehaving(answer({})) as server,
        pytest.raises(ConfigError, match=f"correct the environment variables .*{name.upper()}"),
    ):
        http.ask("GET", server.url, limit=LONG, max_bytes=100)
    http.get_tls_context.cache_clear()
    assert server.requests == []


def test_requests_work_in_forked_process() -> None:
    """Check a forked process, in which the thread of the parent's event loop does not exist."""
    with misbehaving(answer({"a": 1})) as server:
        assert http.ask("GET", server.url, limit=LONG, max_bytes=100).content == b'{"a": 1}'
        child = os.fork()
        if child == 0:
            os._exit(http.ask("GET", server.url, limit=LONG, max_bytes=100).status - 200)
        assert os.waitpid(child, 0)[1] == 0
        assert len(server.requests) == 2


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "identity"])
def test_compressed_response_is_read(encoding: str) -> None:
    body = b'{"a": 1}'
    packed = {"gzip": gzip.compress, "deflate": zlib.compress, "identity": bytes}[encoding](body)
    with misbehaving(content(packed, f"Content-Encoding: {encoding}")) as server:
        assert http.ask("GET", server.url, limit=LONG, max_bytes=len(body)).content == body


def wait_for_eval(url: str) -> object:
    question = Question("d/sample-7/0", "d", "sample-7", "multiple_choice", SAMPLE, "A", {"A": "a"})
    answerer = ServerAnswerer(ServerConfig(url=url, model="m", time_limit=600.0))
    return list(answerer.ask([QuestionRequest(question, Sampling())]))


def wait_for_remote(url: str) -> object:
    settings = RemoteRewardConfig.model_validate({"url": url, "time_limit": 600})
    return RemoteReward(settings).score(["A"], [SAMPLE])


def wait_for_judge(url: str) -> object:
    options = {"url": url, "model": "m", "time_limit": 600}
    config = RewardConfig.model_validate({"functions": {"judge": 1.0}, "options": {"judge": options}, "workers": 1})
    with Scorer(config) as scorer:
        return scorer.score(["A"], [SAMPLE])


def wait_for_teacher(url: str) -> object:
    settings = {"teacher": url, "server_model": "m", "time_limit": 600}
    return teacher_server.Client(DistillConfig.model_validate(settings)).request_tokens([1, 2], "two tokens")


def wait_for_world(url: str) -> object:
    service = [{"name": "s", "score_key": "k", "weight": 1.0}]
    urls = {"enqueue_url": url, "fetch_url": url}
    settings = WorldRewardConfig.model_validate({"services": service, "time_limit": 600, **urls})
    return RewardService(settings).score(np.zeros([1, 3, 1, 2, 2], np.uint8), ["p"], 1.0, "a clip")


HANGING: dict[str, Behaviour] = {
    "before the answer": silent,
    "during the answer": NEVER["body drips"],
    "between two requests": content(b"{}", "Retry-After: 30", status="503 Busy"),
}
WAITS = [wait_for_eval, wait_for_remote, wait_for_judge, wait_for_teacher, wait_for_world]


@pytest.mark.parametrize("hanging", HANGING)
@pytest.mark.parametrize("wait", WAITS)
def test_stop_request_ends_wait_for_server(
    wait: Callable[[str], object], hanging: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stopping, "_requests", [])
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    stopped_at: list[float] = []

    def hang(connection: socket.socket, over: threading.Event) -> None:
        threading.Timer(0.2, stop).start()
        HANGING[hanging](connection, over)

    def stop() -> None:
        stopped_at.append(time.monotonic())
        stopping.request_stop("SIGTERM")

    with (
        misbehaving(hang, at=b"POST", otherwise=MODELS) as server,
        pytest.raises(Stopped, match="^stopped by SIGTERM$"),
    ):
        wait(server.url)
    assert time.monotonic() - stopped_at[0] < 1.0
