"""Rewards from a server, tested with a small server in a thread."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from typing import Any

import numpy as np
import pytest

from dsreason.config.schema_grpo import GRPOConfig, RemoteRewardConfig, RewardConfig
from dsreason.data.types import Sample
from dsreason.errors import ConfigError, RewardError
from dsreason.media.frames import write_frame_list
from dsreason.rewards import remote as remote_rewards
from dsreason.rewards.remote import RemoteReward
from dsreason.rewards.scoring import Scorer
from tests.quiet_server import QuietServer

TOKEN = "very-secret-token"
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {
        "role": "user",
        "content": [{"type": "video", "video": "/d/7.mp4", "fps": 2}, {"type": "text", "text": "Which way?"}],
    },
    {"role": "assistant", "content": "left"},
]
SAMPLES = [Sample(str(i), MESSAGES, answer="left", meta={"kind": "direction"}) for i in range(5)]
COMPLETIONS = ["l", "le", "lef", "left", "lefts"]


class Server:
    """A server that responds with `answer(request body)`: (status, object or bytes)."""

    def __init__(self) -> None:
        self.requests: list[tuple[dict[str, str], dict[str, Any]]] = []
        self.answer: Callable[[dict[str, Any]], tuple[int, Any]] = self.lengths
        self.headers: dict[str, str] = {}
        self.drip = 0.0
        """Seconds between the bytes of a response."""
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.requests.append((dict(self.headers), body))
                status, answer = outer.answer(body)
                data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                self.send_response(status)
                for name, value in {"Content-Length": str(len(data)), **outer.headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                for piece in [data[i : i + 1] for i in range(len(data))] if outer.drip else [data]:
                    time.sleep(outer.drip)
                    self.wfile.write(piece)

            def log_message(self, *args: object) -> None: ...

        self.http = QuietServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/score"

    @staticmethod
    def lengths(body: dict[str, Any]) -> tuple[int, Any]:
        return 200, {"scores": {"length": [len(text) for text in body["completions"]]}}


@pytest.fixture
def server(monkeypatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setenv("REMOTE_REWARD_TOKEN", TOKEN)
    server = Server()
    thread = threading.Thread(target=server.http.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield server
    server.http.shutdown()
    server.http.server_close()
    thread.join()


def remote(server: Server, *, pause: float = 0.01, **settings: Any) -> RemoteReward:
    config = RemoteRewardConfig.model_validate({"url": server.url, "retries": 2, **settings})
    return RemoteReward(config, pause=pause)


def test_request_has_all_fields_and_token_header(server):
    assert remote(server).score(COMPLETIONS[:2], SAMPLES[:2]) == {"length": [1.0, 2.0]}
    ((headers, body),) = server.requests
    assert headers["Authorization"] == f"Bearer {TOKEN}"
    assert body == {
        "prompts": ["Be brief.\nWhich way?"] * 2,
        "completions": ["l", "le"],
        "answers": ["left", "left"],
        "media": [[{"type": "video", "video": "/d/7.mp4", "fps": 2}]] * 2,
        "meta": [{"id": "0", "options": None, "kind": "direction"}, {"id": "1", "options": None, "kind": "direction"}],
    }


def test_request_has_all_accepted_answers(server):
    remote(server).score(COMPLETIONS[:1], [replace(SAMPLES[0], other_answers=("to the left",))])
    ((_, body),) = server.requests
    assert (body["answers"], body["meta"][0]["other_answers"]) == (["left"], ["to the left"])


def test_server_scores_only_selected_rows(server, monkeypatch):
    monkeypatch.setenv("REMOTE_REWARD_URL", server.url)
    samples = [replace(sample, meta={"kind": kind}) for sample, kind in zip(SAMPLES, "abcab", strict=True)]
    config = RewardConfig(functions={"remote:length": 1.0}, only={"remote:length": {"kind": ["a"]}})
    with Scorer(config) as scorer:
        total = scorer.score(COMPLETIONS, samples).total
    assert [None if np.isnan(value) else value for value in total] == [1, None, None, 4, None]
    assert [body["completions"] for _, body in server.requests] == [[COMPLETIONS[0], COMPLETIONS[3]]]


def test_given_frames_are_sent_as_file_list(server, tmp_path, monkeypatch):
    monkeypatch.setenv("COSMOS_CACHE", str(tmp_path))
    video = str(write_frame_list(["/d/1.png", "/d/2.png"], {"fps": 2}))
    content = [{"type": "video", "video": video}, {"type": "text", "text": "Which way?"}]
    remote(server).score(["left"], [Sample("7", [{"role": "user", "content": content}], "left")])
    ((_, body),) = server.requests
    assert body["media"] == [[{"type": "video", "video": ["/d/1.png", "/d/2.png"], "fps": 2}]]


def test_batches_come_back_in_order(server):
    assert remote(server, batch_size=2).score(COMPLETIONS, SAMPLES) == {"length": [1, 2, 3, 4, 5]}
    assert sorted(len(body["completions"]) for _, body in server.requests) == [1, 2, 2]


@pytest.mark.parametrize("status", [500, 503, 429])
def test_transient_failure_is_retried(server, status):
    answers = [(status, {}), (status, {}), (200, {"scores": {"a": [1]}})]
    server.answer = lambda body: answers.pop(0)
    assert remote(server).score(["x"], SAMPLES[:1]) == {"a": [1.0]}
    assert len(server.requests) == 3


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A list that records the pauses between attempts, in seconds; the client does not wait."""
    noted: list[float] = []

    def note(seconds: float, cancelled: threading.Event) -> bool:
        noted.append(seconds)
        return cancelled.is_set()

    monkeypatch.setattr(remote_rewards, "pause", note)
    return noted


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, [0.5, 1.0, 2.0, 4.0]),
        ({"Retry-After": "3"}, [3.0, 3.0, 3.0, 4.0]),  # at least what the server asks for
        ({"Retry-After": "3600"}, [30.0] * 4),  # the maximum pause
        ({"Retry-After": "Wed, 21 Oct 2026 07:28:00 GMT"}, [0.5, 1.0, 2.0, 4.0]),
    ],
)
def test_pauses_double_and_respect_retry_after(server, pauses, headers, expected):
    server.answer, server.headers = lambda body: (503, {}), headers
    with pytest.raises(RewardError, match=r"status 503 .*\(5 attempts\)"):
        remote(server, pause=0.5, retries=4).score(["x"], SAMPLES[:1])
    assert pauses == expected


