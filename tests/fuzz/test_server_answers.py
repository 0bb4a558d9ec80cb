"""For any response of a server, each client either accepts it, or gives an error with the question's id and continues."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from dsreason.config.schema_eval import ServerConfig
from dsreason.config.schema_grpo import DistillConfig, RemoteRewardConfig
from dsreason.data.types import Sample
from dsreason.errors import DsReasonError
from dsreason.evaluation.ask.asking import QuestionRequest
from dsreason.evaluation.ask.server import ServerAnswerer
from dsreason.evaluation.types import Question
from dsreason.rewards import judge
from dsreason.rewards.remote import RemoteReward
from dsreason.rollout.protocol import Sampling, make_single_turn
from dsreason.screen import escape_control
from dsreason.train.grpo import teacher_server
from dsreason.train.grpo.rollouts import Rollout
from dsreason.world.rewards.service import RewardService
from dsreason.world.schema import WorldRewardConfig
from tests.fuzz.fuzzing import Fuzz, changed, damaged
from tests.unit.hostile.server import Behaviour, misbehaving

pytestmark = [pytest.mark.integration, pytest.mark.long]

SECONDS = 0.5
"""Seconds to wait for a response; a client that waits for scores repeats its request until this time has passed."""
TOKEN = "very-secret-token"
SAMPLE = Sample("sample-7", [{"role": "user", "content": "Which?"}], answer="A")
CHAT = {
    "choices": [{"message": {"content": "A", "reasoning": "because"}, "finish_reason": "stop"}],
    "usage": {"completion_tokens": 3, "prompt_tokens": 4},
}
ANSWERS: dict[str, Any] = {
    "eval": CHAT,
    "models": {"data": [{"id": "m"}]},
    "remote": {"scores": {"a": [0.5], "b": [1]}},
    "judge": {**CHAT, "choices": [{"message": {"content": '{"score": 4}'}}]},
    "teacher": {"choices": [{"prompt_logprobs": [None, {"2": {"logprob": -0.5, "rank": 1, "decoded_token": "a"}}]}]},
    "enqueue": {"uuid": "job", "replica_id": "r"},
    "fetch": {"scores": {"k": [0.5]}},
}
HEADERS = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\nConnection: close\r\n\r\n"


def http(body: bytes) -> bytes:
    return HEADERS % len(body) + body


def as_text(document: Any) -> bytes:
    return json.dumps(document).encode("utf-8", "surrogatepass")


def ask_eval(url: str) -> None:
    question = Question("d/sample-7/0", "d", "sample-7", "multiple_choice", SAMPLE, "A", {"A": "a"})
    settings = {"url": url, "model": "m", "max_retries": 0, "time_limit": SECONDS}
    [(_, reply)] = ServerAnswerer(ServerConfig.model_validate(settings)).ask([QuestionRequest(question, Sampling())])
    assert 0 <= reply.completion_tokens <= 10**9
    if reply.error is not None:
        raise DsReasonError(f"{question.id}: {reply.error}")


def ask_models(url: str) -> None:
    ServerAnswerer(ServerConfig.model_validate({"url": url, "max_retries": 0}))


def ask_remote(url: str) -> None:
    settings = RemoteRewardConfig.model_validate({"url": url, "time_limit": SECONDS, "retries": 0})
    scores = RemoteReward(settings, pause=0.01).score(["A"], [SAMPLE])
    assert scores and all(len(result) == 1 and math.isfinite(result[0]) for result in scores.values())


def ask_judge(url: str) -> None:
    score, metrics = asyncio.run(judge("A", SAMPLE, url=url, model="m", time_limit=SECONDS, retries=0))
    assert 0 <= score <= 1 and all(map(math.isfinite, metrics.values()))


def ask_teacher(url: str) -> None:
    settings = {"teacher": url, "server_model": "m", "retries": 0, "time_limit": SECONDS}
    prompt: Any = SimpleNamespace(prompt_ids=[1], sample=SAMPLE)
    rollout = Rollout(prompt, make_single_turn([2], "A", [-0.5], "stop", version=0), reward=0.0, rewards={})
    [logprob] = teacher_server.Client(DistillConfig.model_validate(settings)).request_logprobs(rollout)
    assert math.isfinite(logprob) and logprob <= 0


def ask_world(url: str) -> None:
    settings = {
        "services": [{"name": "s", "score_key": "k", "weight": 1.0}],
        "time_limit": SECONDS,
        "enqueue_url": f"{url}/enqueue",
        "fetch_url": f"{url}/fetch",
    }
    service = RewardService(WorldRewardConfig.model_validate(settings), pause=0.01, poll=0.01)
    service.score(np.zeros([1, 3, 1, 2, 2], np.uint8), ["p"], 1.0, 'clip of "sample-7"')


CLIENTS: dict[str, tuple[Callable[[str], None], bytes, bytes]] = {
    "eval": (ask_eval, b"POST", http(as_text(ANSWERS["models"]))),
    "models": (ask_models, b"", b""),
    "remote": (ask_remote, b"", b""),
    "judge": (ask_judge, b"", b""),
    "teacher": (ask_teacher, b"", b""),
    "enqueue": (ask_world, b"POST /enqueue", http(as_text(ANSWERS["fetch"]))),
    "fetch": (ask_world, b"POST /fetch", http(as_text(ANSWERS["enqueue"]))),
}
"""Client name → calling function, requests that get the odd response, and the response to all other requests."""


def odd_answers(client: str) -> st.SearchStrategy[bytes]:
    documents = changed(ANSWERS[client])
    return st.one_of(
        documents.map(as_text).map(http),
        damaged(documents.map(as_text)).map(http),
        damaged(documents.map(as_text).map(http)),
    )


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name in ("REMOTE_REWARD_TOKEN", "TEACHER_API_KEY", "JUDGE_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.setenv(name, TOKEN)


@pytest.mark.parametrize("client", CLIENTS)
def test_ordinary_server_response_is_accepted(client: str) -> None:
    ask, at, otherwise = CLIENTS[client]
    with misbehaving(saying([http(as_text(ANSWERS[client]))]), at, saying([otherwise])) as server:
        ask(server.url)


def test_any_server_response_is_accepted_or_reported(fuzz: Fuzz) -> None:
    message = {client: [b""] for client in CLIENTS}
    with ExitStack() as stack:
        urls = {
            client: stack.enter_context(misbehaving(saying(message[client]), at, saying([otherwise]))).url
            for client, (_, at, otherwise) in CLIENTS.items()
        }

        def check(given: tuple[str, bytes]) -> None:
            client, message[client][0] = given
            try:
                CLIENTS[client][0](urls[client])
            except DsReasonError as error:
                text = str(error)
                assert (urls[client] if client == "models" else "sample-7") in text
                assert TOKEN not in text and len(text) < 1500 and escape_control(text) == text, text

        fuzz(check, st.sampled_from([*CLIENTS]).flatmap(lambda client: st.tuples(st.just(client), odd_answers(client))))


def saying(answer: list[bytes]) -> Behaviour:
    """Answer every request with the only item that the list contains at that time."""
    return lambda connection, over: connection.sendall(answer[0])
