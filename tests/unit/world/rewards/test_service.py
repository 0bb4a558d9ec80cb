"""The client of the reward service and our server, on bytes written by hand, over a real socket."""

from __future__ import annotations

import io
import json
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs

import httpx2
import numpy as np
import pytest
import torch

from dsreason.config.schema_world import WorldRewardConfig
from dsreason.errors import ConfigError, RewardError
from dsreason.world.rewards.scorer import open_scorer
from dsreason.world.rewards.server import Limits, RewardHTTPServer
from dsreason.world.rewards.service import RewardService, service_total
from dsreason.world.types import WorldRow

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
"""A request as cosmos-rl's client writes it: JSON in a line, and what numpy saves."""

Answers = Callable[[str, dict[str, str], bytes], tuple[int, Any] | tuple[int, Any, dict[str, str]]]


class Service:
    """Records requests and answers with what `answer(path, headers, body)` gives."""

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

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/api/reward/"

    def scores(self, not_yet: int = 0, **scores: dict[str, list[float]]) -> None:
        """Answer as the service does: after so many 400s for each function, the scores."""
        left = dict.fromkeys(scores, not_yet)

        def answer(path: str, headers: dict[str, str], body: bytes) -> tuple[int, Any]:
            if path.endswith("enqueue"):
                return 200, {"uuid": "job-1", "replica_id": "replica-7"}
            name = parse_qs(body.decode())["type"][0]
            left[name] -= 1
            if left[name] >= 0:
                return 400, {"message": "Not found scores for job-1"}
            return 200, {"scores": scores[name], "input_info": {}, "duration": "2.23", "type": name}

        self.answer = answer


def running(http: ThreadingHTTPServer) -> Iterator[None]:
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


def test_a_request_has_these_bytes(service: Service) -> None:
    service.scores(dance_grpo={"overall_reward": [0.5, -1.0], "vq_reward": [9, 9]})
    assert ask(config(service)) == {"dance_grpo/overall_reward": [0.5, -1.0]}
    (path, headers, body), (pull_path, pull_headers, pull_body) = service.requests
    assert (path, body) == ("/api/reward/enqueue", VIDEO_BODY)
    assert headers["Content-Type"] == "application/octet-stream"
    assert headers["Authorization"] == pull_headers["Authorization"] == f"Bearer {TOKEN}"
    assert (pull_path, pull_body) == ("/api/reward/pull", b"uuid=job-1&type=dance_grpo")
    assert pull_headers["Content-Type"] == "application/x-www-form-urlencoded"
    assert pull_headers["X-Lepton-Replica-Target"] == "replica-7"


def test_latents_are_sent_as_float16_and_called_so(service: Service) -> None:
    service.scores(dance_grpo={"overall_reward": [1, 2]})
    with open_scorer(config(service, media="latent")) as scorer:
        scorer.start(CLIPS, LATENTS, ROWS, 16.0).result()
    head, _, array = service.requests[0][2].partition(b"\n")
    assert json.loads(head)["media_type"] == "latent"
    sent = np.load(io.BytesIO(array), allow_pickle=False)
    assert sent.dtype == np.float16
    assert np.array_equal(sent, LATENTS.numpy().astype(np.float16))


def test_a_400_means_not_yet_and_each_function_is_asked_for_once_it_is_there(service: Service) -> None:
    service.scores(3, dance_grpo={"vq_reward": [1, 2], "mq_reward": [3, 4]}, ocr={"ocr_reward": [0, 1]})
    scores = ({"name": "dance_grpo", "score_key": "vq_reward+mq_reward"}, {"name": "ocr", "score_key": "ocr_reward"})
    assert ask(config(service, *scores)) == {
        "dance_grpo/vq_reward": [1, 2],
        "dance_grpo/mq_reward": [3, 4],
        "ocr/ocr_reward": [0, 1],
    }
    assert json.loads(service.requests[0][2].partition(b"\n")[0])["reward_fn"] == {"dance_grpo": 1.0, "ocr": 1.0}
    assert [path.rpartition("/")[2] for path, _, _ in service.requests] == ["enqueue"] + ["pull"] * 8


def test_a_weight_of_0_is_not_sent_since_the_service_would_leave_the_function_out(service: Service) -> None:
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
def test_weights_clips_and_scale(
    scores: tuple[dict[str, Any], ...], scale: float, values: dict[str, list[float]], total: float
) -> None:
    settings = WorldRewardConfig.model_validate({"services": scores, "scale": scale})
    assert service_total(settings, values).tolist() == pytest.approx([total])


