"""The place where the ranks of a job meet, and the interfaces on which they listen."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from dsreason.job import network
from dsreason.job.network import LOOPBACK, find_interface, find_local_address, is_on_one_machine, listen, open_store

TIME = timedelta(seconds=20)
JOB = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT", "DSREASON_ERROR_DIR")
OWN_IPS = [
    entry.address
    for entries in psutil.net_if_addrs().values()
    for entry in entries
    if entry.family == socket.AF_INET and not entry.address.startswith("127.")
]


def set_job(monkeypatch: pytest.MonkeyPatch, **variables: object) -> None:
    for name in (*JOB, "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in ({"RANK": 0, "LOCAL_RANK": 0, "MASTER_ADDR": LOOPBACK} | variables).items():
        monkeypatch.setenv(name, str(value))


def find_listening(port: int) -> list[str]:
    connections = psutil.Process().net_connections("tcp")
    return [item.laddr.ip for item in connections if item.status == psutil.CONN_LISTEN and item.laddr.port == port]


def find_free_port(host: str) -> int:
    with socket.create_server((host, 0)) as probe:
        return int(probe.getsockname()[1])


@pytest.mark.parametrize("peer", ["127.0.0.1", "localhost", "127.0.1.1", "no-such-host.invalid"])
def test_loopback_and_unknown_peers_have_no_address(peer: str) -> None:
    assert find_local_address(peer) is None


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "node-0"}, True),  # torchrun --standalone
        ({"WORLD_SIZE": 2, "LOCAL_SIZE": 2}, True),  # deepspeed
        ({"WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 1}, False),
        ({"WORLD_SIZE": 2, "MASTER_ADDR": "node-0"}, False),  # a user's own script, perhaps on two hosts
        ({"WORLD_SIZE": 2}, True),
        ({"WORLD_SIZE": 1, "MASTER_ADDR": "node-0"}, True),
    ],
)
def test_one_machine_is_assumed_only_when_certain(
    variables: dict[str, object], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_job(monkeypatch, **variables)
    assert is_on_one_machine() == expected


def test_single_process_needs_no_port(monkeypatch: pytest.MonkeyPatch) -> None:
    set_job(monkeypatch, WORLD_SIZE=1, MASTER_PORT=1)
    assert isinstance(open_store(TIME), dist.HashStore)


def test_dsreason_launcher_ranks_meet_at_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_job(monkeypatch, WORLD_SIZE=2, LOCAL_WORLD_SIZE=2, MASTER_PORT=1, DSREASON_ERROR_DIR=tmp_path)
    store = open_store(TIME)
    store.set("a", "1")
    assert open_store(TIME).get("a") == b"1"
    assert store.timeout == TIME


@pytest.mark.parametrize("host", [LOOPBACK, "node-0"])
def test_store_of_one_machine_listens_on_loopback(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that rank 1 connects to the loopback interface, too, whatever address `host` resolves to."""
    port = find_free_port("")
    set_job(monkeypatch, WORLD_SIZE=2, LOCAL_WORLD_SIZE=2, MASTER_ADDR=host, MASTER_PORT=port)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.environ["RANK"] = "1"
            open_store(TIME).set("a", "1")
            code = 0
        finally:
            os._exit(code)
    store = open_store(TIME)
    assert store.get("a") == b"1"
    assert find_listening(port) == [LOOPBACK]
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.skipif(not OWN_IPS, reason="this machine has only a loopback interface")
def test_listener_uses_only_a_local_ip_address() -> None:
    with listen(OWN_IPS[0]) as listener:
        assert find_listening(listener.getsockname()[1]) == OWN_IPS[:1]


@pytest.mark.parametrize("address", ["", "node-0", "192.0.2.77"])
def test_listener_for_a_name_uses_all_interfaces(address: str) -> None:
    with listen(address) as listener, socket.create_connection((LOOPBACK, listener.getsockname()[1]), timeout=20):
        assert listener.getsockname()[0] in ("::", "0.0.0.0")


def test_loopback_replaces_user_interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "VLLM_HOST_IP")
    for name in names:
        monkeypatch.setenv(name, "eth7")
    network.use_loopback()
    loopback = find_interface(LOOPBACK)
    assert [os.environ[name] for name in names] == [loopback, loopback, LOOPBACK]
