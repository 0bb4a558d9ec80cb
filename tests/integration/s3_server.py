"""A local S3 server (moto), and a proxy in front of it that injects faults into requests."""

from __future__ import annotations

import http.client
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Lock, Thread
from typing import Any

REGION = "eu-west-1"
KEY, SECRET = "AKIASENTINELKEY", "sentinel/secret+key"


@dataclass(frozen=True)
class ServerFault:
    """A fault that the proxy injects into the next request that has this method and whose path contains `path`."""

    method: str
    kind: str
    """Kind of fault: a status such as "503 SlowDown", or `cut` (the request), `cut answer`, `lose answer`, `hang` or `damage`."""
    path: str = ""


@dataclass
class Proxy:
    """A proxy that forwards requests to the server at `target` (host:port), except those that match one of the `faults`."""

    target: str
    address: str = ""
    faults: list[ServerFault] = field(default_factory=list)
    seen: list[str] = field(default_factory=list)
    """Method and path of every request so far, as `PUT /bucket/key?query`."""
    says: str = "said the test"
    """Message in the proxy's error responses."""
    done: Event = field(default_factory=Event)
    lock: Any = field(default_factory=Lock)

    def take(self, method: str, path: str) -> str:
        with self.lock:
            self.seen.append(f"{method} {path}")
            for fault in self.faults:
                if fault.method == method and fault.path in path:
                    self.faults.remove(fault)
                    return fault.kind
        return ""


@contextmanager
def proxy_to(target: str) -> Iterator[Proxy]:
    proxy = Proxy(target)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_any(self) -> None:
            serve(proxy, self)

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_any

        def log_message(self, format: str, *args: Any) -> None: ...

    with serving(Handler) as address:
        proxy.address = address
        yield proxy
        proxy.done.set()


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def serve(proxy: Proxy, request: BaseHTTPRequestHandler) -> None:
    kind = proxy.take(request.command, request.path)
    length = int(request.headers["Content-Length"] or 0)
    if kind == "cut":
        request.rfile.read(length // 2)
        request.close_connection = True
        return
    body = request.rfile.read(length)
    if kind == "hang":
        proxy.done.wait()
        request.close_connection = True
    elif kind[:1].isdigit():
        refuse(request, kind, proxy.says)
    else:
        forward(proxy, request, b"?" + body[1:] if kind == "damage" else body, kind)


def refuse(request: BaseHTTPRequestHandler, kind: str, message: str) -> None:
    status, code = kind.split()
    body = f"<Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()
    request.send_response(int(status))
    request.send_header("Content-Type", "application/xml")
    request.send_header("Content-Length", str(len(body)))
    request.end_headers()
    request.wfile.write(b"" if request.command == "HEAD" else body)


def forward(proxy: Proxy, request: BaseHTTPRequestHandler, body: bytes, kind: str) -> None:
    connection = http.client.HTTPConnection(proxy.target, timeout=30)
    headers = {name: value for name, value in request.headers.items() if name not in ("Expect", "Connection")}
    if kind == "damage":
        headers.pop("Content-MD5", None)
    connection.request(request.command, request.path, body, headers)
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    if kind == "lose answer":
        request.close_connection = True
        return
    request.send_response(answer.status)
    for name, value in answer.getheaders():
        if name not in ("Connection", "Transfer-Encoding", "Date", "Server"):
            request.send_header(name, value)
    if answer.getheader("Content-Length") is None:
        request.send_header("Content-Length", str(len(content)))
    request.end_headers()
    request.wfile.write(content[: len(content) // 2] if kind == "cut answer" else content)
    if kind == "cut answer":
        request.close_connection = True
