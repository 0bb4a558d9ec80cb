"""The lifeline: a TCP connection from every rank to rank 0, through which the ranks detect that a process has died.

The kernel closes the connections of a process that dies, and TCP keepalive detects within half a minute that a host is gone.
Heartbeats would be less reliable, because they need a thread in the rank: native code may hold the interpreter lock for
minutes, and missing heartbeats would then cause false alarms. A rank uses the connection to report its activity, its failure
and stop signals, and to say goodbye before it ends normally. Rank 0 determines the first failure and sends it to all ranks; it
also passes on stop signals. If rank 0 dies, each rank detects that itself.

On a single host, the launcher detects the death of a rank until the watchdog opens the lifeline. On several hosts, the ranks
open the lifeline as soon as they have joined the job.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from dsreason.errors import DsReasonError
from dsreason.job import hosts, launch, network
from dsreason.job.failures import PEER_EXIT_CODE, Failure, build_failure, build_peer_error, read_last_line, read_rank
from dsreason.stopping import request_stop

log = logging.getLogger(__name__)

ADDRESS = "dsreason_lifeline/address"
"""Key for rank 0's address in the job's store."""
IDLE, INTERVAL, PROBES = 10, 5, 4
"""Seconds without traffic before the kernel probes the peer, seconds between two probes, and number of probes."""
CONNECT_TIME = 20.0
"""Time limit in seconds for connecting to rank 0."""
SETTLING = 0.5
"""Seconds that rank 0 waits for more failure reports after the first one, because a knock-on failure may be reported before the
failure that caused it."""
VERDICT_TIME = 5.0
"""Seconds that a failing rank waits for rank 0 to announce the first failure of the job."""
HELLO_BYTES = 4096
AT_START = "during startup"

Message = dict[str, Any]


@dataclass(eq=False)
class Peer:
    """A connection to another rank, and what that rank has reported. `rank` is -1 until the rank has sent the job's token."""

    connection: socket.socket
    rank: int = -1
    host: str = ""
    log: str = ""
    activity: str = AT_START
    has_ended: bool = False
    """Whether the rank has announced its end with a goodbye or a failure; a closed connection is then expected."""
    received: bytes = b""

    def messages(self) -> list[Message] | None:
        """Return the messages received since the last call; None if the connection has been closed."""
        try:
            data = self.connection.recv(65536)
        except OSError:
            data = b""
        *lines, self.received = (self.received + data).split(b"\n")
        return [json.loads(line) for line in lines] if data else None

    def update(self, message: Message) -> None:
        self.activity, self.log = message.get("activity", self.activity), message.get("log", self.log)

    def send(self, message: Message) -> None:
        with suppress(OSError):
            self.connection.sendall(json.dumps(message).encode() + b"\n")

    def describe_failure(self, failure: Failure) -> Failure:
        """Return `failure`, which is this peer's, with the message that other ranks report for it."""
        if failure.user_fixable:
            return failure
        log_note = f"; its log: {self.log}" if self.log else ":"
        return replace(failure, text=f"rank {self.rank} on {self.host} failed{log_note}\n\n{failure.text}")

    def build_death_failure(self) -> Failure:
        """Build the failure to assume if this peer's connection was closed without a report."""
        text = f"rank {self.rank} on {self.host} died {self.activity} (it was killed, or its host is down)"
        if line := read_last_line(Path(self.log)):
            text += f"; its last log line: {line}"
        if self.log:
            text += f"; its log: {self.log}"
        return Failure(self.rank, text, PEER_EXIT_CODE, user_fixable=False, time=time.time(), silent=True)