def test_a_scorer_adds_the_service_to_functions_while_the_caller_goes_on(service: Service) -> None:
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


def test_a_dropped_job_ends_in_an_error_that_says_how_long_and_where(service: Service) -> None:
    service.scores(10_000, dance_grpo={})
    with pytest.raises(RewardError) as error:
        ask(config(service, time_limit=0.5))
    assert all(
        text in str(error.value)
        for text in (
            f"reward service {service.url}pull, clips of X",
            'no scores of "dance_grpo" within 0.5 s',
            'the last answer to job job-1 was status 400 ({"message": "Not found scores for job-1"})',
            "raise reward.time_limit",
        )
    )


def test_a_service_that_does_not_answer_is_given_up_in_time(service: Service) -> None:
    service.answer = lambda *request: (time.sleep(2), (200, {}))[1]
    with pytest.raises(RewardError, match=r"enqueue, clips of X: no answer within 0.\d+ s \(1 attempts within 0.4 s\)"):
        ask(config(service, time_limit=0.4))


@pytest.mark.parametrize("status", [500, 503, 429])
def test_failures_that_may_pass_are_tried_again(service: Service, status: int) -> None:
    service.scores(dance_grpo={"overall_reward": [1, 2]})
    answer, failures = service.answer, iter([True, False, True, True])
    service.answer = lambda *request: (status, {}) if next(failures, False) else answer(*request)
    assert ask(config(service)) == {"dance_grpo/overall_reward": [1, 2]}
    assert len(service.requests) == 5


def test_a_function_that_keeps_failing_is_given_up_with_what_the_service_says(service: Service) -> None:
    service.answer = lambda path, *rest: (200, {"uuid": "u"}) if "enq" in path else (500, {"message": "no weights"})
    with pytest.raises(RewardError, match=r'"dance_grpo", job u: status 500 .*no weights.*\(6 attempts in a row\)'):
        ask(config(service))


@pytest.mark.parametrize(
    ("enqueued", "pulled", "said"),
    [
        ((200, {"id": 1}), None, r'the response is not {"uuid": …}: {"id": 1}'),
        ((200, ["uuid"]), None, "the response is not"),
        ((200, {"uuid": None}), None, r'the response is not {"uuid": …}: {"uuid": null}'),
        ((200, {"uuid": ""}), None, "the response is not"),
        ((200, {"uuid": 7}), None, "the response is not"),
        ((200, {"uuid": "u", "replica_id": "a\r\nX: y"}), None, "a replica_id that no header can hold"),
        ((401, {"message": f"Bearer {TOKEN} is bad"}), None, r"status 401 .*\*\*\* is bad.*check REMOTE_REWARD_TOKEN"),
        (
            (200, {"uuid": TOKEN}),
            (404, {"message": "no such job"}),
            r'"dance_grpo", job \*\*\*: status 404 .*no such job',
        ),
        ((200, {"uuid": "u"}), (200, {"scores": {"x": [1, 2]}}), "has no score overall_reward; it has x"),
        ((200, {"uuid": "u"}), (200, {"scores": {"overall_reward": [1]}}), "1 numbers for 2 clips"),
        ((200, {"uuid": "u"}), (200, {"scores": {"overall_reward": [1, None]}}), "overall_reward.1 is None"),
        ((200, {"uuid": "u"}), (200, {"scores": {"overall_reward": [float("nan"), 1]}}), "overall_reward.0 is nan"),
        ((200, {"uuid": "u"}), (200, {"message": TOKEN}), "scores is missing"),
    ],
)
def test_what_is_wrong_for_good_is_told_at_once_and_without_the_token(
    service: Service, enqueued: tuple[int, Any], pulled: tuple[int, Any], said: str
) -> None:
    service.answer = lambda path, *rest: enqueued if path.endswith("enqueue") else pulled
    with pytest.raises(RewardError, match=said) as error:
        ask(config(service))
    assert TOKEN not in str(error.value)
    assert len(service.requests) == (1 if pulled is None else 2)


@pytest.mark.parametrize("moved", ["enqueue", "pull"])
def test_no_redirect_is_followed_since_it_would_carry_the_token_away(service: Service, moved: str) -> None:
    service.scores(dance_grpo={"overall_reward": [1, 2]})
    answer = service.answer
    service.answer = lambda path, *rest: (
        (302, {}, {"Location": f"{service.url}elsewhere"}) if path.endswith(moved) else answer(path, *rest)
    )
    with pytest.raises(RewardError, match="redirects are not followed"):
        ask(config(service))
    assert not [path for path, _, _ in service.requests if path.endswith("elsewhere")]


