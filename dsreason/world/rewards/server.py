"""A small HTTP reward server, compatible with cosmos-rl's, for the functions in a file. `wire.py` describes the wire format.

    POST /api/reward/ping          a form with info_data
    POST /api/reward/enqueue       → {"uuid": …}; 400 if the body is invalid, 503 if the queue is full
    POST /api/reward/pull          → the scores; 400 not ready, 404 no such job or function, 500 the function failed
    POST /api/reward/push          an external worker's scores for a function that the job requested
    POST /api/reward/latent_attr   501: the decoder is chosen when the server starts

Every response to a valid HTTP request is JSON; errors are {"message": …}. If the server has a token, requests without it get
401. Bodies that arrive too slowly get 408, and excess connections get 503. uvicorn closes invalid connections with a plain 400.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import resource
import socket
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from ipaddress import IPv4Address, ip_address
from threading import Thread
from typing import Any
from urllib.parse import parse_qs

import uvicorn
from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException as AnyHTTPException
from starlette.requests import ClientDisconnect
from uvicorn.protocols.http.h11_impl import H11Protocol

from dsreason.secrets import hide_secrets
from dsreason.world.rewards.functions import ClipReward
from dsreason.world.rewards.jobs import Decoder, Job, Jobs, score_jobs, select_functions
from dsreason.world.rewards.wire import parse_strict_json, read_body

log = logging.getLogger(__name__)

PREFIX = "/api/reward/"
HEADER_BYTES = 256 * 2**10
"""Maximum size of a request's headers, in bytes."""
PULL_BYTES, PUSH_BYTES = 64 * 2**10, 256 * 2**10
"""Maximum size of a form for pull and for push, in bytes."""
MOST_FIELDS = 32
"""Maximum number of fields in a form; the protocol needs three."""
MAX_MESSAGE_LENGTH = 1000
"""Maximum number of characters in an error message."""
HEADER_LIMIT = 5.0
"""Seconds within which a request's headers must arrive, counted from the connection or from the previous response."""
BODY_LIMIT = 10.0
"""Seconds within which a request's body must arrive, in addition to the time that it takes at LOWEST_RATE.

Two clients that send slow bodies can hold all connections for that long.
"""
LOWEST_RATE = 1e6
"""Minimum rate of a long body, in bytes per second."""
MOST_CONNECTIONS = 256
"""Maximum number of open connections, or half the number of files that the process may open if that is lower.

A single client may hold at most half of them, so it cannot shut out other clients.
"""
TOO_MANY_CONNECTIONS = (
    b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nRetry-After: 2\r\nContent-Type: application/json\r\n"
    b'Content-Length: 48\r\n\r\n{"message": "too many connections; retry later"}'
)
RETRY_AFTER = {"Retry-After": "2"}
"""Header that tells a client how many seconds to wait if the queue is full."""


@dataclass(frozen=True)
class Limits:
    """Limits of the server's queue. Example: `Limits(most_waiting=60, body_bytes=4 * 2**30, queue_bytes=16 * 2**30)`."""

    most_waiting: int = 60
    """Maximum number of requests that are waiting or being scored."""
    body_bytes: int = 4 * 2**30
    """Maximum size of a request's body."""
    queue_bytes: int = 16 * 2**30
    """Maximum total size of the waiting requests' bodies, including the received parts of incomplete bodies."""


@dataclass(frozen=True)
class Service:
    """The state that the routes share."""

    jobs: Jobs
    functions: Mapping[str, ClipReward]
    token: str | None
    decodes: bool
    """Whether the server can decode latents."""
    limits: Limits


def find_service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


def check_token(request: Request) -> None:
    """Check the token in constant time. Raise HTTPException if it is missing or wrong."""
    authorization, token = request.headers.get("Authorization"), find_service(request).token
    if token is not None and not hmac.compare_digest((authorization or "").encode(), f"Bearer {token}".encode()):
        problem = "a token is required" if authorization is None else "the token is wrong"
        raise HTTPException(401, f"{problem}; send it as Authorization: Bearer …")


router = APIRouter(prefix=PREFIX.rstrip("/"), dependencies=[Depends(check_token)])


def build_app(service: Service) -> FastAPI:
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.state.service = service
    app.include_router(router)
    for error in (AnyHTTPException, ValueError, TimeoutError, ClientDisconnect):
        app.add_exception_handler(error, answer_error)
    return app