class Lifeline:
    """A rank's connection to rank 0. Rank 0 connects to itself. In a job with only one rank, there is no connection."""

    on_failure: Callable[[Failure], None]
    """Callback that a thread calls once, with the job's first failure, which may be this rank's own."""

    def __init__(self, rank: int, size: int, store: dist.Store) -> None:
        self.rank, self.size = rank, size
        self._store = store
        self._zero: Peer | None = None
        """The connection to rank 0; None if there is none."""
        self._is_open = False
        self._first: Failure | None = None
        self._decided = threading.Event()

    def open(self, on_failure: Callable[[Failure], None]) -> None:
        """Register `on_failure`, and connect unless the lifeline is already open. Collective.

        Rank 0 logs a warning that lists the ranks that cannot connect. If such a rank dies, the lifeline does not detect it.
        """
        self.on_failure = on_failure
        if self.size == 1 or self._is_open:
            return
        self._is_open = True
        if self.rank == 0:
            start_server(self._store, self.size)
        why = ""
        try:
            self._connect(json.loads(self._store.get(ADDRESS)))
        except OSError as error:
            why = f"rank {self.rank} on {socket.gethostname()}: {error}"
        missing = [text for text in hosts.exchange("lifeline", why) if text]
        if missing and self.rank == 0:
            log.warning(
                "these ranks cannot connect to rank 0, so if one dies, the others notice it late: %s",
                "; ".join(missing),
            )

    def _connect(self, address: Message) -> None:
        endpoint = (address["host"] or os.environ["MASTER_ADDR"], address["port"])
        connection = socket.create_connection(endpoint, timeout=CONNECT_TIME)
        connection.settimeout(None)
        enable_keepalive(connection)
        os.register_at_fork(after_in_child=connection.close)  # a data worker must not keep the connection open
        self._zero = Peer(connection, 0, address["hostname"])
        self._zero.send({"token": address["token"], "rank": self.rank, "host": socket.gethostname()})
        threading.Thread(target=self._listen, args=[self._zero], name="lifeline", daemon=True).start()

    def report_log(self, file: str) -> None:
        self._send({"log": file})

    def report_activity(self, activity: str) -> None:
        self._send({"activity": activity})

    def report_stop(self, name: str) -> None:
        """Report to all ranks that this rank has received the stop signal `name`."""
        self._send({"stop": name})

    def send_goodbye(self) -> None:
        self._send({"goodbye": True})

    def fail(self, failure: Failure) -> Failure:
        """Report the failure that ends this rank, and return the job's first failure, which may have caused it."""
        if self._zero is None or self._zero.has_ended:
            return failure
        self._send({"failure": asdict(failure)})
        self._decided.wait(VERDICT_TIME)
        return self._first or failure

    @property
    def rank_0_has_ended(self) -> bool:
        return self._zero is not None and self._zero.has_ended

    def _send(self, message: Message) -> None:
        if self._zero is not None:
            self._zero.send(message)

    def _listen(self, zero: Peer) -> None:
        while (messages := zero.messages()) is not None:
            for message in messages:
                zero.update(message)
                zero.has_ended |= "goodbye" in message
                if "stop" in message:
                    request_stop(message["stop"])
                if "first" in message:
                    self._decide(Failure(**message["first"]))
        if not zero.has_ended:
            self._decide(zero.build_death_failure())

    def _decide(self, first: Failure) -> None:
        if self._first is None:
            self._first = first
            self._decided.set()
            self.on_failure(first)


_started: Lifeline | None = None
"""Lifeline that `join_with_lifeline` has opened; None outside its block and on a single host."""


@contextmanager
def join_with_lifeline(activity: str = AT_START) -> Iterator[None]:
    """Join the job and keep a lifeline open inside the block. Do nothing if the job has only one host.

    Enter the block before any code reads environment variables that may be copied from the first host. Until a watchdog takes
    over the lifeline, a rank that learns of another rank's failure ends immediately.

    Args:
        activity: what this rank is doing; other ranks report it if this rank dies.

    Raises:
        DsReasonError: the ranks did not all connect in time.
        RankError: another rank's failure caused this rank's error.
    """
    global _started
    if not network.has_several_hosts():
        yield
        return
    is_failing = threading.Event()

    def end(first: Failure) -> None:
        if first.rank != read_rank() and not is_failing.is_set():
            launch.report_and_exit(build_peer_error(first))

    _started = line = Lifeline(read_rank(), int(os.environ["WORLD_SIZE"]), hosts.join())
    line.open(end)
    line.report_activity(activity)
    try:
        yield
    except Exception as error:
        if line.on_failure is not end:  # the watchdog has taken over and has reported the error
            raise
        is_failing.set()
        first = line.fail(build_failure(error))
        if first.rank != read_rank() and (first.silent or not isinstance(error, DsReasonError)):
            raise build_peer_error(first) from error
        raise
    else:
        line.send_goodbye()
    finally:
        _started = None


def get_lifeline(rank: int, size: int, store: dist.Store) -> Lifeline:
    """Return the lifeline that `join_with_lifeline` has opened, or else a new one that is not open yet."""
    return _started or Lifeline(rank, size, store)


def start_server(store: dist.Store, size: int) -> None:
    """Start rank 0's server for all lifelines, and publish its address in the job's store."""
    here = network.is_on_one_machine()
    host = network.LOOPBACK if here else network.find_local_address(os.environ["MASTER_ADDR"]) or ""
    listener = network.listen(host, backlog=size)
    token = secrets.token_hex(16)
    address = {
        "host": host,  # if empty, the ranks use MASTER_ADDR
        "port": listener.getsockname()[1],
        "token": token,
        "hostname": socket.gethostname(),
    }
    listener.setblocking(False)  # a client may disconnect before it is accepted
    store.set(ADDRESS, json.dumps(address))
    server = LifelineServer(listener, token)
    threading.Thread(target=server.run, name="lifeline-server", daemon=True).start()


