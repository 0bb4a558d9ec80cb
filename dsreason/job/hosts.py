"""Rendezvous of a job's ranks: they connect to a store, share environment variables, and compare code and configuration."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import socket
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

import dsreason
from dsreason.config.deepspeed import resolve_deepspeed
from dsreason.config.load import dump_config
from dsreason.config.output import flatten_keys
from dsreason.config.schema import JobConfig
from dsreason.errors import ConfigError, DsReasonError
from dsreason.files.disk import compute_sha256
from dsreason.job import launch, network
from dsreason.job.launchers import PDSH, find_launchers
from dsreason.job.record import read_versions
from dsreason.problems import join_first
from dsreason.screen import print_message
from dsreason.secrets import VARIABLES, hide_in_json, is_secret_variable

JOIN_TIMEOUT = timedelta(minutes=3)
"""Time limit for all ranks to reach the store, and then again to connect to each other. Later collectives may take longer."""
GRACE = timedelta(seconds=10)
"""Extra time after a time limit, in which torch can still report the cause itself."""

SHARED = re.compile(
    "DSREASON_CACHE|COSMOS_CACHE|TP_SIZE|(REMOTE|WFM)_REWARD_.*|PROD_S3_CHECKPOINT_.*|(HF|HUGGING_FACE|AWS|WANDB|NCCL|GLOO|TORCH_NCCL|VLLM)_.*"
    "|TRANSFORMERS_OFFLINE|CUDA_(LAUNCH_BLOCKING|DEVICE_MAX_CONNECTIONS|MODULE_LOADING)|PYTORCH_(CUDA_)?ALLOC_CONF"
    "|(HTTP|HTTPS|NO)_PROXY|(http|https|no)_proxy"
)
"""Pattern for the variables that a host takes from the first host if they are not set locally."""
OWN = {"VLLM_HOST_IP", "VLLM_PORT"}
"""Variables that match `SHARED` but are specific to each host."""
CREDENTIALS = (
    {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"},
    {"PROD_S3_CHECKPOINT_ACCESS_KEY_ID", "PROD_S3_CHECKPOINT_SECRET_ACCESS_KEY"},
)
"""Groups of variables that belong together: a host that sets one variable in a group takes none of them from another host."""
SHARE_CREDENTIALS = "DSREASON_SHARE_CREDENTIALS"
"""Environment variable on the first host; 1 allows it to send credentials to the other hosts, unencrypted."""

SHOWN = 5
"""Maximum number of differences between hosts to list in an error."""

_store: dist.Store | None = None


def join() -> dist.Store:
    """Open the job's store, choose the interfaces on which this rank listens, and share variables between the hosts."""
    global _store
    if _store is None:
        try:
            with end_after(JOIN_TIMEOUT + GRACE, build_rendezvous_error("the listening process does not respond")):
                store = network.open_store(JOIN_TIMEOUT)
        except (OSError, dist.DistError) as error:
            raise build_rendezvous_error(str(error)) from error
        # torchrun keeps its store across restarts. Without the prefix, torch would read the addresses of the previous attempt.
        _store = dist.PrefixStore(f"attempt_{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
        rank = os.environ["RANK"]
        if launch.RESTARTS not in os.environ and _store.add(f"joined/{rank}", 1) > 1:  # torchrun assigns ranks itself
            raise ConfigError(
                f"{describe_rank()}: another process of this job also has RANK={rank}; set a different RANK for each"
            )
        if network.is_on_one_machine():
            network.use_loopback()
        elif network.has_several_hosts():
            share_environment()
            network.use_interface(exchange("address", network.find_local_address(os.environ["MASTER_ADDR"])))
    return _store


def build_rendezvous_error(cause: str) -> DsReasonError:
    if "EADDRINUSE" in cause or os.strerror(errno.EADDRINUSE) in cause:
        return DsReasonError(
            f"{describe_rank()}: port {os.environ['MASTER_PORT']} is used by another process on this host, perhaps of another "
            "job; choose another MASTER_PORT for all ranks (torchrun --master-port, deepspeed --master_port)"
        )
    unknown_host = (
        "" if can_resolve(os.environ["MASTER_ADDR"]) else f", because {socket.gethostname()} cannot resolve that name"
    )
    return DsReasonError(
        f"{describe_rank()}: the ranks did not all connect to {get_master_address()} within "
        f"{format_join_timeout()}{unknown_host} ({cause}); check that all "
        "hosts have started, that no firewall between them blocks that port, and that no other program uses it"
    )


@contextmanager
def end_after(time: timedelta, error: DsReasonError) -> Iterator[None]:
    """Report `error` and end the process if the block takes longer than `time`. (An exception cannot interrupt native code.)"""
    timer = threading.Timer(time.total_seconds(), launch.report_and_exit, [error])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def release_store() -> None:
    global _store
    _store = None


def exchange(name: str, value: Any) -> list[Any]:
    """Exchange small JSON values through the store, and return all ranks' values, in rank order. Use each name only once."""
    store, keys = join(), [f"{name}/{rank}" for rank in range(int(os.environ["WORLD_SIZE"]))]
    store.set(keys[int(os.environ["RANK"])], json.dumps(value))
    try:
        store.wait(keys, JOIN_TIMEOUT)
        return [json.loads(text) for text in store.multi_get(keys)]
    except dist.DistNetworkError as error:
        raise DsReasonError(
            f"{describe_rank()}: lost the connection to {get_master_address()} ({error}); check the output of rank 0"
        ) from error
    except RuntimeError as error:  # a file store raises plain RuntimeError, not a subclass
        missing = ", ".join(str(rank) for rank, key in enumerate(keys) if not store.check([key]))
        raise DsReasonError(
            f"{describe_rank()}: rank {missing} did not connect to {get_master_address()} within "
            f"{format_join_timeout()}; check the output "
            "on their hosts, and that no firewall blocks that port"
        ) from error


@contextmanager
def limit_connecting_time() -> Iterator[None]:
    """Limit the time for the first connections between ranks: after JOIN_TIMEOUT, report what to check and end the process.

    Otherwise, the native code would wait until a collective times out.
    """
    if os.environ["WORLD_SIZE"] == "1":
        yield
        return
    try:
        with end_after(JOIN_TIMEOUT, build_connection_error(f"no connection within {format_join_timeout()}")):
            yield
    except torch.AcceleratorError:
        raise
    except RuntimeError as error:  # raised by gloo and NCCL
        raise build_connection_error(str(error)) from error


def build_connection_error(cause: str) -> DsReasonError:
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    used = " and ".join(f"{name} ({os.environ.get(name, 'not set')})" for name in names)
    return DsReasonError(
        f"{describe_rank()}: the ranks reached {get_master_address()}, but then could not connect to each other "
        f"({cause}); hosts must reach "
        f"each other on every port of the interface set in {used}; check firewalls, or set both variables to the "
        "interface that leads to the other hosts"
    )


def get_master_address() -> str:
    return f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"


def format_join_timeout() -> str:
    return f"{JOIN_TIMEOUT.total_seconds():.0f} s"


def describe_rank() -> str:
    """Describe this rank as `rank 3 on node-1 (10.0.0.2)`, with the IP address that it uses to reach the first host."""
    address = network.find_local_address(os.environ["MASTER_ADDR"])
    host = socket.gethostname() + (f" ({address})" if address else "")
    return f"rank {os.environ['RANK']} on {host}"


def can_resolve(name: str) -> bool:
    try:
        return bool(socket.getaddrinfo(name, None))
    except (OSError, UnicodeError):
        return False


# Sharing of environment variables


def share_environment() -> None:
    """Copy environment variables from the first host to hosts that lack them, and print their names, not values. Collective.

    Credentials are copied only if the first host allows it; otherwise, rank 0 prints a warning that lists what each host lacks.

    Under `deepspeed`, the variables come from the shell in which `deepspeed` was called, because pdsh starts the ranks without
    them, even on that shell's host. Ranks on that host read them from the environment of a process, not from the store.
    """
    rank, host = int(os.environ["RANK"]), socket.gethostname()
    caller = read_caller_environment()
    caller_values = select_shared_variables(caller)
    own_values = caller_values | select_shared_variables(os.environ)
    copied_names = find_missing_variables(caller_values, os.environ)
    os.environ.update({name: caller_values[name] for name in copied_names})
    may_share = (caller or os.environ).get(SHARE_CREDENTIALS) == "1"
    kept_names = [] if may_share else [name for name, value in own_values.items() if is_credential(name, value)]
    offers = exchange("names", [bool(caller_values), host, sorted(own_values), kept_names])
    source = next((rank for rank, (is_caller, *_) in enumerate(offers) if is_caller), 0)
    _, source_host, offered_names, kept_names = offers[source]
    missing_names = find_missing_variables(offered_names, os.environ)
    is_first_here = os.environ["LOCAL_RANK"] == "0"
    lacking = f"{host} has no {', '.join(names)}" if (names := sorted(missing_names.intersection(kept_names))) else ""
    requests = exchange("wanted", [sorted(missing_names.difference(kept_names)), lacking if is_first_here else ""])
    if rank == 0 and (lines := [line for _, line in requests if line]):
        print_message(
            f"warning: {source_host} has credentials that other hosts lack: {'; '.join(lines)}; set them there if the run needs "
            f"them, or set {SHARE_CREDENTIALS}=1 on {source_host} to send them to the other hosts unencrypted",
            err=True,
        )
    requested_names = [names for names, _ in requests]
    if any(requested_names):
        offer = {name: own_values[name] for name in set().union(*requested_names)} if rank == source else None
        values = exchange("values", offer)[source]
        os.environ.update({name: values[name] for name in requested_names[rank]})
        exchange("taken", None)
        if rank == source:
            join().delete_key(f"values/{rank}")
    if is_first_here and (names := sorted(copied_names.union(requested_names[rank]))):
        print_message(
            f"{describe_rank()}: these variables were copied from where the job was started: {', '.join(names)}",
            err=True,
        )


def is_credential(name: str, value: str) -> bool:
    """Return whether a variable's name or value shows that it is secret.

    URLs with a query and proxies with a password, such as `http://user:password@host` or `user:password@host`, are secret.
    """
    is_named = name in VARIABLES or is_secret_variable(name)
    return is_named or hide_in_json(value) != value or re.search(r"\S:\S*@", value) is not None


def read_caller_environment() -> dict[str, str]:
    """Return the environment in which `deepspeed --hostfile` was called; an empty dict if that was on another host."""
    for process in find_launchers():
        with suppress(psutil.Error):
            if process.name() in PDSH:
                return dict(process.environ())
    return {}


def select_shared_variables(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if SHARED.fullmatch(name) and name not in OWN}


def find_missing_variables(names: Collection[str], environment: Mapping[str, str]) -> set[str]:
    """Return which of `names`, the first host's variables, a host with the given `environment` takes from it."""
    own_credentials = set().union(*(group for group in CREDENTIALS if group & environment.keys()))
    return set(names) - environment.keys() - own_credentials


# Comparison of code and configuration


def check_hosts_match(config: JobConfig, options: Mapping[str, str | None]) -> None:
    """Check that all hosts of a multi-host job have the same versions, code and configuration. Collective.

    Args:
        options: command-line options that are not part of the configuration.

    Raises:
        ConfigError: a host differs from the first host; raised on every rank.
    """
    if not network.has_several_hosts():
        return
    device = launch.get_device_kind(launch.count_gpus())
    deepspeed = resolve_deepspeed(config.deepspeed, config, device=device, world_size=int(os.environ["WORLD_SIZE"]))
    settings = flatten_keys({**dump_config(config), "deepspeed": deepspeed})
    # Secrets are masked, because the facts travel through the store.
    compare(hide_in_json({**read_versions(), "device": device, **hash_code(config), **options, **settings}))


def compare(facts: Mapping[str, Any]) -> None:
    """Raise ConfigError on every rank if any host's facts differ from those of the first host. Collective."""
    entry = (f"{socket.gethostname()} (rank {os.environ['RANK']})", facts) if os.environ["LOCAL_RANK"] == "0" else None
    differing = find_differences([host_facts for host_facts in exchange("facts", entry) if host_facts])
    if not differing:
        return
    with suppress(DsReasonError, dist.DistError):
        exchange("compared", None)  # rank 0 hosts the store, so it must not end before all ranks have read the facts
    lines = join_first(differing, SHOWN, separator="\n  ")
    raise ConfigError(
        f"the hosts of this job differ:\n  {lines}\n"
        "use the same environment, code, files and options on all hosts, and start again"
    )


def find_differences(hosts: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
    """Describe each fact that differs between hosts: its value on the first host, its value on the first host that differs,
    and how many more hosts differ."""
    (first, facts), *other_hosts = hosts
    texts = []
    for name in dict.fromkeys(name for _, host_facts in hosts for name in host_facts):
        differing = [
            (host, host_facts.get(name)) for host, host_facts in other_hosts if host_facts.get(name) != facts.get(name)
        ]
        if differing:
            host, value = differing[0]
            count = len(differing) - 1
            more = f", and {count} more {'host differs' if count == 1 else 'hosts differ'}" if count else ""
            texts.append(f"{name}: {facts.get(name)!r} on {first}, but {value!r} on {host}{more}")
    return texts


def hash_code(config: JobConfig) -> dict[str, str]:
    """Hash this package and the Python files named in the configuration (`my_adapter.py`, `mine.rewards:short`); return the
    hashes by name."""
    root, total = Path(dsreason.__file__).parents[1], hashlib.sha256()
    for package in ("dsreason", "data_adapters"):
        for file in sorted((root / package).rglob("*.py")):
            total.update(f"{file.relative_to(root)} {compute_sha256(file)}\n".encode())
    return {"code of dsreason": total.hexdigest()[:12]} | {
        f"code of {file}": compute_sha256(file)[:12] for file in find_named_files(dump_config(config))
    }


def find_named_files(document: Any) -> list[Path]:
    """Return the existing Python files that keys or values in a JSON document name, as a path or as `package.module:attr`."""
    targets = set(re.findall(r'"([\w./~-]{1,200})[":]', json.dumps(document, ensure_ascii=False)))
    names = [target if target.endswith(".py") else f"{target.replace('.', '/')}.py" for target in sorted(targets)]
    return [file for file in (Path(name).expanduser() for name in names) if file.is_file()]
