"""The client of the reward service over a real socket, with hand-written responses."""

from __future__ import annotations

import io
import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs

import numpy as np
import pytest
import torch

from dsreason.errors import ConfigError, RewardError
from dsreason.world.rewards.scorer import open_scorer
from dsreason.world.rewards.service import RewardService, compute_total
from dsreason.world.schema import WorldRewardConfig
from dsreason.world.types import WorldRow
from tests.quiet_server import QuietServer

TOKEN = "very-secret-token"
ROWS = [WorldRow("train.txt:1", "a red ship"), WorldRow("train.txt:2", "two\nlines, été")]
CLIPS = torch.arange(2 * 3 * 2 * 2 * 2, dtype=torch.uint8).reshape(2, 3, 2, 2, 2)
LATENTS = torch.linspace(-2, 2, 2 * 4 * 1 * 1 * 1).reshape(2, 4, 1, 1, 1)

VIDEO_BODY = (
    b'{"prompts": ["a red ship", "two\\nlines, \\u00e9t\\u00e9"], "reward_fn": {"dance_grpo": 2.0}, '
    b'"video_infos": [{"video_fps": 16.0}, {"video_fps": 16.0}], "media_type": "video"}\n'
    b"\x93NUMPY\x01\x00v\x00"
    + b"{'descr': '|u1', 'fortran_order': False, 'shape': (2, 3, 2, 2, 2), }".ljust(117)
    + b"\n"
    + bytes(range(48))
)
"""A request of cosmos-rl's client: a line of JSON, followed by numpy's file format."""

Answers = Callable[[str, dict[str, str], bytes], tuple[int, Any] | tuple[int, Any, dict[str, str]]]