@pytest.mark.parametrize("prefix", ["REMOTE_REWARD_", "WFM_REWARD_"])
def test_addresses_come_from_the_environment_under_both_names(
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
        ({"REMOTE_REWARD_ENQUEUE_URL": "http://a/e", "WFM_REWARD_ENQUEUE_URL": "http://b/e"}, "are set and differ"),
        ({"REMOTE_REWARD_ENQUEUE_URL": f"http://me:{TOKEN}@h/e", "WFM_REWARD_FETCH_URL": "http://h/f"}, "no user and"),
    ],
)
def test_addresses_that_are_missing_or_contradict_are_told_before_the_run(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], said: str
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    settings = WorldRewardConfig.model_validate({"services": [{"name": "a", "score_key": "b"}]})
    with pytest.raises(ConfigError, match=said) as error:
        open_scorer(settings)
    assert TOKEN not in str(error.value)


# ---------------------------------------------------------------- our server


def level(clips: torch.Tensor, samples: list[WorldRow]) -> torch.Tensor:
    return clips.mean(dim=(1, 2, 3, 4))


def facts(clips: torch.Tensor, samples: list[WorldRow]) -> dict[str, list[float]]:
    return {"length": [len(row.prompt) for row in samples], "fps": [row.meta["fps"] for row in samples]}


def tags(clips: torch.Tensor, samples: list[WorldRow]) -> list[float]:
    return [float(row.meta["geneval_tags"]) for row in samples]


def broken(clips: torch.Tensor, samples: list[WorldRow]) -> list[float]:
    raise ValueError("no weights")


def leaving(clips: torch.Tensor, samples: list[WorldRow]) -> list[float]:
    sys.exit("no license")


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError


def unspeakable(clips: torch.Tensor, samples: list[WorldRow]) -> list[float]:
    raise Unspeakable


def telling(clips: torch.Tensor, samples: list[WorldRow]) -> list[float]:
    raise ValueError(f"401 for Bearer {os.environ['JUDGE_API_KEY']} " + "x" * 100_000)


GATE = threading.Event()


def slow(clips: torch.Tensor, samples: list[WorldRow]) -> list[float]:
    GATE.wait(20)
    return [1.0] * len(samples)


FUNCTIONS = {
    function.__name__: function for function in (level, facts, tags, broken, slow, leaving, unspeakable, telling)
}


class Halver:
    """Stands in for a VAE: a latent of 4 channels becomes 3, at half its value plus a half."""

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        assert latents.dtype == torch.float32
        return latents[:, :3] / 2 + 0.5


class Broken:
    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        sys.exit("no such latents")


@pytest.fixture
def server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[RewardHTTPServer]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    GATE.clear()
    served = RewardHTTPServer(("127.0.0.1", 0), FUNCTIONS, **getattr(request, "param", {}))
    for _ in running(served):
        yield served
    GATE.set()


def post(server: RewardHTTPServer, action: str, body: Any, token: str | None = None) -> tuple[int, dict[str, Any]]:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    given = {"data": body} if isinstance(body, dict) else {"content": body}
    answer = httpx2.post(server.url + action, **given, headers=headers, timeout=20)
    return answer.status_code, answer.json()


def scored(server: RewardHTTPServer, uuid: str, name: str) -> tuple[int, dict[str, Any]]:
    for _ in range(500):
        status, answer = post(server, "pull", {"uuid": uuid, "type": name})
        if status != 400:
            return status, answer
        time.sleep(0.01)
    raise AssertionError("no scores")


def body(array: np.ndarray, **head: Any) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    given = {"prompts": ["a"] * len(array), "reward_fn": {"level": 1.0}, **head}
    return json.dumps(given).encode() + b"\n" + buffer.getvalue()


VIDEO = CLIPS.numpy()


