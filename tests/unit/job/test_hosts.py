"""Facts that hosts compare, and environment variables that a host takes from the first host."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from dsreason.config.schema import SFTConfig
from dsreason.config.schema_grpo import GRPOConfig
from dsreason.errors import ConfigError, DsReasonError
from dsreason.job import hosts, network
from dsreason.job.hosts import (
    find_differences,
    find_missing_variables,
    hash_code,
    select_shared_variables,
)


def test_equal_hosts_have_no_differences() -> None:
    facts = {"torch": "2.13.0", "optim.lr": 1e-6}
    assert find_differences([("node-0", facts), ("node-1", dict(facts))]) == []


def test_each_difference_names_host_and_both_values() -> None:
    first = {"torch": "2.13.0", "vllm": "0.24.0", "optim.lr": 1e-6}
    second = {"torch": "2.12.1", "optim.lr": 1e-6, "optim.eps": 1e-8}
    assert find_differences([("node-0", first), ("node-1", second), ("node-2", second), ("node-3", first)]) == [
        "torch: '2.13.0' on node-0, but '2.12.1' on node-1, and 1 more host differs",
        "vllm: '0.24.0' on node-0, but None on node-1, and 1 more host differs",
        "optim.eps: None on node-0, but 1e-08 on node-1, and 1 more host differs",
    ]


def test_changed_user_file_changes_the_code_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    names = ("my_adapter.py", "my_rewards.py", "mine/rewards.py")
    for name in names:
        (tmp_path / name).write_text("a = 1\n")
    rewards = {"my_rewards.py:short": 1.0, "mine.rewards:long": 0.5, "format": 0.1}
    config = GRPOConfig.model_validate({"data": {"adapter": "my_adapter.py:Mine"}, "reward": {"functions": rewards}})
    before = hash_code(config)
    assert before.keys() == {"code of dsreason", *(f"code of {name}" for name in names)}
    (tmp_path / "mine/rewards.py").write_text("a = 2\n")
    after = hash_code(config)
    assert {name for name in before if before[name] != after[name]} == {"code of mine/rewards.py"}


def test_code_facts_omit_missing_user_code() -> None:
    assert hash_code(SFTConfig()).keys() == {"code of dsreason"}


@pytest.mark.parametrize(
    ("name", "given"),
    [
        *[(name, True) for name in ("HF_TOKEN", "HF_HOME", "AWS_ENDPOINT_URL", "DSREASON_CACHE", "WANDB_API_KEY")],
        *[(name, True) for name in ("COSMOS_CACHE", "TP_SIZE")],
        *[(name, True) for name in ("WFM_REWARD_TOKEN", "WFM_REWARD_FETCH_URL", "PROD_S3_CHECKPOINT_ENDPOINT_URL")],
        *[(name, True) for name in ("REMOTE_REWARD_URL", "NCCL_IB_HCA", "GLOO_SOCKET_IFNAME", "CUDA_LAUNCH_BLOCKING")],
        *[(name, False) for name in ("CUDA_VISIBLE_DEVICES", "RANK", "MASTER_ADDR", "PATH", "VLLM_HOST_IP")],
        *[(name, False) for name in ("DSREASON_ERROR_DIR", "DSREASON_LAUNCHER_PID", "MY_HF_TOKEN")],
    ],
)
def test_first_host_shares_selected_variables(name: str, given: bool) -> None:
    assert select_shared_variables({name: "value"}) == ({name: "value"} if given else {})


@pytest.mark.parametrize(
    ("environment", "taken"),
    [
        ({}, {"HF_TOKEN", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION"}),
        ({"HF_TOKEN": "own"}, {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION"}),
        ({"AWS_PROFILE": "own"}, {"HF_TOKEN", "AWS_REGION"}),  # one key of the first host would not match the others
    ],
)
def test_host_keeps_its_own_variables(environment: dict[str, str], taken: set[str]) -> None:
    assert (
        find_missing_variables(["HF_TOKEN", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION"], environment)
        == taken
    )


def test_cosmos_keys_are_not_mixed_between_hosts() -> None:
    names = [f"PROD_S3_CHECKPOINT_{name}" for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "ENDPOINT_URL")]
    assert find_missing_variables([*names, "AWS_PROFILE"], {names[0]: "own"}) == {names[2], "AWS_PROFILE"}


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("HF_TOKEN", "x", True),
        ("AWS_ACCESS_KEY_ID", "x", True),
        ("VLLM_API_KEY", "x", True),
        ("https_proxy", "http://me:password@proxy", True),
        ("https_proxy", "http://proxy", False),
        ("REMOTE_REWARD_URL", "http://judge/?token=abcdefgh", True),
        ("REMOTE_REWARD_URL", "http://judge/?code=abcdefgh", True),
        ("REMOTE_REWARD_HEADERS", '{"X-Api": "abcdefg"}', True),
        ("WANDB_API_KEY_V2", "x", True),
        ("HF_PAT", "x", True),
        ("HTTPS_PROXY", "alice:password@proxy:3128", True),
        ("HTTPS_PROXY", "alice:password@proxy", True),
        ("HTTPS_PROXY", "proxy:3128", False),
        ("REMOTE_REWARD_URL", "http://judge:8000/score", False),
        ("HF_HOME", "/data/hf", False),
        ("NCCL_DEBUG", "INFO", False),
        ("AWS_REGION", "eu-west-1", False),
    ],
)
def test_credentials_are_known_by_name_or_value(name: str, value: str, expected: bool) -> None:
    assert hosts.is_credential(name, value) == expected


@pytest.fixture
def taken_port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The port where ranks should meet, taken by a program that accepts connections but never sends anything."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        settings = {"LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        for name, value in (settings | {"MASTER_PORT": str(port)}).items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
        yield port


def test_port_in_use_is_reported(taken_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(DsReasonError, match=rf"port {taken_port} is used by another process on this host"):
        hosts.join()


def test_unresponsive_program_at_port_is_not_awaited(
    taken_port: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(hosts, "JOIN_TIMEOUT", timedelta(seconds=0.3))
    monkeypatch.setattr(hosts, "GRACE", timedelta(seconds=0.3))
    child = os.fork()
    if child == 0:
        hosts.join()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    err = capfd.readouterr().err
    assert f"did not all connect to 127.0.0.1:{taken_port} within 0 s (the listening process does not respond)" in err


@pytest.mark.parametrize("name", ["no.such.host.invalid", "a b\x1b[31m", "x" * 300])
def test_unknown_master_host_is_reported(name: str, taken_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("MASTER_ADDR", name)
    assert " cannot resolve that name (timed out)" in str(hosts.build_rendezvous_error("timed out"))


def test_duplicate_rank_is_rejected(taken_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
    store = dist.HashStore()
    monkeypatch.setattr(network, "open_store", lambda timeout: store)
    hosts.join()
    hosts.release_store()
    with pytest.raises(ConfigError, match="another process of this job also has RANK=1"):
        hosts.join()
    hosts.release_store()


def test_missing_rank_is_named_when_store_is_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    settings |= {"MASTER_PORT": "1", "TORCHELASTIC_RESTART_COUNT": "0", "DSREASON_ERROR_DIR": str(tmp_path)}
    for name in (*settings, "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "VLLM_HOST_IP"):
        monkeypatch.setenv(name, settings.get(name, ""))
    monkeypatch.setattr(hosts, "JOIN_TIMEOUT", timedelta(seconds=0.3))
    with pytest.raises(DsReasonError, match="rank 1 did not connect"):
        hosts.exchange("a", 1)
    hosts.release_store()


def test_rank_on_deepspeed_host_takes_its_credentials(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sent: list[object] = []
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "HF_TOKEN": ""}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(hosts, "read_caller_environment", lambda: {"HF_TOKEN": "hf_secret"})
    monkeypatch.setattr(hosts, "exchange", lambda name, value: sent.append(value) or [value])
    hosts.share_environment()
    assert os.environ["HF_TOKEN"] == "hf_secret"
    assert "hf_secret" not in str(sent)
    assert capsys.readouterr().err.endswith(": these variables were copied from where the job was started: HF_TOKEN\n")
