"""A server that misbehaves after it has received a request."""

from __future__ import annotations

import gzip
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

Behaviour = Callable[[socket.socket, threading.Event], None]
"""Function that handles a connection; the event is set when the test is over."""
PIECE = 64 * 1024


@dataclass
class Hostile:
    url: str
    requests: list[bytes] = field(default_factory=list)
    """First bytes of each request."""


@contextmanager
def misbehaving(behaviour: Behaviour, at: bytes = b"", otherwise: Behaviour | None = None) -> Iterator[Hostile]:
    """Run a server that misbehaves on requests that begin with `at`, such as `POST`."""
    over = threading.Event()
    listener = socket.create_server(("127.0.0.1", 0))
    hostile = Hostile(f"http://127.0.0.1:{listener.getsockname()[1]}")

    def serve(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            request = read_request(connection)
            hostile.requests.append(request)
            choice = behaviour if otherwise is None or request.startswith(at) else otherwise
            choice(connection, over)

    def accept() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()

    thread = threading.Thread(target=accept)
    thread.start()
    try:
        yield hostile
    finally:
        over.set()
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
        listener.close()


def read_request(connection: socket.socket) -> bytes:
    data = b""
    while b"\r\n\r\n" not in data:
        data += connection.recv(PIECE) or b"\r\n\r\n"
    head, _, body = data.partition(b"\r\n\r\n")
    sizes = [int(line.partition(b":")[2]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")]
    while len(body) < sum(sizes):
        body += connection.recv(PIECE)
    return data


# ---------------------------------------------------------------- behaviours


def head(status: str = "200 OK", *more: str) -> bytes:
    return "\r\n".join([f"HTTP/1.1 {status}", "Content-Type: application/json", *more, "", ""]).encode("latin-1")


def drip(before: bytes, byte: bytes, connection: socket.socket, over: threading.Event) -> None:
    """Send one byte at a time, slowly and endlessly."""
    connection.sendall(before)
    while not over.wait(0.02):
        connection.sendall(byte)


def flood(before: bytes, piece: bytes, connection: socket.socket, over: threading.Event) -> None:
    """Send as much as the connection takes, endlessly."""
    connection.sendall(before)
    while not over.is_set():
        connection.sendall(piece)


def silent(connection: socket.socket, over: threading.Event) -> None:
    over.wait()


def content(body: bytes, *more: str, status: str = "200 OK") -> Behaviour:
    """Return a behaviour that sends a complete response."""

    def answer(connection: socket.socket, over: threading.Event) -> None:
        connection.sendall(head(status, f"Content-Length: {len(body)}", "Connection: close", *more) + body)

    return answer


def loop(connection: socket.socket, over: threading.Event) -> None:
    content(b"", f"Location: http://127.0.0.1:{connection.getsockname()[1]}/again", status="307 Again")(
        connection, over
    )


def bomb(num_bytes: int) -> bytes:
    return gzip.compress(bytes(num_bytes))


def nested(before: str) -> bytes:
    return before.encode() + b"[" * 200_000


CHUNKED = "Transfer-Encoding: chunked"
CHUNK = b"%x\r\n" % PIECE + b" " * PIECE + b"\r\n"
NEVER: dict[str, Behaviour] = {
    "silent": silent,
    "status line drips": partial(drip, b"", b"H"),
    "headers drip": partial(drip, b"HTTP/1.1 200 OK\r\nX: ", b"x"),
    "empty headers drip": partial(drip, b"HTTP/1.1 200 OK\r\n", b"a: b\r\n"),
    "interim answers drip": partial(drip, b"", b"HTTP/1.1 102 Processing\r\n\r\n"),
    "interim answers flood": partial(flood, b"", b"HTTP/1.1 102 Processing\r\n\r\n" * 100),
    "body drips": partial(drip, head("200 OK", "Content-Length: 9999"), b" "),
    "body without a length drips": partial(drip, head(), b" "),
    "chunks drip": partial(drip, head("200 OK", CHUNKED), b"1\r\n \r\n"),
    "packed nothing drips": partial(drip, head("200 OK", "Content-Encoding: gzip") + gzip.compress(b""), b"x"),
    "an error drips": partial(drip, head("400 No", "Content-Length: 9999"), b"x"),
}
"""Behaviours whose responses never end."""
TOO_LONG: dict[str, Behaviour] = {
    "endless body": partial(flood, head(), b" " * PIECE),
    "endless chunks": partial(flood, head("200 OK", CHUNKED), CHUNK),
    "endless error": partial(flood, head("400 No"), b"x" * PIECE),
    "gzip bomb": content(bomb(200 * 2**20), "Content-Encoding: gzip"),
    "gzip bomb as an error": content(bomb(200 * 2**20), "Content-Encoding: gzip", status="400 No"),
}
BROKEN: dict[str, Behaviour] = {
    "unknown packing": content(b"x", "Content-Encoding: br"),
    "twice packed": content(bomb(9), "Content-Encoding: gzip, gzip"),
    "damaged packing": content(b"no gzip at all", "Content-Encoding: gzip"),
    "no HTTP": lambda connection, over: connection.sendall(b"SSH-2.0-x\r\n\r\n"),
    "endless headers": lambda connection, over: flood(b"HTTP/1.1 200 OK\r\n", b"a: " + b"b" * PIECE, connection, over),
    "closed at once": lambda connection, over: None,
    "too short": lambda connection, over: connection.sendall(head("200 OK", "Content-Length: 99") + b"{"),
}
REDIRECTS = ("301 Moved", "302 Found", "303 Other", "307 Again", "308 Moved")


def answer(value: Any) -> Behaviour:
    return content(value if isinstance(value, bytes) else json.dumps(value).encode())