def test_the_recorded_request_is_answered_as_the_service_answers(server: RewardHTTPServer) -> None:
    status, ticket = post(
        server, "enqueue", VIDEO_BODY.replace(b'{"dance_grpo": 2.0}', b'{"level": 2.0, "facts": 1, "x": 0}')
    )
    assert status == 200
    assert ticket.keys() == {"uuid"}
    status, answer = scored(server, ticket["uuid"], "level")
    assert status == 200
    assert answer["scores"] == {"level": pytest.approx([11.5 / 255, 35.5 / 255])}
    assert answer["type"] == "level"
    assert answer["input_info"] == {
        "shape": [2, 3, 2, 2, 2],
        "dtype": "torch.uint8",
        "min": "0.000",
        "max": "47.000",
        "video_infos": [{"video_fps": 16.0}] * 2,
    }
    assert {"duration", "decoded_duration"} < answer.keys()
    assert scored(server, ticket["uuid"], "facts")[1]["scores"] == {"length": [10, 14], "fps": [16.0, 16.0]}
    assert scored(server, ticket["uuid"], "x")[0] == 404
    assert post(server, "ping", {"info_data": "{}"}) == (200, {"message": "Ping request received"})


def test_our_client_and_our_server_understand_each_other(server: RewardHTTPServer) -> None:
    scores = ({"name": "level", "score_key": "level"}, {"name": "facts", "score_key": "length+fps", "clip_max": 100})
    settings = WorldRewardConfig.model_validate(
        {"services": scores, "enqueue_url": server.url + "enqueue", "fetch_url": server.url + "pull", "time_limit": 20}
    )
    assert ask(settings) == {
        "level/level": pytest.approx([11.5 / 255, 35.5 / 255]),
        "facts/length": [10, 14],
        "facts/fps": [16, 16],
    }
    failing = settings.model_copy(update={"services": (settings.services[0].model_copy(update={"name": "broken"}),)})
    with pytest.raises(RewardError, match=r'reward ."broken." failed: ValueError: no weights.*6 attempts in a row'):
        ask(failing)


@pytest.mark.parametrize("server", [{"decoder": Broken()}], indirect=True)
@pytest.mark.parametrize(
    ("name", "media", "said"),
    [
        ("leaving", "video", "SystemExit: no license"),
        ("unspeakable", "video", r"Unspeakable: .* failed"),
        ("level", "latent", "SystemExit: no such latents"),
    ],
)
def test_whatever_a_function_raises_the_next_job_is_scored(
    server: RewardHTTPServer, name: str, media: str, said: str
) -> None:
    array = VIDEO if media == "video" else LATENTS.numpy()
    _, ticket = post(server, "enqueue", body(array, media_type=media, reward_fn={name: 1}))
    status, answer = scored(server, ticket["uuid"], name)
    assert status == 500
    assert re.search(said, answer["message"])
    _, ticket = post(server, "enqueue", body(VIDEO, media_type="video"))
    assert scored(server, ticket["uuid"], "level")[0] == 200


