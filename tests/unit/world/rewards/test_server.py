"""The reward server over a real socket, with hand-written requests and with requests of dsreason's client."""

from __future__ import annotations

import io
import json
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx2
import numpy as np
import pytest
import torch

from dsreason.errors import RewardError
from dsreason.world.rewards.server import Limits, RewardHTTPServer
from dsreason.world.schema import WorldRewardConfig
from dsreason.world.types import WorldRow
from tests.unit.world.rewards.test_service import CLIPS, LATENTS, TOKEN, VIDEO_BODY, ask


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
    """A stand-in for a VAE that keeps 3 of a latent's 4 channels and maps x to x / 2 + 1 / 2."""

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
    server = RewardHTTPServer(("127.0.0.1", 0), FUNCTIONS, **getattr(request, "param", {}))
    with serving(server):
        yield server
    GATE.set()


@contextmanager
def serving(server: RewardHTTPServer) -> Iterator[None]:
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield
    finally:
        server.stop()
        thread.join()


def post(server: RewardHTTPServer, action: str, body: Any, token: str | None = None) -> tuple[int, dict[str, Any]]:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    value = {"data": body} if isinstance(body, dict) else {"content": body}
    answer = httpx2.post(server.url + action, **value, headers=headers, timeout=20)
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
    settings = {"prompts": ["a"] * len(array), "reward_fn": {"level": 1.0}, **head}
    return json.dumps(settings).encode() + b"\n" + buffer.getvalue()


VIDEO = CLIPS.numpy()


def test_recorded_request_is_answered_as_by_service(server: RewardHTTPServer) -> None:
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


def test_scorer_client_receives_scores_from_server(server: RewardHTTPServer) -> None:
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
def test_next_job_is_scored_after_any_exception(server: RewardHTTPServer, name: str, media: str, said: str) -> None:
    array = VIDEO if media == "video" else LATENTS.numpy()
    _, ticket = post(server, "enqueue", body(array, media_type=media, reward_fn={name: 1}))
    status, answer = scored(server, ticket["uuid"], name)
    assert status == 500
    assert re.search(said, answer["message"])
    _, ticket = post(server, "enqueue", body(VIDEO, media_type="video"))
    assert scored(server, ticket["uuid"], "level")[0] == 200


