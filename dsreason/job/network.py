"""A job's network addresses: the location of its store, and the interfaces on which its ranks listen.

On a single machine, a job listens only on the loopback interface, and its store needs no port at all if dsreason started the
ranks. This matters because anyone who can write to the store can make a rank run code: the store tells the ranks where to
connect, and they exchange pickled objects over these connections.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import psutil
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from dsreason.job import launch
from dsreason.job.failures import ERROR_DIR

LOOPBACK = "127.0.0.1"


def has_several_hosts() -> bool:
    return count_local_ranks() < int(os.environ["WORLD_SIZE"])


def count_local_ranks() -> int:
    """Return the number of ranks on this host; 1 outside a job. torchrun sets LOCAL_WORLD_SIZE, and `deepspeed` LOCAL_SIZE."""
    sizes = (os.environ.get(name) for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "WORLD_SIZE"))
    return int(next(filter(None, sizes), "1"))


def is_on_one_machine() -> bool:
    """Return whether all ranks of the job are known to run on this machine.

    Without LOCAL_WORLD_SIZE or LOCAL_SIZE, the number of hosts is unknown, so only a loopback address in MASTER_ADDR is proof.
    """
    if any(os.environ.get(name) for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE")):
        return not has_several_hosts()
    return os.environ["MASTER_ADDR"] in (LOOPBACK, "localhost") or os.environ["WORLD_SIZE"] == "1"


def open_store(timeout: timedelta) -> dist.Store:
    """Open the job's store as privately as possible: for this process, this user or this machine only, or on one interface.

    Args:
        timeout: time limit for connecting and, until it is changed, for every operation on the store.
    """
    store: dist.Store
    if os.environ["WORLD_SIZE"] == "1":
        store = dist.HashStore()
    elif launch.is_started_by_us():
        store = dist.FileStore(str(Path(os.environ[ERROR_DIR]) / "store"))  # a folder that only this user can access
    elif os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        store, *_ = next(rendezvous("env://", timeout=timeout))
    else:
        store = _open_tcp_store(timeout)
    store.set_timeout(timeout)
    return store


def _open_tcp_store(timeout: timedelta) -> dist.TCPStore:
    """Open the store that rank 0 serves at MASTER_ADDR:MASTER_PORT, or at the loopback address if all ranks are on this machine.

    By default, torch would listen on all interfaces.
    """
    is_server, port = os.environ["RANK"] == "0", int(os.environ["MASTER_PORT"])
    address = LOOPBACK if is_on_one_machine() else os.environ["MASTER_ADDR"]
    listener = listen(address, port) if is_server else None
    return dist.TCPStore(
        address,
        port,
        int(os.environ["WORLD_SIZE"]),
        is_master=is_server,
        timeout=timeout,
        master_listen_fd=listener.detach() if listener else None,
    )


def listen(address: str, port: int = 0, *, backlog: int = 2048) -> socket.socket:
    """Listen on `address` if it is an IP address of this host, and on all interfaces otherwise.

    If `address` is a name, other hosts may resolve it to a different address of this host, so all interfaces are needed.
    """
    is_own = find_interface(address) is not None
    dual = not is_own and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual or (is_own and ":" in address) else socket.AF_INET
    return socket.create_server((address if is_own else "", port), family=family, backlog=backlog, dualstack_ipv6=dual)


def find_local_address(peer: str) -> str | None:
    """Return the local IP address used to reach `peer`; None if it is the loopback or `peer` is unreachable. Nothing is sent."""
    with suppress(OSError, UnicodeError):  # the name may be unknown or invalid, or the host unreachable
        family, kind, _, _, address = socket.getaddrinfo(peer, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            own_ip = str(probe.getsockname()[0])
            return None if ipaddress.ip_address(own_ip.partition("%")[0]).is_loopback else own_ip
    return None


def find_interface(address: str) -> str | None:
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address for entry in entries):
            return str(name)
    return None


def use_loopback() -> None:
    """Make gloo, NCCL and vLLM listen only on the loopback interface; all ranks must be on this machine.

    This overrides the user's settings, which are meant for several machines.
    """
    if interface := find_interface(LOOPBACK):
        os.environ.update(GLOO_SOCKET_IFNAME=interface, NCCL_SOCKET_IFNAME=interface, VLLM_HOST_IP=LOOPBACK)


def use_interface(addresses: Sequence[str | None]) -> None:
    """Make gloo use the network interface that leads to the other hosts.

    By default, gloo uses the address to which this host's name resolves, which is often 127.0.1.1 and unreachable for others.
    """
    peer = next((address for address in addresses if address and find_interface(address) is None), None)
    interface = find_interface(find_local_address(peer) or "") if peer else None
    if interface:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