def test_no_answer_holds_a_secret_of_the_servers_or_is_long(
    server: RewardHTTPServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", "sk-live-0123456789")
    _, ticket = post(server, "enqueue", body(VIDEO, media_type="video", reward_fn={"telling": 1}))
    status, answer = scored(server, ticket["uuid"], "telling")
    assert status == 500
    assert answer["message"].startswith('reward "telling" failed: ValueError: 401 for Bearer <JUDGE_API_KEY> xxx')
    status, refused = post(server, "enqueue", body(VIDEO, media_type="sk-live-0123456789" + "x" * 100_000))
    assert status == 400
    assert refused["message"].startswith("media_type is '<JUDGE_API_KEY>xxx")
    assert len(answer["message"]) < 2000
    assert len(refused["message"]) < 2000


@pytest.mark.parametrize("server", [{"decoder": Halver()}], indirect=True)
@pytest.mark.parametrize("as_bytes", [False, True])
@pytest.mark.parametrize("head", [{}, {"media_type": "latent"}])
def test_without_a_media_type_they_are_latents_and_bytes_are_bfloat16(
    server: RewardHTTPServer, head: dict[str, str], as_bytes: bool
) -> None:
    latents = torch.tensor([0.5, -0.25]).view(2, 1, 1, 1, 1).expand(2, 4, 1, 1, 2).contiguous()
    array = latents.to(torch.bfloat16).view(torch.uint8).numpy() if as_bytes else latents.numpy().astype(np.float16)
    status, ticket = post(server, "enqueue", body(array, **head))
    assert status == 200
    assert scored(server, ticket["uuid"], "level")[1]["scores"] == {"level": [0.75, 0.375]}


def test_images_and_what_is_said_of_each_reach_the_functions(server: RewardHTTPServer) -> None:
    images = np.full((2, 4, 5, 3), 51, np.uint8)
    sent = body(images, media_type="image", reward_fn={"tags": 1.0, "level": 1.0}, geneval_tags=[3, 4])
    _, ticket = post(server, "enqueue", sent)
    assert scored(server, ticket["uuid"], "tags")[1]["scores"] == {"tags": [3, 4]}
    assert scored(server, ticket["uuid"], "level")[1]["scores"] == {"level": pytest.approx([0.2, 0.2])}


def test_scores_are_400_until_they_are_there_and_functions_run_off_the_request_thread(server: RewardHTTPServer) -> None:
    _, first = post(server, "enqueue", body(VIDEO, media_type="video", reward_fn={"slow": 1}))
    _, second = post(server, "enqueue", body(VIDEO, media_type="video"))
    assert post(server, "pull", {"uuid": first["uuid"], "type": "slow"}) == (
        400,
        {"message": f"Not found scores for {first['uuid']}"},
    )
    assert post(server, "pull", {"uuid": second["uuid"], "type": "level"})[0] == 400  # one after the other
    GATE.set()
    assert scored(server, first["uuid"], "slow")[1]["scores"] == {"slow": [1, 1]}
    assert scored(server, second["uuid"], "level")[0] == 200


@pytest.mark.parametrize("server", [{"limits": Limits(2, 2000, 1000)}], indirect=True)
def test_a_full_queue_and_a_large_body_are_refused_and_nothing_is_dropped(server: RewardHTTPServer) -> None:
    sent = body(VIDEO, media_type="video", reward_fn={"slow": 1})
    tickets = [post(server, "enqueue", sent) for _ in range(3)]
    assert [status for status, _ in tickets] == [200, 200, 503]
    assert post(server, "enqueue", b"x" * 3000) == (413, {"message": "the body has 3000 bytes, at most 2000 are taken"})
    GATE.set()
    assert [scored(server, ticket["uuid"], "slow")[0] for _, ticket in tickets[:2]] == [200, 200]
    assert post(server, "enqueue", sent)[0] == 200  # there is room again


PICKLED = io.BytesIO()
np.save(PICKLED, np.array([{"a": 1}], dtype=object), allow_pickle=True)


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (b"{}", "no line break"),
        (b"{]\n", "the first line is not JSON"),
        (b"[1]\n", "not a JSON object"),
        (body(VIDEO, media_type="audio"), "media_type is 'audio'"),
        (body(VIDEO), "latents cannot be decoded here"),
        (body(VIDEO, media_type="image"), "it must have 4 axes"),
        (body(VIDEO[:, :2], media_type="video"), r"video of shape .2, 2, 2, 2, 2. and type uint8; .*3 channels, uint8"),
        (body(VIDEO[..., 0], media_type="image"), r"image of shape .2, 3, 2, 2. and type uint8; .*3 channels, uint8"),
        (body(np.ones((2, 4, 4, 4), np.uint8), media_type="image"), "3 channels, uint8"),
        (
            body(VIDEO / np.float32(255), media_type="video"),
            r"and type float32; it must have 3 channels, uint8 0 to 255",
        ),
        (body(VIDEO.astype(np.int16), media_type="video"), "and type int16; it must have 3 channels, uint8 0 to 255"),
        (body(np.ones((2, 4, 4, 3)), media_type="image"), "and type float64; it must have 3 channels, uint8 0 to 255"),
        (body(VIDEO, media_type="video", prompts=["a"]), "1 prompts for 2 clips"),
        (body(VIDEO, media_type="video", prompts="ab"), "prompts must be a list"),
        (body(VIDEO, media_type="video", video_infos=[{}]), "video_infos must be a list of 2 objects"),
        (body(VIDEO, media_type="video", reward_fn={"hps": 1}), "no reward function 'hps'; served are level, facts"),
        (body(VIDEO, media_type="video", reward_fn={"level": 0}), "names no function of positive weight"),
        (body(VIDEO, media_type="video", reward_fn=["level"]), "reward_fn must be an object"),
        (body(VIDEO, media_type="video", reward_fn={"level": 10**400}), "reward_fn must be an object"),
        (body(VIDEO, media_type="video", reward_fn={"level": float("inf")}), "the first line is not JSON"),
        (body(VIDEO, media_type="video", video_infos=[{"video_fps": float("nan")}] * 2), "the first line is not JSON"),
        (body(VIDEO, media_type="video", fps=1).replace(b'"fps": 1', b'"fps": 1e999'), "the first line is not JSON"),
        (body(VIDEO, media_type="video")[:-1], "should have 48 bytes, there are 47"),
        (b"{}\n" + b"x" * 200, "what follows the JSON: not a .npy array"),
        (b"{}\n\x93NUMPY\x01\x00\x0b\x00{'descr': (", "what follows the JSON: not a .npy array"),
        (b"{}\n" + PICKLED.getvalue(), "it must be one of plain numbers"),
        (b"{}\n" + VIDEO_BODY.partition(b"\n")[2].replace(b"(2, 3, 2, 2, 2)", b"(2, 3, 2, 2, 9)"), "should have 216"),
        (b"{}\n" + VIDEO_BODY.partition(b"\n")[2].replace(b"(2, 3, 2, 2, 2)", b"(-2, 3, -2,2,2)"), "array"),
    ],
)
def test_a_body_that_cannot_be_used_is_refused_with_the_reason(
    server: RewardHTTPServer, sent: bytes, said: str
) -> None:
    status, answer = post(server, "enqueue", sent)
    assert status == 400
    assert re.search(said, answer["message"])
    assert post(server, "enqueue", body(VIDEO, media_type="video"))[0] == 200  # and its room is given back