def enable_keepalive(connection: socket.socket) -> None:
    """Make the kernel close the connection once the other host has not responded for half a minute."""
    tcp, milliseconds = socket.IPPROTO_TCP, 1000 * (IDLE + INTERVAL * PROBES)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(tcp, socket.TCP_KEEPIDLE, IDLE)
    connection.setsockopt(tcp, socket.TCP_KEEPINTVL, INTERVAL)
    connection.setsockopt(tcp, socket.TCP_KEEPCNT, PROBES)
    connection.setsockopt(tcp, socket.TCP_USER_TIMEOUT, milliseconds)
    connection.setsockopt(tcp, socket.TCP_NODELAY, 1)


class LifelineServer:
    """Rank 0's server for all lifelines; `run` returns once rank 0 leaves.

    The class does not inherit from `Thread`, whose `_handle` attribute (since Python 3.13) would shadow the method `_handle`.
    """

    def __init__(self, listener: socket.socket, token: str) -> None:
        self._listener, self._token = listener, token
        self._peers: list[Peer] = []
        self._failures: list[Failure] = []
        self._decide_at: float | None = None
        """Monotonic time at which to determine the first failure; None before any failure and after the decision."""
        self._is_over = False
        os.register_at_fork(after_in_child=self._close)

    def run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            while not self._is_over:
                received = [(peer, self._receive(peer)) for peer in self._wait_for_peers(selector)]
                # Handle closed connections first, so that a killed rank is recorded before the ranks that failed because of it.
                for peer, messages in sorted(received, key=lambda item: item[1] is not None):
                    if messages is None:
                        self._drop(selector, peer)
                    for message in messages or []:
                        self._handle(peer, message)
                if self._decide_at is not None and time.monotonic() >= self._decide_at:
                    self._decide()
        self._close()

    def _wait_for_peers(self, selector: selectors.BaseSelector) -> list[Peer]:
        """Wait until peers have sent data or it is time to decide. Return the peers that have sent data."""
        seconds = None if self._decide_at is None else max(0.0, self._decide_at - time.monotonic())
        ready = [key.data for key, _ in selector.select(seconds)]
        if None in ready:
            with suppress(OSError):
                connection, _ = self._listener.accept()
                enable_keepalive(connection)
                selector.register(connection, selectors.EVENT_READ, Peer(connection))
        return [peer for peer in ready if peer is not None]

    def _receive(self, peer: Peer) -> list[Message] | None:
        """Return a peer's new messages; None if its connection has been closed or it does not belong to this job."""
        is_known = peer in self._peers
        try:
            messages = peer.messages()
            if messages and not is_known:
                self._accept_peer(peer, messages.pop(0))
        except (ValueError, TypeError, KeyError, RecursionError):  # the sender is not a rank of this job
            return None
        return messages if is_known or len(peer.received) < HELLO_BYTES else None

    def _drop(self, selector: selectors.BaseSelector, peer: Peer) -> None:
        selector.unregister(peer.connection)
        peer.connection.close()
        if peer in self._peers and not peer.has_ended:
            self._add_failure(peer.build_death_failure())

    def _accept_peer(self, peer: Peer, hello: Message) -> None:
        if not secrets.compare_digest(str(hello["token"]), self._token):
            raise ValueError("the token does not match")
        peer.rank, peer.host = int(hello["rank"]), str(hello["host"])
        self._peers.append(peer)
        for other in self._peers:
            if other.rank == 0:
                peer.send({"activity": other.activity, "log": other.log})

    def _handle(self, peer: Peer, message: Message) -> None:
        peer.update(message)
        if "failure" in message:
            peer.has_ended = True
            self._add_failure(peer.describe_failure(Failure(**message["failure"])))
        elif "goodbye" in message:
            peer.has_ended = True
            self._is_over = peer.rank == 0
        if "stop" in message or (peer.rank == 0 and "failure" not in message):
            self._broadcast(message)

    def _add_failure(self, failure: Failure) -> None:
        self._failures.append(failure)
        if len(self._failures) == 1:
            self._decide_at = time.monotonic() + SETTLING

    def _decide(self) -> None:
        """Determine which failure caused the others, and send it to all ranks.

        A death without a report has priority, because a rank that reports its failure waits for the decision before it ends.
        Next come errors that the user can fix, and then the failure that arrived first.
        """
        dead = [failure for failure in self._failures if failure.silent]
        user_fixable = [failure for failure in self._failures if failure.user_fixable]
        first = (dead or user_fixable or self._failures)[0]
        self._decide_at = None
        self._broadcast({"first": asdict(first)})

    def _broadcast(self, message: Message) -> None:
        for peer in self._peers:
            peer.send(message)

    def _close(self) -> None:
        for peer in self._peers:
            peer.connection.close()
        self._listener.close()