def test_error_responses_are_short_and_hide_secrets(server: RewardHTTPServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", "sk-live-0123456789")
    _, ticket = post(server, "enqueue", body(VIDEO, media_type="video", reward_fn={"telling": 1}))
    status, answer = scored(server, ticket["uuid"], "telling")
    assert status == 500
    assert answer["message"].startswith('reward "telling" failed: ValueError: 401 for Bearer <JUDGE_API_KEY> xxx')
    status, refused = post(server, "enqueue", body(VIDEO, media_type="sk-live-0123456789" + "x" * 100_000))
    assert status == 400
    assert refused["message"].startswith("media_type must be video, image or latent; got '<JUDGE_API_KEY>xxx")
    assert len(answer["message"]) < 2000
    assert len(refused["message"]) < 2000


@pytest.mark.parametrize("server", [{"decoder": Halver()}], indirect=True)
@pytest.mark.parametrize("as_bytes", [False, True])
@pytest.mark.parametrize("head", [{}, {"media_type": "latent"}])
def test_untyped_media_are_read_as_bfloat16_latents(
    server: RewardHTTPServer, head: dict[str, str], as_bytes: bool
) -> None:
    latents = torch.tensor([0.5, -0.25]).view(2, 1, 1, 1, 1).expand(2, 4, 1, 1, 2).contiguous()
    array = latents.to(torch.bfloat16).view(torch.uint8).numpy() if as_bytes else latents.numpy().astype(np.float16)
    status, ticket = post(server, "enqueue", body(array, **head))
    assert status == 200
    assert scored(server, ticket["uuid"], "level")[1]["scores"] == {"level": [0.75, 0.375]}


def test_images_and_their_metadata_reach_functions(server: RewardHTTPServer) -> None:
    images = np.full((2, 4, 5, 3), 51, np.uint8)
    sent = body(images, media_type="image", reward_fn={"tags": 1.0, "level": 1.0}, geneval_tags=[3, 4])
    _, ticket = post(server, "enqueue", sent)
    assert scored(server, ticket["uuid"], "tags")[1]["scores"] == {"tags": [3, 4]}
    assert scored(server, ticket["uuid"], "level")[1]["scores"] == {"level": pytest.approx([0.2, 0.2])}


def test_requests_for_pending_scores_get_400(server: RewardHTTPServer) -> None:
    _, first = post(server, "enqueue", body(VIDEO, media_type="video", reward_fn={"slow": 1}))
    _, second = post(server, "enqueue", body(VIDEO, media_type="video"))
    assert post(server, "pull", {"uuid": first["uuid"], "type": "slow"}) == (
        400,
        {"message": f"Not found scores for {first['uuid']}"},
    )
    assert (
        post(server, "pull", {"uuid": second["uuid"], "type": "level"})[0] == 400
    )  # the functions run one after another
    GATE.set()
    assert scored(server, first["uuid"], "slow")[1]["scores"] == {"slow": [1, 1]}
    assert scored(server, second["uuid"], "level")[0] == 200


@pytest.mark.parametrize("server", [{"limits": Limits(2, 2000, 1000)}], indirect=True)
def test_full_queue_and_large_body_are_rejected(server: RewardHTTPServer) -> None:
    sent = body(VIDEO, media_type="video", reward_fn={"slow": 1})
    tickets = [post(server, "enqueue", sent) for _ in range(3)]
    assert [status for status, _ in tickets] == [200, 200, 503]
    assert post(server, "enqueue", b"x" * 3000) == (
        413,
        {"message": "the body has 3000 bytes, but the maximum is 2000"},
    )
    GATE.set()
    assert [scored(server, ticket["uuid"], "slow")[0] for _, ticket in tickets[:2]] == [200, 200]
    assert post(server, "enqueue", sent)[0] == 200  # there is room in the queue again


PICKLED = io.BytesIO()
np.save(PICKLED, np.array([{"a": 1}], dtype=object), allow_pickle=True)


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (b"{}", "must end with a line break"),
        (b"{]\n", "the first line is not JSON"),
        (b"[1]\n", "not a JSON object"),
        (body(VIDEO, media_type="audio"), "media_type must be video, image or latent; got 'audio'"),
        (body(VIDEO), "this server cannot decode latents"),
        (body(VIDEO, media_type="image"), "image must have 4 axes"),
        (
            body(np.ones((0, 3, 2, 4, 4), np.uint8), media_type="video"),
            r"video must not have an axis of length 0; got shape .0, 3, 2, 4, 4.",
        ),
        (
            body(VIDEO[:, :2], media_type="video"),
            r"video must be uint8 with 3 .*; got uint8 with shape .2, 2, 2, 2, 2.",
        ),
        (
            body(VIDEO[..., 0], media_type="image"),
            r"image must be uint8 with 3 channels, .*; got uint8 with shape .2, 3, 2, 2.",
        ),
        (body(np.ones((2, 4, 4, 4), np.uint8), media_type="image"), "must be uint8 with 3 channels"),
        (
            body(VIDEO / np.float32(255), media_type="video"),
            r"must be uint8 with 3 channels, .*; got float32",
        ),
        (body(VIDEO.astype(np.int16), media_type="video"), "must be uint8 with 3 channels, .*; got int16"),
        (body(np.ones((2, 4, 4, 3)), media_type="image"), "must be uint8 with 3 channels, .*; got float64"),
        (body(VIDEO, media_type="video", prompts=["a"]), "1 prompts for 2 clips"),
        (body(VIDEO, media_type="video", prompts="ab"), "prompts must be a list"),
        (body(VIDEO, media_type="video", video_infos=[{}]), "video_infos must be a list of 2 objects"),
        (body(VIDEO, media_type="video", reward_fn={"hps": 1}), "'hps' is not served; choose from level, facts"),
        (body(VIDEO, media_type="video", reward_fn={"level": 0}), "has no function with a positive weight"),
        (body(VIDEO, media_type="video", reward_fn=["level"]), "reward_fn must be an object"),
        (body(VIDEO, media_type="video", reward_fn={"level": 10**400}), "reward_fn must be an object"),
        (body(VIDEO, media_type="video", reward_fn={"level": float("inf")}), "the first line is not JSON"),
        (body(VIDEO, media_type="video", video_infos=[{"video_fps": float("nan")}] * 2), "the first line is not JSON"),
        (body(VIDEO, media_type="video", fps=1).replace(b'"fps": 1', b'"fps": 1e999'), "the first line is not JSON"),
        (body(VIDEO, media_type="video")[:-1], "needs 48 bytes, but 47 were sent"),
        (b"{}\n" + b"x" * 200, "the array after the JSON: not a .npy array"),
        (b"{}\n\x93NUMPY\x01\x00\x0b\x00{'descr': (", "the array after the JSON: not a .npy array"),
        (b"{}\n" + PICKLED.getvalue(), "must have an integer or floating-point dtype"),
        (b"{}\n" + VIDEO_BODY.partition(b"\n")[2].replace(b"(2, 3, 2, 2, 2)", b"(2, 3, 2, 2, 9)"), "needs 216"),
        (
            b"{}\n" + VIDEO_BODY.partition(b"\n")[2].replace(b"(2, 3, 2, 2, 2)", b"(-2, 3, -2,2,2)"),
            "invalid shape: .-2, 3,",
        ),
    ],
)
def test_unusable_body_is_rejected_with_reason(server: RewardHTTPServer, sent: bytes, said: str) -> None:
    status, answer = post(server, "enqueue", sent)
    assert status == 400
    assert re.search(said, answer["message"])
    assert post(server, "enqueue", body(VIDEO, media_type="video"))[0] == 200  # its room is free again


