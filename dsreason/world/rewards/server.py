"""A small reward service, compatible with cosmos-rl's: functions of a file, over HTTP. The bytes are described in `wire.py`.

    POST /api/reward/ping          a form with info_data
    POST /api/reward/enqueue       → {"uuid": …}; 400 says what is wrong with the body, 503 that the queue is full
    POST /api/reward/pull          → the scores; 400 not yet, 404 no such job or function, 500 the function failed
    POST /api/reward/push          scores of a function that a job asked for, from a worker elsewhere
    POST /api/reward/latent_attr   501: the decoder is chosen when the server starts

Every answer is JSON; errors are {"message": …}. Where the server has a token, requests without it are answered 401. One that
comes too slowly is answered 408, and a connection too many 503.
"""

from __future__ import annotations

import hmac
import io
import json
import logging
import math
import resource
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from http.client import HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs

from dsreason.secrets import hide_secrets
from dsreason.world.rewards.functions import ClipReward
from dsreason.world.rewards.jobs import Decoder, Jobs, score_jobs, wanted
from dsreason.world.rewards.wire import read_body, strict_json

log = logging.getLogger(__name__)

PREFIX = "/api/reward/"
HEADER_BYTES = 256 * 2**10
"""Of a request's headers, at most."""
FORM_BYTES = {"pull": 64 * 2**10, "push": 256 * 2**10}
"""Of a form, at most. Those that are not read may have OTHER_BYTES."""
OTHER_BYTES = 16 * 2**20
MOST_FIELDS = 32
"""Of a form; the protocol has three."""
PIECE = 256 * 2**10
MOST_SAID = 1000
"""Characters of a message."""
SOCKET_LIMIT = 60.0
"""Seconds for the headers of a request; a body has as many, and those that it takes at LOWEST_RATE. A connection on which nothing
comes for so long is closed."""
LOWEST_RATE = 1e6
"""Bytes a second of a long body."""
MOST_CONNECTIONS = 256
"""Open at a time, and at most half of the files that this process may have open."""
NO_PLACE = (
    b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nRetry-After: 2\r\nContent-Type: application/json\r\n"
    b'Content-Length: 45\r\n\r\n{"message": "there are too many connections"}'
)
ACCEPT_PAUSE = 0.1
"""Seconds until the next try where a connection cannot be taken, such as for want of files."""
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
    """Of all those together, and of what has come of those that are being received."""


class RewardHTTPServer(ThreadingHTTPServer):
    """Serves `functions`; each request of a client has a thread, the functions have one together."""

    daemon_threads = True
    request_queue_size = 128

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
        self.connections: set[socket.socket] = set()
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self.most_connections = min(MOST_CONNECTIONS, files // 2) if files > 0 else MOST_CONNECTIONS
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, Handler)
        threading.Thread(
            target=score_jobs, args=(self.jobs, functions, decoder), name="reward functions", daemon=True
        ).start()

    def get_request(self) -> tuple[Any, Any]:
        try:
            return super().get_request()
        except OSError:
            time.sleep(ACCEPT_PAUSE)  # the base class would try again at once, and for ever
            raise

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Return whether there is a place for this connection."""
        if len(self.connections) < self.most_connections:
            self.connections.add(request)
            return True
        with suppress(OSError):
            request.send(NO_PLACE, socket.MSG_DONTWAIT)
        return False

    def shutdown_request(self, request: Any) -> None:
        """Called at the end of every connection, whatever became of it."""
        self.connections.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.info("a request from %s broke off: %s", client_address[0], sys.exception())

    @property
    def url(self) -> str:
        host, port = self.server_address[:2]
        return f"http://[{host!s}]:{port}{PREFIX}" if ":" in str(host) else f"http://{host!s}:{port}{PREFIX}"


class Arrivals(io.RawIOBase):
    """What a connection receives. TimeoutError if that takes longer since `begin` than its bytes may."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.begin()

    def begin(self, most: float = math.inf) -> None:
        """Headers, of `most` bytes, or a body begin."""
        self.since, self.most, self.count, self.late = time.monotonic(), most, 0, False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if self.count > self.most:
            raise HTTPException(f"headers of more than {self.most} bytes")  # answered 431 by the base class
        seconds_left = self.since + SOCKET_LIMIT + self.count / LOWEST_RATE - time.monotonic()
        try:
            if seconds_left <= 0:
                raise TimeoutError
            self.connection.settimeout(min(seconds_left, SOCKET_LIMIT))
            count = self.connection.recv_into(buffer)
        except TimeoutError:
            self.late = True
            raise
        self.count += count
        return count


