"""A small reward service, compatible with cosmos-rl's: functions of a file, over HTTP. The bytes are described in `wire.py`.

    POST /api/reward/ping          a form with info_data
    POST /api/reward/enqueue       → {"uuid": …}; 400 says what is wrong with the body, 503 that the queue is full
    POST /api/reward/pull          → the scores; 400 not yet, 404 no such job or function, 500 the function failed
    POST /api/reward/push          scores of a job from a worker elsewhere
    POST /api/reward/latent_attr   501: the decoder is chosen when the server starts

Every answer is JSON; errors are {"message": …}. Where the server has a token, requests without it are answered 401.
"""

from __future__ import annotations

import hmac
import json
import logging
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs

from dsreason.secrets import hide_secrets
from dsreason.world.rewards.functions import ClipReward
from dsreason.world.rewards.jobs import Decoder, Jobs, score_jobs, wanted
from dsreason.world.rewards.wire import read_body, strict_json

log = logging.getLogger(__name__)

PREFIX = "/api/reward/"
MAX_FORM_BYTES = 16 * 2**20
PIECE = 2**20
MOST_SAID = 1000
"""Characters of a message."""
SOCKET_LIMIT = 60.0
"""Seconds without a byte after which a connection is closed."""
RETRY_AFTER = "2"
"""Seconds that a client should wait where the queue is full."""

Answer = tuple[int, dict[str, Any]]


@dataclass(frozen=True)
class Limits:
    """Example: `Limits(most_waiting=60, body_bytes=4 * 2**30, queue_bytes=16 * 2**30)`."""

    most_waiting: int = 60
    """Requests that wait or are being scored."""
    body_bytes: int = 4 * 2**30
    """Of one request."""
    queue_bytes: int = 16 * 2**30
    """Of all those together."""


class RewardHTTPServer(ThreadingHTTPServer):
    """Serves `functions`; each request of a client has a thread, the functions have one together."""

    daemon_threads = True

    def __init__(
        self,
        address: tuple[str, int],
        functions: Mapping[str, ClipReward],
        *,
        token: str | None = None,
        decoder: Decoder | None = None,
        limits: Limits = Limits(),
    ) -> None:
        self.functions, self.token, self.decoder, self.limits = functions, token, decoder, limits
        self.jobs = Jobs(limits.most_waiting, limits.queue_bytes)
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, Handler)
        threading.Thread(
            target=score_jobs, args=(self.jobs, functions, decoder), name="reward functions", daemon=True
        ).start()

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.info("a request from %s broke off: %s", client_address[0], sys.exception())

    @property
    def url(self) -> str:
        host, port = self.server_address[:2]
        return f"http://[{host!s}]:{port}{PREFIX}" if ":" in str(host) else f"http://{host!s}:{port}{PREFIX}"