def test_error_names_the_unreachable_server(server):
    server.http.server_close()
    with pytest.raises(RewardError, match=r'127.0.0.1:\d+/score, samples "0" to "1": ConnectError.*refused'):
        remote(server, retries=1).score(["x", "y"], SAMPLES[:2])


def test_slow_server_is_abandoned(server):
    server.answer = lambda body: (time.sleep(1), (200, {}))[1]
    with pytest.raises(RewardError, match=r"no response within 0.2 s \(2 attempts\)"):
        remote(server, time_limit=0.2, retries=1).score(["x"], SAMPLES[:1])


def test_slowly_dripping_response_is_abandoned(server):
    server.drip = 0.05
    with pytest.raises(RewardError, match=r"no response within 0.2 s \(1 attempts\)"):
        remote(server, time_limit=0.2, retries=0).score(["x"], SAMPLES[:1])


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (b"<html>", "in <html>"),
        ([1], 'not {"scores"'),
        ({"scores": [1, 2]}, "scores is [1, 2]: "),
        ({"scores": {}}, "at least 1 item"),
        ({"uuid": "1"}, "cosmos-rl's queue"),
        ({"scores": {"a": 1}}, "scores.a is 1: input should be a valid list"),
        ({"scores": {"a": [1]}}, 'score "a" has 1 numbers, but there are 2 completions'),
        (
            {"scores": {"a": [1, None]}},
            'sample "1": the response is not {"scores": {name: [number]}}: scores.a.1 is None',
        ),
        (
            {"scores": {"a": [float("nan"), 1]}},
            'sample "0": the response is not {"scores": {name: [number]}}: scores.a.0 is nan',
        ),
        ({"scores": {"a": [True, 1]}}, "scores.a.0 is True: input should be a valid number"),
        ({"scores": {"b": [1, 2]}}, "no score a; it has b"),
        ({"scores": {"a": [1, TOKEN]}}, "scores.a.1 is '***': input should be a valid number"),
        ({TOKEN: TOKEN}, 'scores is missing in {"***": "***"}'),
    ],
)
def test_invalid_response_is_reported_without_revealing_token(server, answer, text):
    server.answer = lambda body: (200, answer)
    with pytest.raises(RewardError) as error:
        remote(server).score(["x", "y"], SAMPLES[:2], ["a"])
    assert text in str(error.value)
    assert TOKEN not in str(error.value)
    assert len(server.requests) == 1


@pytest.mark.parametrize("scores", [{"a": [""] * 100_000}, {str(i): "" for i in range(100_000)}])
def test_only_first_invalid_server_value_is_reported(server, scores, monkeypatch):
    counts = []
    monkeypatch.setattr(
        remote_rewards, "describe_first_problem", lambda error, hide: counts.append(error.error_count()) or "wrong"
    )
    server.answer = lambda body: (200, {"scores": scores})
    with pytest.raises(RewardError, match="wrong in"):
        remote(server).score(["x"], SAMPLES[:1])
    assert counts == [1]


@pytest.mark.parametrize("before", range(60, 80, 4))
def test_truncated_message_shows_no_token_part(server, before):
    server.answer = lambda body: (200, {"scores": {"a": ["-" * before + TOKEN]}})
    with pytest.raises(RewardError) as error:
        remote(server).score(["x"], SAMPLES[:1])
    assert TOKEN[:4] not in str(error.value)


@pytest.mark.parametrize("status", [400, 401, 403, 404, 500])
def test_error_messages_never_contain_the_token(server, status, caplog):
    server.answer = lambda body: (status, {"detail": f"Bearer {TOKEN} is bad"})
    with pytest.raises(RewardError) as error:
        remote(server, retries=0).score(["x"], SAMPLES[:1])
    chain, link = [], error.value
    while link is not None:
        chain.append(str(link))
        link = link.__cause__ or link.__context__
    assert f"status {status}" in chain[0]
    assert "*** is bad" in chain[0]
    assert not any(TOKEN in text for text in [*chain, caplog.text, repr(remote(server))])
    assert ("check REMOTE_REWARD_TOKEN" in chain[0]) == (status in (401, 403))


