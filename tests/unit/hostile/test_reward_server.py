"""Clients of `dsreason reward-serve` that send too much, too slowly or from too many connections."""

from __future__ import annotations

import json
import re
import resource
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from dsreason.monitor.memory import read_status_bytes
from dsreason.world.rewards import server as module
from dsreason.world.rewards.server import Limits, RewardHTTPServer
from tests.integration.command import COMMAND
from tests.unit.hostile.guard import guarded
from tests.unit.world.rewards.test_server import VIDEO, body, level, post, serving

GIB = 2**30
TINY = body(VIDEO, media_type="video")


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., RewardHTTPServer]]:
    """A function that starts a server with these limits."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with ExitStack() as stack:

        def begin(*limits: int) -> RewardHTTPServer:
            server = RewardHTTPServer(("127.0.0.1", 0), {"level": level}, limits=Limits(*limits))
            stack.enter_context(serving(server))
            return server

        yield begin


def connect(address: Any) -> socket.socket:
    return socket.create_connection(address[:2], 20)


def head(action: str, size: int) -> bytes:
    return (
        f"POST /api/reward/{action} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {size}\r\n\r\n".encode()
    )


def rest(connection: socket.socket) -> bytes:
    return b"".join(iter(lambda: connection.recv(65536), b""))


def test_announced_body_size_reserves_no_memory() -> None:
    def grown() -> int:
        server = RewardHTTPServer(("127.0.0.1", 0), {"level": level})
        threading.Thread(target=server.run, daemon=True).start()
        before = read_status_bytes("VmHWM")
        with connect(server.address) as connection:
            connection.sendall(head("enqueue", 500_000_000) + b"x")
            connection.shutdown(socket.SHUT_WR)
            assert rest(connection) == b""
        return read_status_bytes("VmHWM") - before

    assert guarded(grown) < 200_000_000


def test_queue_counts_received_rather_than_announced_bytes(
    start: Callable[..., RewardHTTPServer],
) -> None:
    server = start(2, GIB, GIB)
    with ExitStack() as stack:
        for _ in range(3):
            connection = stack.enter_context(connect(server.address))
            connection.sendall(head("enqueue", GIB) + TINY)
        assert post(server, "enqueue", TINY)[0] == 200


def test_data_beyond_queue_is_rejected_and_freed(
    start: Callable[..., RewardHTTPServer],
) -> None:
    server = start(10, 1000, 1000)
    with connect(server.address) as first, connect(server.address) as second:
        for connection, room in ((first, 999), (second, 998)):
            connection.sendall(head("enqueue", 900) + b"x")
            while server.jobs.has_room(room + 1):
                time.sleep(0.01)
        first.sendall(b"x" * 600)
        while server.jobs.has_room(398 + 1):
            time.sleep(0.01)
        second.sendall(b"x" * 899)
        refused = rest(second)
        assert refused.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: 2\r\n" in refused
        first.sendall(b"x" * 299)
        assert b"the JSON must end with a line break" in rest(first)  # the request arrived completely
    assert server.jobs.has_room(1000)


@pytest.mark.parametrize("pause", [0.02, 0.0002])
@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"POST /api", None),
        (b"POST /api/reward/enqueue HTTP/1.1\r\nX: ", None),
        (head("enqueue", 60_000), 408),
        (head("pull", 60_000), 408),
        (head("ping", 60_000), 200),
        (head("elsewhere", 60_000), 404),
    ],
)
def test_slow_client_is_disconnected(
    start: Callable[..., RewardHTTPServer],
    monkeypatch: pytest.MonkeyPatch,
    sent: bytes,
    status: int | None,
    pause: float,
) -> None:
    """Check that requests without a body are answered immediately.

    The remaining data then has the same time limit as the headers of the next request.
    """
    monkeypatch.setattr(module, "HEADER_LIMIT", 0.3)
    monkeypatch.setattr(module, "BODY_LIMIT", 0.3)
    server = start()
    with connect(server.address) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(sent)
        answer, begin = b"", time.monotonic()
        connection.settimeout(pause)
        with suppress(ConnectionError):
            while time.monotonic() < begin + 20:
                try:
                    if not (piece := connection.recv(65536)):
                        break
                    answer += piece
                except TimeoutError:
                    connection.sendall(b"x")
    assert time.monotonic() < begin + 10
    assert answer.startswith(b"" if status is None else f"HTTP/1.1 {status} ".encode())
    assert (status is None) == (answer == b"")
    if status == 408:
        assert b"the body must arrive within 0.3 s plus the time it takes at 1 MB per second" in answer
    assert server.jobs.has_room(16 * GIB)  # its bytes take no room


def test_long_headers_are_refused(start: Callable[..., RewardHTTPServer]) -> None:
    with connect(start().address) as connection:
        connection.sendall(
            b"POST /api/reward/ping HTTP/1.1\r\nContent-Length: 0\r\n" + b"X: %060000d\r\n" % 1 * 5 + b"\r\n"
        )
        assert connection.recv(65536).startswith(b"HTTP/1.1 400 ")


def test_idle_connection_is_closed(start: Callable[..., RewardHTTPServer], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HEADER_LIMIT", 0.3)
    with connect(start().address) as connection:
        assert rest(connection) == b""


def test_long_body_gets_more_time(start: Callable[..., RewardHTTPServer], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BODY_LIMIT", 1.5)
    monkeypatch.setattr(module, "LOWEST_RATE", 10.0)
    with connect(start().address) as connection:
        connection.sendall(head("enqueue", len(TINY)))
        step = len(TINY) // 20
        for first in range(0, len(TINY), step):
            time.sleep(0.1)
            connection.sendall(TINY[first : first + step])
        assert b"HTTP/1.1 200 " in connection.recv(65536)


@pytest.mark.parametrize("action", ["pull", "push"])
def test_forms_are_short_and_have_few_fields(start: Callable[..., RewardHTTPServer], action: str) -> None:
    server = start()
    status, answer = post(server, action, b"a=b&" * 2**17)
    assert status == 413
    assert re.search("has 524288 bytes, but the maximum is", answer["message"])
    assert post(server, action, b"a=b&" * 100) == (400, {"message": "Max number of fields exceeded"})


def test_excess_connection_is_rejected_until_one_closes(
    start: Callable[..., RewardHTTPServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_CONNECTIONS", 6)
    server = start()
    with ExitStack() as stack:
        idle = [stack.enter_context(connect(server.address)) for _ in range(3)]
        with connect(server.address) as further:
            status, _, content = rest(further).partition(b"\r\n\r\n")
        assert status.startswith(b"HTTP/1.1 503 ")
        assert json.loads(content) == {"message": "too many connections; retry later"}
        idle[0].close()
        while server.num_connections == 3:
            time.sleep(0.01)
        assert post(server, "ping", {})[0] == 200


def test_idle_connections_do_not_shut_out_others(start: Callable[..., RewardHTTPServer]) -> None:
    server = start()
    with ExitStack() as stack:
        for _ in range(256):
            stack.enter_context(connect(server.address))
        while server.num_connections < 128:
            time.sleep(0.01)
        with socket.create_connection(server.address[:2], 20, ("127.0.0.2", 0)) as other:
            other.sendall(head("ping", 0))
            assert other.recv(65536).startswith(b"HTTP/1.1 200 ")
        with connect(server.address) as further:
            assert rest(further).startswith(b"HTTP/1.1 503 ")


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_reset_connections_are_not_counted(
    start: Callable[..., RewardHTTPServer], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, loop: str
) -> None:
    if loop == "asyncio":
        monkeypatch.setitem(sys.modules, "uvloop", None)
    server = start()
    for _ in range(50):
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close with RST
            connection.connect(server.address)
    assert post(server, "ping", {})[0] == 200
    deadline = time.monotonic() + 4  # earlier than HEADER_LIMIT
    while server.num_connections and time.monotonic() < deadline:
        time.sleep(0.01)
    assert server.num_connections == 0
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("host", "same", "other"),
    [
        ("192.0.2.1", "::ffff:192.0.2.1", "192.0.2.2"),
        ("2001:db8::1", "2001:db8::ffff:0:0:2", "2001:db8:0:1::1"),
        ("fe80::1%eth0", "fe80::2%eth1", "::ffff:192.0.2.1"),
    ],
)
def test_clients_are_grouped_by_address_or_ipv6_network(host: str, same: str, other: str) -> None:
    assert module.get_network(host) == module.get_network(same) != module.get_network(other)


def test_server_recovers_from_exhausted_file_descriptors(here: Path) -> None:
    (here / "rewards.py").write_text("def zero(clips, samples):\n    return [0.0] * len(samples)\n")
    process = subprocess.Popen(
        [*COMMAND, "reward-serve", "rewards.py", "--port", "0"],
        cwd=here,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64)),
    )
    with process, ExitStack() as stack:
        stack.callback(process.terminate)
        assert process.stdout is not None
        match = re.search(r":(\d+)/api", process.stdout.readline())
        assert match
        address = "127.0.0.1", int(match[1])
        idle = [connect(address) for _ in range(65)]
        with connect(address) as further:
            assert rest(further).startswith(b"HTTP/1.1 503 ")
        for connection in idle:
            connection.close()
        answer = b""
        while not answer.startswith(b"HTTP/1.1 200 "):  # until the server has noticed the disconnections
            with connect(address) as further, suppress(ConnectionError):
                further.sendall(head("ping", 1) + b"x")
                answer = further.recv(65536)