class Handler(BaseHTTPRequestHandler):
    server: RewardHTTPServer
    protocol_version = "HTTP/1.1"
    default_request_version = "HTTP/1.0"  # to a line that says none; 0.9's answers have no status
    timeout = SOCKET_LIMIT

    def do_POST(self) -> None:
        action = self.path.partition("?")[0].removeprefix(PREFIX)
        handler = ACTIONS.get(action) if self.path.startswith(PREFIX) else None
        try:
            size = int(self.headers.get("Content-Length", ""))
        except ValueError:
            self._refuse(411, "the request has no Content-Length", 0)
            return
        if handler is None:
            self._refuse(404, f"no such address; there are {', '.join(PREFIX + name for name in ACTIONS)}", size)
        elif not self._is_allowed():
            given = "the token is wrong" if "Authorization" in self.headers else "a token is required"
            self._refuse(401, f"{given}; send it as Authorization: Bearer …", size)
        elif size > (most := self.server.limits.body_bytes if action == "enqueue" else MAX_FORM_BYTES) or size < 0:
            self._refuse(413, f"the body has {size} bytes, at most {most} are taken", size)
        elif action == "enqueue" and not self.server.jobs.reserve(size):
            self._refuse(503, "the queue is full; ask again later", size, {"Retry-After": RETRY_AFTER})
        else:
            self._answer(*handler(self, size))

    def _is_allowed(self) -> bool:
        """In a time that does not depend on how much of the token is right."""
        if self.server.token is None:
            return True
        given = self.headers.get("Authorization", "")
        return hmac.compare_digest(given.encode(), f"Bearer {self.server.token}".encode())

    def _refuse(self, status: int, text: str, size: int, headers: Mapping[str, str] | None = None) -> None:
        """Answer without the body. It is received all the same: a client that is still sending would not see the answer."""
        left = min(max(size, 0), self.server.limits.body_bytes)
        while left > 0 and (piece := self.rfile.read(min(left, PIECE))):
            left -= len(piece)
        self.close_connection = True
        self._answer(status, {"message": text}, {"Connection": "close", **(headers or {})})

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Called by the base class, such as for another method than POST."""
        text = f"{message or HTTPStatus(code).phrase}; requests are POST, to {PREFIX}…"
        self.close_connection = True
        self._answer(code, {"message": text}, {"Connection": "close"})

    def _answer(self, status: int, content: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> None:
        """Messages of errors may quote other people's code: they are shortened, and show no secret of this machine."""
        if status >= 400:
            text = hide_secrets(content["message"][: 64 * MOST_SAID])  # to search megabytes takes seconds
            content = {"message": text if len(text) <= MOST_SAID else f"{text[:MOST_SAID]}…"}
        data = json.dumps(content).encode()
        self.send_response(status)
        for name, value in {
            "Content-Type": "application/json",
            "Content-Length": str(len(data)),
            **(headers or {}),
        }.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def body(self, size: int) -> bytearray:
        """ConnectionError where the client sends less than it said."""
        content = bytearray(size)
        view, filled = memoryview(content), 0
        while filled < size:
            count = self.rfile.readinto(view[filled : filled + PIECE])
            if not count:
                raise ConnectionError(f"the body broke off after {filled} of {size} bytes")
            filled += count
        return content

    def form(self, size: int) -> dict[str, str]:
        """The fields of a form; of one that is given twice, the last."""
        fields = parse_qs(self.body(size).decode("utf-8", "replace"), keep_blank_values=True)
        return {name: values[-1] for name, values in fields.items()}

    def log_message(self, format: str, *args: Any) -> None:
        log.debug(format, *args)


def ping(request: Handler, size: int) -> Answer:
    request.body(size)
    return 200, {"message": "Ping request received"}


def enqueue(request: Handler, size: int) -> Answer:
    server = request.server
    taken = False
    try:
        asked = read_body(request.body(size))
        wanted(asked, server.functions)
        if asked.media_type == "latent" and server.decoder is None:
            raise ValueError("latents cannot be decoded here: send media_type video, or start the server with --vae")
        name = server.jobs.add(asked, size)
        taken = True
    except ValueError as error:
        return 400, {"message": str(error)}
    finally:
        if not taken:
            server.jobs.release(size)
    return 200, {"uuid": name}


def pull(request: Handler, size: int) -> Answer:
    fields = request.form(size)
    if not fields.get("uuid"):
        return 400, {"message": "the form has no uuid"}
    job = request.server.jobs.find(fields["uuid"])
    if job is None:
        return 404, {
            "message": "no such job; the server was started again, or its scores were dropped since many came later"
        }
    asked = job.request  # before the answers: once it is gone they are all there
    name = fields.get("type") or next(iter(request.server.functions))
    if name in job.answers:
        return job.answers[name]
    if asked is None or name not in wanted(asked, request.server.functions):
        return 404, {"message": f"the job did not ask for the reward function {name!r:.80}"}
    return 400, {"message": f"Not found scores for {job.uuid}"}


def push(request: Handler, size: int) -> Answer:
    fields = request.form(size)
    job = request.server.jobs.find(fields.get("uuid", ""))
    if job is None:
        return 404, {"message": "no such job"}
    try:
        scores = strict_json(fields.get("scores", ""))
    except ValueError as error:
        return 400, {"message": f"scores are not JSON: {error}"}
    if not isinstance(scores, dict) or not fields.get("type"):
        return 400, {"message": "scores must be a JSON object, and type the name of its function"}
    job.answers[fields["type"]] = 200, scores
    return 200, {"message": "Scores received and stored successfully"}


def latent_attr(request: Handler, size: int) -> Answer:
    request.body(size)
    return 501, {"message": "the decoder of latents is chosen when the server starts, with --vae"}


ACTIONS: dict[str, Callable[[Handler, int], Answer]] = {
    "ping": ping,
    "enqueue": enqueue,
    "pull": pull,
    "push": push,
    "latent_attr": latent_attr,
}