class RewardHTTPServer:
    """An HTTP server for `functions`, which score jobs one by one in a thread.

    Raises:
        OSError: the server cannot listen on the address.
    """

    def __init__(
        self,
        address: tuple[str, int],
        functions: Mapping[str, ClipReward],
        *,
        token: str | None = None,
        decoder: Decoder | None = None,
        limits: Limits = Limits(),
    ) -> None:
        self.jobs = Jobs(limits.most_waiting, limits.queue_bytes)
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self.socket = socket.create_server(address, family=family)
        Thread(target=score_jobs, args=(self.jobs, functions, decoder), name="reward functions", daemon=True).start()
        config = uvicorn.Config(
            build_app(Service(self.jobs, functions, token, decoder is not None, limits)),
            http=LimitedConnection,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            h11_max_incomplete_event_size=HEADER_BYTES,
            timeout_graceful_shutdown=1,
        )
        self._server = uvicorn.Server(config)

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.socket.getsockname()[:2]
        return host, port

    @property
    def url(self) -> str:
        host, port = self.address
        return f"http://[{host}]:{port}{PREFIX}" if ":" in host else f"http://{host}:{port}{PREFIX}"

    @property
    def num_connections(self) -> int:
        return len(self._server.server_state.connections)

    def run(self) -> None:
        """Serve until `stop` is called."""
        self._server.run(sockets=[self.socket])

    def stop(self) -> None:
        """Stop the server without waiting for jobs that are being scored."""
        self._server.should_exit = True


class LimitedConnection(H11Protocol):
    """A connection that is refused if too many are open, and closed if no request arrives within HEADER_LIMIT seconds."""

    network = b""
    """Part of the client's address that identifies it; see `get_network`."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        peer = transport.get_extra_info("peername")
        if peer is None:  # the client has already reset the connection
            transport.abort()
            return
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        limit = min(MOST_CONNECTIONS, files // 2) if files > 0 else MOST_CONNECTIONS
        self.network = get_network(peer[0])
        connections = [item for item in self.connections if isinstance(item, LimitedConnection)]
        of_client = sum(item.network == self.network for item in connections)
        if len(self.connections) > limit or of_client > limit // 2:
            transport.write(TOO_MANY_CONNECTIONS)
            transport.close()
        self._start_header_timer()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._start_header_timer()

    def _start_header_timer(self) -> None:
        last_request = self.cycle

        def close_if_idle() -> None:
            if self.cycle is last_request:
                self.transport.close()

        self.loop.call_later(HEADER_LIMIT, close_if_idle)


def get_network(host: str) -> bytes:
    """Return the part of an address that identifies a client.

    For IPv6, this is the first half of the address, because a client can choose the second half freely.
    """
    address = ip_address(host.partition("%")[0])
    if isinstance(address, IPv4Address):
        return address.packed
    return address.ipv4_mapped.packed if address.ipv4_mapped else address.packed[:8]


@router.post("/ping")
async def answer_ping() -> dict[str, str]:
    return {"message": "Ping request received"}


@router.post("/enqueue")
async def enqueue(request: Request) -> dict[str, str]:
    service = find_service(request)
    jobs, most_bytes = service.jobs, service.limits.body_bytes
    queue_full = HTTPException(503, "the queue is full; retry later", RETRY_AFTER)
    if not jobs.has_room(read_size(request, most_bytes)):
        raise queue_full
    content, uuid = bytearray(), None
    try:
        async for piece in iter_body(request, most_bytes):
            if not jobs.reserve(len(piece)):
                raise queue_full
            content += piece
        body = await run_in_threadpool(read_body, content)
        names = select_functions(body, service.functions)
        if body.media_type == "latent" and not service.decodes:
            raise ValueError("this server cannot decode latents; send media_type video, or start it with --vae")
        uuid = jobs.add(body, names, len(content))
    finally:
        if uuid is None:
            jobs.release(len(content))
    if uuid is None:
        raise queue_full
    return {"uuid": uuid}


@router.post("/pull")
async def pull(request: Request) -> Any:
    service, fields = find_service(request), await read_form(request, PULL_BYTES)
    job = find_job(service.jobs, fields)
    name = fields.get("type") or next(iter(service.functions))
    check_requested(job, name)
    if name not in job.answers:
        raise HTTPException(400, f"Not found scores for {job.uuid}")
    status, answer = job.answers[name]
    content = json.loads(answer)
    if status != 200:
        raise HTTPException(status, content["message"])
    return content


@router.post("/push")
async def push(request: Request) -> dict[str, str]:
    service, fields = find_service(request), await read_form(request, PUSH_BYTES)
    job = find_job(service.jobs, fields)
    try:
        scores = parse_strict_json(fields.get("scores", ""))
    except ValueError as error:
        raise ValueError(f"scores are not JSON: {error}") from None
    name = fields.get("type")
    if not isinstance(scores, dict) or not name:
        raise HTTPException(400, "scores must be a JSON object, and type must be the name of the reward function")
    check_requested(job, name)
    service.jobs.keep(job, name, (200, scores))
    return {"message": "Scores received and stored successfully"}


@router.post("/latent_attr")
async def refuse_latent_attr() -> None:
    raise HTTPException(501, "the decoder of latents is chosen with --vae when the server starts")


def find_job(jobs: Jobs, fields: Mapping[str, str]) -> Job:
    if not fields.get("uuid"):
        raise HTTPException(400, "the form has no uuid")
    job = jobs.find(fields["uuid"])
    if job is None:
        reason = "the server was restarted, or the scores were dropped to make room for later jobs"
        raise HTTPException(404, f"the job does not exist: {reason}")
    return job


def check_requested(job: Job, name: str) -> None:
    if name not in job.names:
        raise HTTPException(404, f"the job did not request the reward function {name!r:.80}")


def read_size(request: Request, most_bytes: int) -> int:
    """Return the request's Content-Length, or 0 if it has none. Raise HTTPException if it is too large."""
    num_bytes = int(request.headers.get("Content-Length", 0))
    if num_bytes > most_bytes:
        raise HTTPException(413, f"the body has {num_bytes} bytes, but the maximum is {most_bytes}")
    return num_bytes