class Service:
    """A service that records requests and responds with `answer(path, headers, body)`."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, dict[str, str], bytes]] = []
        self.answer: Answers = lambda path, headers, body: (500, {})
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                outer.requests.append((self.path, dict(self.headers), body))
                status, content, *more = outer.answer(self.path, dict(self.headers), body)
                data = json.dumps(content).encode()
                self.send_response(status)
                for name, value in {"Content-Length": str(len(data)), **(more[0] if more else {})}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *args: object) -> None: ...

        self.http = QuietServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/api/reward/"

    def scores(self, not_yet: int = 0, **scores: dict[str, list[float]]) -> None:
        """Respond like the service: status 400 `not_yet` times for each function, then its scores."""
        fromkeys = dict.fromkeys(scores, not_yet)

        def answer(path: str, headers: dict[str, str], body: bytes) -> tuple[int, Any]:
            if path.endswith("enqueue"):
                return 200, {"uuid": "job-1", "replica_id": "replica-7"}
            name = parse_qs(body.decode())["type"][0]
            fromkeys[name] -= 1
            if fromkeys[name] >= 0:
                return 400, {"message": "Not found scores for job-1"}
            return 200, {"scores": scores[name], "input_info": {}, "duration": "2.23", "type": name}

        self.answer = answer


def running(http: QuietServer) -> Iterator[None]:
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield
    http.shutdown()
    http.server_close()
    thread.join()


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setenv("REMOTE_REWARD_TOKEN", TOKEN)
    service = Service()
    for _ in running(service.http):
        yield service


def config(service: Service, *scores: dict[str, Any], **settings: Any) -> WorldRewardConfig:
    scores = scores or ({"name": "dance_grpo", "score_key": "overall_reward", "weight": 2.0},)
    urls = {"enqueue_url": service.url + "enqueue", "fetch_url": service.url + "pull"}
    return WorldRewardConfig.model_validate({"services": scores, "time_limit": 20, **urls, **settings})


def ask(settings: WorldRewardConfig) -> dict[str, list[float]]:
    client = RewardService(settings, pause=0.01, poll=0.01)
    return client.score(CLIPS.numpy(), [row.prompt for row in ROWS], 16.0, "clips of X")


def test_request_bytes_match_the_protocol(service: Service) -> None:
    service.scores(dance_grpo={"overall_reward": [0.5, -1.0], "vq_reward": [9, 9]})
    assert ask(config(service)) == {"dance_grpo/overall_reward": [0.5, -1.0]}
    (path, headers, body), (pull_path, pull_headers, pull_body) = service.requests
    assert (path, body) == ("/api/reward/enqueue", VIDEO_BODY)
    assert headers["Content-Type"] == "application/octet-stream"
    assert headers["Authorization"] == pull_headers["Authorization"] == f"Bearer {TOKEN}"
    assert (pull_path, pull_body) == ("/api/reward/pull", b"uuid=job-1&type=dance_grpo")
    assert pull_headers["Content-Type"] == "application/x-www-form-urlencoded"
    assert pull_headers["X-Lepton-Replica-Target"] == "replica-7"


def test_latents_are_sent_as_float16(service: Service) -> None:
    service.scores(dance_grpo={"overall_reward": [1, 2]})
    with open_scorer(config(service, media="latent")) as scorer:
        scorer.start(CLIPS, LATENTS, ROWS, 16.0).result()
    head, _, array = service.requests[0][2].partition(b"\n")
    assert json.loads(head)["media_type"] == "latent"
    sent = np.load(io.BytesIO(array), allow_pickle=False)
    assert sent.dtype == np.float16
    assert np.array_equal(sent, LATENTS.numpy().astype(np.float16))


def test_pending_scores_are_polled_per_function(service: Service) -> None:
    service.scores(3, dance_grpo={"vq_reward": [1, 2], "mq_reward": [3, 4]}, ocr={"ocr_reward": [0, 1]})
    scores = ({"name": "dance_grpo", "score_key": "vq_reward+mq_reward"}, {"name": "ocr", "score_key": "ocr_reward"})
    assert ask(config(service, *scores)) == {
        "dance_grpo/vq_reward": [1, 2],
        "dance_grpo/mq_reward": [3, 4],
        "ocr/ocr_reward": [0, 1],
    }
    assert json.loads(service.requests[0][2].partition(b"\n")[0])["reward_fn"] == {"dance_grpo": 1.0, "ocr": 1.0}
    assert [path.rpartition("/")[2] for path, _, _ in service.requests] == ["enqueue"] + ["pull"] * 8


def test_zero_weight_is_sent_as_one(service: Service) -> None:
    service.scores(a={"x": [1, 2]})
    with open_scorer(config(service, {"name": "a", "score_key": "x", "weight": 0})) as scorer:
        scores = scorer.start(CLIPS, LATENTS, ROWS, 16.0).result()
    assert json.loads(service.requests[0][2].partition(b"\n")[0])["reward_fn"] == {"a": 1.0}
    assert scores.total.tolist() == [0, 0]
    assert scores.by_name["a/x"].tolist() == [1, 2]


@pytest.mark.parametrize(
    ("scores", "scale", "values", "total"),
    [
        (({"name": "d", "score_key": "vq+mq", "weight": 2.0},), 0.5, {"d/vq": [0.74902], "d/mq": [1.0]}, 1.74902),
        (({"name": "d", "score_key": "vq", "weight": 2.0},), 2.0, {"d/vq": [3.0]}, 10.0),  # 6 is clipped at 5
        (({"name": "d", "score_key": "vq", "clip_min": -1.0, "weight": 3.0},), 1.0, {"d/vq": [-7.0]}, -3.0),
        (
            ({"name": "d", "score_key": "vq"}, {"name": "e", "score_key": "y", "weight": 0.5}),
            1.0,
            {"d/vq": [1.0], "e/y": [9.0]},
            3.5,
        ),
    ],
)
def test_total_applies_weights_clipping_and_scale(
    scores: tuple[dict[str, Any], ...], scale: float, values: dict[str, list[float]], total: float
) -> None:
    settings = WorldRewardConfig.model_validate({"services": scores, "scale": scale})
    assert compute_total(settings, values).tolist() == pytest.approx([total])


def test_service_and_function_scores_are_added_asynchronously(service: Service) -> None:
    service.scores(2, dance_grpo={"overall_reward": [1.0, 2.0]})
    with open_scorer(config(service, functions={"brightness": 10.0}, scale=0.5)) as scorer:
        gone_on, answer = threading.Event(), service.answer
        service.answer = lambda *request: answer(*request) if gone_on.wait(10) else (404, {})
        pending = scorer.start(CLIPS, LATENTS, ROWS, 16.0)
        gone_on.set()
        scores = pending.result()
    light = scores.by_name["brightness"].tolist()
    assert scores.total.tolist() == pytest.approx([10 * light[0] + 1, 10 * light[1] + 2])
    assert scores.by_name["dance_grpo/overall_reward"].tolist() == [1, 2]


def test_dropped_job_error_states_time_and_url(service: Service) -> None:
    service.scores(10_000, dance_grpo={})
    with pytest.raises(RewardError) as error:
        ask(config(service, time_limit=0.5))
    assert all(
        text in str(error.value)
        for text in (
            f"reward service {service.url}pull, clips of X",
            'no scores of "dance_grpo" within 0.5 s',
            'last response for job job-1: status 400 ({"message": "Not found scores for job-1"})',
            "raise reward.time_limit",
        )
    )


def test_unresponsive_service_is_abandoned_in_time(service: Service) -> None:
    service.answer = lambda *request: (time.sleep(2), (200, {}))[1]
    with pytest.raises(
        RewardError, match=r"enqueue, clips of X: no response within 0.\d+ s \(1 attempts within 0.4 s\)"
    ):
        ask(config(service, time_limit=0.4))


@pytest.mark.parametrize("status", [500, 503, 429])
def test_transient_failures_are_retried(service: Service, status: int) -> None:
    service.scores(dance_grpo={"overall_reward": [1, 2]})
    answer, failures = service.answer, iter([True, False, True, True])
    service.answer = lambda *request: (status, {}) if next(failures, False) else answer(*request)
    assert ask(config(service)) == {"dance_grpo/overall_reward": [1, 2]}
    assert len(service.requests) == 5


def test_repeatedly_failing_function_is_reported_with_message(service: Service) -> None:
    service.answer = lambda path, *rest: (200, {"uuid": "u"}) if "enq" in path else (500, {"message": "no weights"})
    with pytest.raises(RewardError, match=r'"dance_grpo", job u: status 500 .*no weights.*\(6 attempts in a row\)'):
        ask(config(service))


@pytest.mark.parametrize(
    ("enqueued", "pulled", "said"),
    [
        ((200, {"id": 1}), None, r'the response must be {"uuid": …}; got {"id": 1}'),
        ((200, ["uuid"]), None, "the response must be"),
        ((200, {"uuid": None}), None, r'the response must be {"uuid": …}; got {"uuid": null}'),
        ((200, {"uuid": ""}), None, "the response must be"),
        ((200, {"uuid": 7}), None, "the response must be"),
        ((200, {"uuid": "u", "replica_id": "a\r\nX: y"}), None, "a replica_id that is not valid in a header"),
        ((401, {"message": f"Bearer {TOKEN} is bad"}), None, r"status 401 .*\*\*\* is bad.*check REMOTE_REWARD_TOKEN"),
        (
            (200, {"uuid": TOKEN}),
            (404, {"message": "no such job"}),
            r'"dance_grpo", job \*\*\*: status 404 .*no such job',
        ),
        ((200, {"uuid": "u"}), (200, {"scores": {"x": [1, 2]}}), "has no score overall_reward; it has x"),
        ((200, {"uuid": "u"}), (200, {"scores": {"overall_reward": [1]}}), "got 1 scores for 2 clips"),
        ((200, {"uuid": "u"}), (200, {"scores": {"overall_reward": [1, None]}}), "overall_reward.1 is None"),
        ((200, {"uuid": "u"}), (200, {"scores": {"overall_reward": [float("nan"), 1]}}), "overall_reward.0 is nan"),
        ((200, {"uuid": "u"}), (200, {"message": TOKEN}), "scores is missing"),
    ],
)
def test_permanent_failure_is_reported_without_token(
    service: Service, enqueued: tuple[int, Any], pulled: tuple[int, Any], said: str
) -> None:
    service.answer = lambda path, *rest: enqueued if path.endswith("enqueue") else pulled
    with pytest.raises(RewardError, match=said) as error:
        ask(config(service))
    assert TOKEN not in str(error.value)
    assert len(service.requests) == (1 if pulled is None else 2)


@pytest.mark.parametrize("moved", ["enqueue", "pull"])
def test_redirects_are_not_followed(service: Service, moved: str) -> None:
    service.scores(dance_grpo={"overall_reward": [1, 2]})
    answer = service.answer
    service.answer = lambda path, *rest: (
        (302, {}, {"Location": f"{service.url}elsewhere"}) if path.endswith(moved) else answer(path, *rest)
    )
    with pytest.raises(RewardError, match="redirects are not followed"):
        ask(config(service))
    assert not [path for path, _, _ in service.requests if path.endswith("elsewhere")]


@pytest.mark.parametrize("prefix", ["REMOTE_REWARD_", "WFM_REWARD_"])
def test_urls_come_from_either_environment_prefix(
    service: Service, monkeypatch: pytest.MonkeyPatch, prefix: str
) -> None:
    service.scores(dance_grpo={"overall_reward": [1, 2]})
    monkeypatch.delenv("REMOTE_REWARD_TOKEN")
    monkeypatch.setenv("REMOTE_REWARD_URL", "http://127.0.0.1:9/for-texts")
    for name, value in (("ENQUEUE_URL", "enqueue"), ("FETCH_URL", "pull")):
        monkeypatch.setenv(prefix + name, service.url + value)
    monkeypatch.setenv(f"{prefix}TOKEN", "another-token")
    ask(config(service, enqueue_url=None, fetch_url=None))
    assert {headers["Authorization"] for _, headers, _ in service.requests} == {"Bearer another-token"}


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"REMOTE_REWARD_URL": "http://host/texts"}, "set REMOTE_REWARD_ENQUEUE_URL"),
        ({"REMOTE_REWARD_ENQUEUE_URL": "http://host/e"}, r"set REMOTE_REWARD_FETCH_URL .*or reward.fetch_url"),
        ({"REMOTE_REWARD_ENQUEUE_URL": "http://a/e", "WFM_REWARD_ENQUEUE_URL": "http://b/e"}, "have different values"),
        (
            {"REMOTE_REWARD_ENQUEUE_URL": f"http://me:{TOKEN}@h/e", "WFM_REWARD_FETCH_URL": "http://h/f"},
            "must not contain a user name or",
        ),
    ],
)
def test_missing_or_conflicting_urls_are_rejected(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], said: str
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    settings = WorldRewardConfig.model_validate({"services": [{"name": "a", "score_key": "b"}]})
    with pytest.raises(ConfigError, match=said) as error:
        open_scorer(settings)
    assert TOKEN not in str(error.value)
