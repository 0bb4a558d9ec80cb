"""A server with OpenAI's interface that gives the answers a test specifies."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any

from tests.quiet_server import QuietServer

PROXIES = ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY")
"""Environment variables that would send the requests to a proxy."""


@dataclass
class StandIn:
    """A server whose answers come from `respond(path, body)`, which returns (status, body) or (status, body, headers)."""

    respond: Callable[[str, Any], tuple[Any, ...] | None]
    models: Any = field(default_factory=lambda: {"data": [{"id": "stand-in"}]})
    models_status: int = 200
    models_seconds: float = 0.0
    requests: list[Any] = field(default_factory=list)
    headers: list[Any] = field(default_factory=list)
    url: str = ""
    most_at_once: int = 0


def chat(text: Any, finish_reason: str = "stop", **message: Any) -> tuple[int, Any]:
    choice = {"message": {"role": "assistant", "content": text} | message, "finish_reason": finish_reason}
    return 200, {"choices": [choice], "usage": {"completion_tokens": 5}}


@contextmanager
def serving() -> Iterator[StandIn]:
    state = StandIn(lambda path, body: chat("(A)"))
    now = 0
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            time.sleep(state.models_seconds)
            self.reply(state.models_status, state.models, {})

        def do_POST(self) -> None:
            nonlocal now
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            with lock:
                now += 1
                state.most_at_once = max(state.most_at_once, now)
                state.requests.append(body)
                state.headers.append({name.lower(): value for name, value in self.headers.items()})
            respond = state.respond(self.path, body)
            with lock:
                now -= 1
            if respond is None:  # the connection is dropped
                self.close_connection = True
                return
            self.reply(respond[0], respond[1], respond[2] if len(respond) > 2 else {})

        def reply(self, status: int, body: Any, headers: dict[str, str]) -> None:
            content = body.encode() if isinstance(body, str) else json.dumps(body).encode()
            self.send_response(status)
            for name, value in {"content-type": "application/json", **headers}.items():
                self.send_header(name, value)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *args: Any) -> None:
            pass

    server = QuietServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    state.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