async def iter_body(request: Request, most_bytes: int) -> AsyncIterator[bytes]:
    """Yield the body as it arrives. Raise HTTPException if it is too large, TimeoutError if it arrives too slowly."""
    read_size(request, most_bytes)
    num_bytes, now, stream = 0, asyncio.get_running_loop().time, request.stream()
    begin = now()
    while True:
        seconds_left = begin + BODY_LIMIT + num_bytes / LOWEST_RATE - now()
        piece = await asyncio.wait_for(anext(stream, None), seconds_left)
        if piece is None:
            return
        num_bytes += len(piece)
        if num_bytes > most_bytes:
            raise HTTPException(413, f"the body exceeds the maximum of {most_bytes} bytes")
        yield piece


async def read_form(request: Request, most_bytes: int) -> dict[str, str]:
    """Return a form's fields; a repeated field has its last value. Raise ValueError if there are too many fields."""
    content = b"".join([piece async for piece in iter_body(request, most_bytes)])
    fields = parse_qs(content.decode("utf-8", "replace"), keep_blank_values=True, max_num_fields=MOST_FIELDS)
    return {name: values[-1] for name, values in fields.items()}


async def answer_error(request: Request, error: Exception) -> JSONResponse:
    """Respond with an error message. Because it may quote user code, it is truncated and this machine's secrets are masked."""
    headers = dict(error.headers or {}) if isinstance(error, AnyHTTPException) else {}
    match error:
        case ClientDisconnect():
            log.info("a client disconnected before its request was complete")
            status, message = 400, "the request is incomplete"
        case AnyHTTPException(status_code=404, detail="Not Found"):
            names = "enqueue, pull, push, ping or latent_attr"
            status, message = 404, f"the URL does not exist; send POST requests to {PREFIX}{names}"
        case AnyHTTPException():
            status, message = error.status_code, error.detail
        case TimeoutError():
            rate = f"{LOWEST_RATE / 1e6:g} MB per second"
            status, message = 408, f"the body must arrive within {BODY_LIMIT:g} s plus the time it takes at {rate}"
            headers["Connection"] = "close"
        case _:
            status, message = 400, str(error)
    message = hide_secrets(message[: 64 * MAX_MESSAGE_LENGTH])  # searching megabytes for secrets takes seconds
    content = {"message": message if len(message) <= MAX_MESSAGE_LENGTH else f"{message[:MAX_MESSAGE_LENGTH]}…"}
    return JSONResponse(content, status, headers)