class Handler(BaseHTTPRequestHandler):
    server: RewardHTTPServer
    protocol_version = "HTTP/1.1"
    default_request_version = "HTTP/1.0"  # to a line that says none; 0.9's answers have no status
    left = 0
    """Bytes of the body that were not read yet."""

    def setup(self) -> None:
        super().setup()
        self.arrivals = Arrivals(self.connection)
        self.rfile = io.BufferedReader(self.arrivals)

    def handle_one_request(self) -> None:
        self.requestline, self.command, self.request_version, self.left = "", "", "HTTP/1.1", 0
        self.arrivals.begin(HEADER_BYTES)
        super().handle_one_request()
        if self.arrivals.late and (
            self.arrivals.count or self.command
        ):  # the base class has noted that the connection ends
            self.left = 0
            rate = f"{LOWEST_RATE / 1e6:g} MB a second"
            text = f"headers must come within {SOCKET_LIMIT:g} s, a body within as much and what it takes at {rate}"
            self._answer(408, {"message": text})

    def do_POST(self) -> None:
        action = self.path.partition("?")[0].removeprefix(PREFIX)
        handler = ACTIONS.get(action) if self.path.startswith(PREFIX) else None
        try:
            self.left = int(self.headers.get("Content-Length", ""))
        except ValueError:
            self.close_connection = True
            self._answer(411, {"message": "the request has no Content-Length"})
            return
        self.arrivals.begin()
        most = self.server.limits.body_bytes if action == "enqueue" else FORM_BYTES.get(action, OTHER_BYTES)
        answer: Answer
        if handler is None:
            addresses = ", ".join(PREFIX + name for name in ACTIONS)
            answer = 404, {"message": f"no such address; there are {addresses}"}
        elif not self._is_allowed():
            problem = "the token is wrong" if "Authorization" in self.headers else "a token is required"
            answer = 401, {"message": f"{problem}; send it as Authorization: Bearer …"}
        elif not 0 <= self.left <= most:
            answer = 413, {"message": f"the body has {self.left} bytes, at most {most} are taken"}
        else:
            try:
                answer = handler(self)
            except ValueError as error:
                answer = 400, {"message": str(error)}
        self._answer(*answer)

    def _is_allowed(self) -> bool:
        """In a time that does not depend on how much of the token is right."""
        if self.server.token is None:
            return True
        authorization = self.headers.get("Authorization", "")
        return hmac.compare_digest(authorization.encode(), f"Bearer {self.server.token}".encode())

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Called by the base class, such as for another method than POST."""
        text = f"{message or HTTPStatus(code).phrase}; requests are POST, to {PREFIX}…"
        self.close_connection = True
        self._answer(code, {"message": text})

    def _answer(self, status: int, content: Mapping[str, Any]) -> None:
        """Messages of errors may quote other people's code: they are shortened, and show no secret of this machine."""
        if self.left:
            self._receive_rest()
        self.connection.settimeout(SOCKET_LIMIT)
        if status >= 400:
            text = hide_secrets(content["message"][: 64 * MOST_SAID])  # to search megabytes takes seconds
            content = {"message": text if len(text) <= MOST_SAID else f"{text[:MOST_SAID]}…"}
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        if status == 503:
            self.send_header("Retry-After", RETRY_AFTER)
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _receive_rest(self) -> None:
        """A client that is still sending would not see the answer."""
        self.close_connection = True
        self.left = min(self.left, self.server.limits.body_bytes)
        with suppress(ConnectionError):
            for _ in self.pieces():
                pass

    def pieces(self) -> Iterator[bytes]:
        """The body as it comes. ConnectionError if there is less of it than the client said."""
        while self.left > 0:
            piece = self.rfile.read1(min(self.left, PIECE))
            if not piece:
                raise ConnectionError(f"the body broke off {self.left} bytes before its end")
            self.left -= len(piece)
            yield piece

    def form(self) -> dict[str, str]:
        """The fields of a form; of one that is given twice, the last. ValueError if there are too many."""
        text = b"".join(self.pieces()).decode("utf-8", "replace")
        fields = parse_qs(text, keep_blank_values=True, max_num_fields=MOST_FIELDS)
        return {name: values[-1] for name, values in fields.items()}

    def log_message(self, format: str, *args: Any) -> None:
        log.debug(format, *args)


def ping(request: Handler) -> Answer:
    return 200, {"message": "Ping request received"}


def enqueue(request: Handler) -> Answer:
    server, jobs = request.server, request.server.jobs
    full = 503, {"message": "the queue is full; ask again later"}
    if not jobs.has_room(request.left):
        return full
    content, held, name = bytearray(), 0, None
    try:
        for piece in request.pieces():
            content += piece
            if not jobs.hold(len(piece)):
                return full
            held += len(piece)
        request_body = read_body(content)
        names = wanted(request_body, server.functions)
        if request_body.media_type == "latent" and server.decoder is None:
            raise ValueError("latents cannot be decoded here: send media_type video, or start the server with --vae")
        name = jobs.add(request_body, names, held)
    finally:
        if name is None:
            jobs.release(held)
    return full if name is None else (200, {"uuid": name})


def pull(request: Handler) -> Answer:
    fields = request.form()
    if not fields.get("uuid"):
        return 400, {"message": "the form has no uuid"}
    job = request.server.jobs.find(fields["uuid"])
    if job is None:
        return 404, {
            "message": "no such job; the server was started again, or its scores were dropped since many came later"
        }
    name = fields.get("type") or next(iter(request.server.functions))
    if name not in job.names:
        return 404, {"message": not_asked(name)}
    if name not in job.answers:
        return 400, {"message": f"Not found scores for {job.uuid}"}
    status, content = job.answers[name]
    return status, json.loads(content)


def push(request: Handler) -> Answer:
    fields = request.form()
    job = request.server.jobs.find(fields.get("uuid", ""))
    if job is None:
        return 404, {"message": "no such job"}
    try:
        scores = strict_json(fields.get("scores", ""))
    except ValueError as error:
        raise ValueError(f"scores are not JSON: {error}") from None
    name = fields.get("type")
    if not isinstance(scores, dict) or not name:
        return 400, {"message": "scores must be a JSON object, and type the name of its function"}
    if name not in job.names:
        return 404, {"message": not_asked(name)}
    request.server.jobs.keep(job, name, (200, scores))
    return 200, {"message": "Scores received and stored successfully"}


def not_asked(name: str) -> str:
    return f"the job did not ask for the reward function {name!r:.80}"


def latent_attr(request: Handler) -> Answer:
    return 501, {"message": "the decoder of latents is chosen when the server starts, with --vae"}


ACTIONS: dict[str, Callable[[Handler], Answer]] = {
    "ping": ping,
    "enqueue": enqueue,
    "pull": pull,
    "push": push,
    "latent_attr": latent_attr,
}