def test_redirects_are_not_followed_with_token(server):
    server.answer = lambda body: (302, {})
    server.headers = {"Location": server.url + "/elsewhere"}
    with pytest.raises(RewardError, match="redirects are not followed"):
        remote(server).score(["x"], SAMPLES[:1])
    assert len(server.requests) == 1


def test_truncated_response_is_requested_again(server):
    server.answer = lambda body: (200, {"scores": {"a": [1]}})
    server.headers = {"Content-Length": "1000", "Connection": "close"}
    with pytest.raises(RewardError, match=r"closed connection .*expected 1000.*\(2 attempts\)"):
        remote(server, retries=1).score(["x"], SAMPLES[:1])


def test_batches_with_different_scores_are_rejected(server):
    server.answer = lambda body: (200, {"scores": {body["completions"][0]: [1]}})
    with pytest.raises(RewardError, match="one batch has the scores l, but another has le"):
        remote(server, batch_size=1).score(["l", "le"], SAMPLES[:2])


def test_error_names_sample_not_serializable_to_json(server):
    with pytest.raises(RewardError, match='sample "9": its media or meta cannot be encoded'):
        remote(server).score(["x"], [Sample("9", [], meta={"image": b"..."})])


@pytest.mark.parametrize("prefix", ["REMOTE_REWARD_", "WFM_REWARD_"])
@pytest.mark.parametrize("address", ["URL", "ENQUEUE_URL"])
def test_both_environment_prefixes_are_read(prefix, address, monkeypatch):
    for name, value in {address: "https://host/score", "TOKEN": f"{TOKEN}\n", "ENQUEUE_TIMEOUT_S": "7"}.items():
        monkeypatch.setenv(prefix + name, value)
    remote_reward = RemoteReward(RemoteRewardConfig())
    assert (remote_reward.server.url, remote_reward.server.token, remote_reward.time_limit) == (
        "https://host/score",
        TOKEN,
        7.0,
    )


@pytest.mark.parametrize(
    ("environment", "text"),
    [
        ({}, "set REMOTE_REWARD_URL"),
        ({"REMOTE_REWARD_URL": "ftp://x"}, "http://"),
        ({"REMOTE_REWARD_URL": f"http://me:{TOKEN}@host/x"}, "must not contain a user name or password"),
        ({"REMOTE_REWARD_URL": "http://a", "WFM_REWARD_URL": "http://b"}, "have different values"),
        ({"REMOTE_REWARD_URL": "http://a", "REMOTE_REWARD_ENQUEUE_TIMEOUT_S": "soon"}, "number of seconds"),
        ({"REMOTE_REWARD_URL": "http://a", "REMOTE_REWARD_TOKEN": f"{TOKEN}\n{TOKEN}"}, "line break"),
    ],
)
def test_invalid_reward_server_environment_is_explained(environment, text, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError) as error:
        RemoteReward(RemoteRewardConfig())
    assert text in str(error.value)
    assert TOKEN not in str(error.value)


def test_scorer_adds_scores_from_server(server):
    answer = {"quality": [0.5] * 5, "words": [0, 1, 1, 1, 2]}
    server.answer = lambda body: (200, {"scores": answer})
    config = RewardConfig(functions={"exact_match": 1.0, "remote:quality": 2.0}, remote={"url": server.url})
    with Scorer(config) as scorer:
        scores = scorer.score(COMPLETIONS, SAMPLES)
    assert scores.total.tolist() == [1, 1, 1, 2, 1]
    assert scores.by_function["quality"].tolist() == [0.5] * 5
    assert scores.metric_sums == {"remote/words": (5.0, 5)}


def test_run_uses_configured_url_and_environment_token(server, monkeypatch):
    monkeypatch.setenv("REMOTE_REWARD_TOKEN", TOKEN)
    monkeypatch.setenv("REMOTE_REWARD_URL", "http://127.0.0.1:9/elsewhere")  # the configuration's URL takes precedence
    reward = {
        "functions": {"format": 1.0, "remote:length": 0.5},
        "options": {"format": {"pattern": "l.*"}},
        "workers": 1,
        "remote": {"url": server.url, "batch_size": 2},
    }
    with Scorer(GRPOConfig.model_validate({"reward": reward}).reward) as scorer:
        scores = scorer.score(COMPLETIONS, SAMPLES)
    assert scores.total.tolist() == [1.5, 2.0, 2.5, 3.0, 3.5]
    assert len(server.requests) == 3
    assert {headers["Authorization"] for headers, _ in server.requests} == {f"Bearer {TOKEN}"}


def test_server_is_optional_without_remote_scores(monkeypatch):
    monkeypatch.delenv("REMOTE_REWARD_URL", raising=False)
    Scorer(RewardConfig(functions={"format": 1.0}))