@pytest.mark.parametrize("server", [{"token": TOKEN}], indirect=True)
@pytest.mark.parametrize("given", [None, "wrong", TOKEN[:-1]])
def test_requests_without_valid_token_get_401(server: RewardHTTPServer, given: str | None) -> None:
    for action in ("ping", "enqueue", "pull", "push", "latent_attr"):
        status, answer = post(server, action, body(VIDEO, media_type="video"), given)
        assert status == 401
        assert answer["message"].startswith("the token is wrong" if given else "a token is required")
    assert post(server, "enqueue", body(VIDEO, media_type="video"), TOKEN)[0] == 200


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
def test_server_listens_on_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "::1")
    server = RewardHTTPServer(("::1", 0), FUNCTIONS)
    assert server.url.startswith("http://[::1]:")
    with serving(server):
        assert post(server, "ping", {"info_data": "{}"})[0] == 200


@pytest.mark.parametrize(
    ("line", "status", "message"),
    [
        ("GET /api/reward/ping HTTP/1.1", 405, "Method Not Allowed"),
        ("HEAD /api/reward/ping HTTP/1.1", 405, None),
        ("POST /elsewhere HTTP/1.1", 404, "the URL does not exist"),
        ("POST /api/reward/ HTTP/1.1", 404, "the URL does not exist"),
    ],
)
def test_server_errors_are_json(server: RewardHTTPServer, line: str, status: int, message: str | None) -> None:
    head, content = send_raw(server, line)
    assert head.startswith(f"HTTP/1.1 {status} ")
    assert "content-type: application/json" in head
    assert (content == "") if message is None else message in json.loads(content)["message"]


@pytest.mark.parametrize("line", ["nonsense", "POST /api/reward/ping HTTP/9.9x"])
def test_malformed_http_is_rejected(server: RewardHTTPServer, line: str) -> None:
    assert send_raw(server, line)[0].startswith("HTTP/1.1 400 ")
    assert post(server, "ping", {})[0] == 200


def send_raw(server: RewardHTTPServer, line: str) -> tuple[str, str]:
    """Send a request with this request line and only the necessary headers; return the response's head and body."""
    with socket.create_connection(server.address, 20) as connection:
        connection.sendall(f"{line}\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    head, _, content = answer.decode().partition("\r\n\r\n")
    return head, content


def test_invalid_forms_get_an_error_status(server: RewardHTTPServer) -> None:
    assert post(server, "pull", {"type": "level"}) == (400, {"message": "the form has no uuid"})
    assert post(server, "pull", {"uuid": "nobody", "type": "level"})[0] == 404
    assert post(server, "push", {"uuid": "nobody", "scores": "{}", "type": "x"})[0] == 404
    assert post(server, "latent_attr", {"fields": "{}"})[0] == 501
    assert post(server, "elsewhere", {})[0] == 404


def test_remote_worker_can_deliver_scores(server: RewardHTTPServer) -> None:
    _, ticket = post(server, "enqueue", body(VIDEO, media_type="video", reward_fn={"slow": 1, "facts": 1}))
    for values in ([0.0, 0.0], [1.0, 2.0]):
        pushed = {"scores": {"facts": values}}
        form = {"uuid": ticket["uuid"], "scores": json.dumps(pushed), "type": "facts"}
        assert post(server, "push", form) == (200, {"message": "Scores received and stored successfully"})
        assert post(server, "pull", {"uuid": ticket["uuid"], "type": "facts"}) == (200, pushed)
    GATE.set()
    assert scored(server, ticket["uuid"], "slow")[0] == 200
    assert post(server, "pull", {"uuid": ticket["uuid"], "type": "facts"}) == (200, pushed)
    for name in ("hps", "level"):
        message = {"message": f"the job did not request the reward function '{name}'"}
        assert post(server, "push", form | {"type": name}) == (404, message)
    for unusable in ("{", '{"x": [NaN]}', '{"x": [1e999]}'):
        assert post(server, "push", form | {"scores": unusable})[0] == 400