@pytest.mark.parametrize("server", [{"token": TOKEN}], indirect=True)
@pytest.mark.parametrize("given", [None, "wrong", TOKEN[:-1]])
def test_without_the_right_token_nothing_is_done(server: RewardHTTPServer, given: str | None) -> None:
    for action in ("ping", "enqueue", "pull", "push", "latent_attr"):
        status, answer = post(server, action, body(VIDEO, media_type="video"), given)
        assert status == 401
        assert answer["message"].startswith("the token is wrong" if given else "a token is required")
    assert post(server, "enqueue", body(VIDEO, media_type="video"), TOKEN)[0] == 200


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
def test_it_listens_at_an_address_of_ipv6_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "::1,[::1]")
    served = RewardHTTPServer(("::1", 0), FUNCTIONS)
    assert served.url.startswith("http://[::1]:")
    for _ in running(served):
        assert post(served, "ping", {"info_data": "{}"})[0] == 200


@pytest.mark.parametrize(
    ("line", "status"),
    [
        ("GET /api/reward/ping HTTP/1.1", 501),
        ("HEAD /api/reward/ping HTTP/1.1", 501),
        ("nonsense", 400),
        ("POST /api/reward/ping HTTP/9.9", 505),
        (f"POST /{'x' * 70_000} HTTP/1.1", 414),
    ],
)
def test_every_answer_is_json(server: RewardHTTPServer, line: str, status: int) -> None:
    with socket.create_connection(server.server_address[:2], 20) as connection:
        connection.sendall(f"{line}\r\n\r\n".encode())
        head, _, content = b"".join(iter(lambda: connection.recv(65536), b"")).partition(b"\r\n\r\n")
    assert head.startswith(f"HTTP/1.1 {status} ".encode())
    assert b"Content-Type: application/json" in head
    assert (content == b"") if line.startswith("HEAD") else json.loads(content)["message"]


def test_forms_that_cannot_be_answered(server: RewardHTTPServer) -> None:
    assert post(server, "pull", {"type": "level"}) == (400, {"message": "the form has no uuid"})
    assert post(server, "pull", {"uuid": "nobody", "type": "level"})[0] == 404
    assert post(server, "push", {"uuid": "nobody", "scores": "{}", "type": "x"})[0] == 404
    assert post(server, "latent_attr", {"fields": "{}"})[0] == 501
    assert post(server, "elsewhere", {})[0] == 404


def test_a_worker_elsewhere_can_deliver_scores(server: RewardHTTPServer) -> None:
    _, ticket = post(server, "enqueue", body(VIDEO, media_type="video"))
    pushed = {"scores": {"hps": [1.0, 2.0]}}
    form = {"uuid": ticket["uuid"], "scores": json.dumps(pushed), "type": "hps"}
    assert post(server, "push", form) == (200, {"message": "Scores received and stored successfully"})
    assert post(server, "pull", {"uuid": ticket["uuid"], "type": "hps"}) == (200, pushed)
    for unusable in ("{", '{"x": [NaN]}', '{"x": [1e999]}'):
        assert post(server, "push", form | {"scores": unusable})[0] == 400
