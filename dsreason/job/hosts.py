"""How the ranks of a job meet: all reach its store, lack no variable, and run the same code on the same configuration."""

from __future__ import annotations

import hashlib
import ipaddress
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
from torch.distributed.rendezvous import rendezvous

import dsreason
from dsreason.config.deepspeed import resolve_deepspeed
from dsreason.config.load import dump_config
from dsreason.config.output import flat
from dsreason.config.schema import JobConfig
from dsreason.errors import ConfigError, DsReasonError
from dsreason.files.disk import sha256_of
from dsreason.job import launch
from dsreason.job.launchers import PDSH, launchers
from dsreason.job.record import versions
from dsreason.problems import listed
from dsreason.screen import say

JOIN_TIMEOUT = timedelta(minutes=3)
"""For all ranks to meet, and again for their first connections; a collective afterwards may take longer."""
GRACE = timedelta(seconds=10)
"""Beyond it, for torch to say itself what was missing."""

SHARED = re.compile(
    "DSREASON_CACHE|COSMOS_CACHE|TP_SIZE|(REMOTE|WFM)_REWARD_.*|PROD_S3_CHECKPOINT_.*|(HF|HUGGING_FACE|AWS|WANDB|NCCL|GLOO|TORCH_NCCL|VLLM)_.*"
    "|TRANSFORMERS_OFFLINE|CUDA_(LAUNCH_BLOCKING|DEVICE_MAX_CONNECTIONS|MODULE_LOADING)|PYTORCH_(CUDA_)?ALLOC_CONF"
    "|(HTTP|HTTPS|NO)_PROXY|(http|https|no)_proxy"
)
"""Variables that hosts take from the first one where they have none of their own."""
OWN = {"VLLM_HOST_IP", "VLLM_PORT"}
CREDENTIALS = (
    {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"},
    {"PROD_S3_CHECKPOINT_ACCESS_KEY_ID", "PROD_S3_CHECKPOINT_SECRET_ACCESS_KEY"},
)
"""Those of a set belong together: a host that has one takes none of them."""

SHOWN = 5
"""Differences between hosts in one error."""

_store: dist.Store | None = None


def several_hosts() -> bool:
    return local_size() < int(os.environ["WORLD_SIZE"])


def local_size() -> int:
    """Ranks on this host: torchrun says LOCAL_WORLD_SIZE, the deepspeed launcher LOCAL_SIZE. A process in no job is one."""
    sizes = (os.environ.get(name) for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "WORLD_SIZE"))
    return int(next(filter(None, sizes), "1"))


def join() -> dist.Store:
    """The job's store at MASTER_ADDR:MASTER_PORT. Once all ranks are there, hosts share what is to be shared."""
    global _store
    if _store is None:
        try:
            with ending_after(JOIN_TIMEOUT + GRACE, not_met("what listens there does not answer")):
                store, *_ = next(rendezvous("env://", timeout=JOIN_TIMEOUT))
        except dist.DistError as error:
            raise not_met(str(error)) from error
        # torchrun keeps its store over restarts, and torch would read in it where the ranks before these have listened.
        _store = dist.PrefixStore(f"attempt_{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
        rank = os.environ["RANK"]
        if launch.RESTARTS not in os.environ and _store.add(f"joined/{rank}", 1) > 1:  # torchrun numbers them itself
            raise ConfigError(f"{this_rank()}: another process of this job has RANK={rank} as well; give each its own")
        if several_hosts():
            share_environment()
            use_interface(exchange("address", own_address(os.environ["MASTER_ADDR"])))
    return _store


def not_met(cause: str) -> DsReasonError:
    if "EADDRINUSE" in cause:
        return DsReasonError(
            f"{this_rank()}: port {os.environ['MASTER_PORT']} is taken by another process of this host, perhaps another job; "
            "choose another MASTER_PORT for all ranks (torchrun --master-port, deepspeed --master_port)"
        )
    unknown = "" if knows(os.environ["MASTER_ADDR"]) else f": no host of that name is known on {socket.gethostname()}"
    return DsReasonError(
        f"{this_rank()}: the ranks did not all connect to {master()} within {limit()}{unknown} ({cause}); look whether all "
        "hosts have started, whether a firewall between them closes that port, and whether another program has it"
    )


@contextmanager
def ending_after(time: timedelta, error: DsReasonError) -> Iterator[None]:
    """Inside, this process ends with the error once that time is over: native code that waits hears of no exception."""
    timer = threading.Timer(time.total_seconds(), launch.report_and_exit, [error])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def leave() -> None:
    global _store
    _store = None


def exchange(name: str, value: Any) -> list[Any]:
    """The value of every rank, by rank, through the store alone. For small JSON values; once for each name."""
    store, keys = join(), [f"{name}/{rank}" for rank in range(int(os.environ["WORLD_SIZE"]))]
    store.set(keys[int(os.environ["RANK"])], json.dumps(value))
    try:
        store.wait(keys, JOIN_TIMEOUT)
        return [json.loads(text) for text in store.multi_get(keys)]
    except dist.DistStoreError as error:
        missing = ", ".join(str(rank) for rank, key in enumerate(keys) if not store.check([key]))
        raise DsReasonError(
            f"{this_rank()}: rank {missing} did not connect to {master()} within {limit()}; look at the output of "
            "their hosts, and whether a firewall closes that port"
        ) from error
    except dist.DistError as error:
        raise DsReasonError(
            f"{this_rank()}: lost the connection to {master()} ({error}); look at the output of rank 0"
        ) from error


@contextmanager
def connecting() -> Iterator[None]:
    """Around the first connections between ranks: after JOIN_TIMEOUT this process ends, and says what to look at.

    The native code would wait as long as a collective may take.
    """
    if os.environ["WORLD_SIZE"] == "1":
        yield
        return
    try:
        with ending_after(JOIN_TIMEOUT, not_connected(f"nothing for {limit()}")):
            yield
    except torch.AcceleratorError:
        raise
    except RuntimeError as error:  # gloo's and NCCL's
        raise not_connected(str(error)) from error


def not_connected(cause: str) -> DsReasonError:
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    used = " and ".join(f"{name} ({os.environ.get(name, 'not set')})" for name in names)
    return DsReasonError(
        f"{this_rank()}: the ranks met at {master()}, and then could not connect to each other ({cause}); hosts must reach "
        f"each other on every port of the interface that is named in {used}: look at firewalls, or name the one that leads "
        "to the other hosts"
    )


def master() -> str:
    return f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"


def limit() -> str:
    return f"{JOIN_TIMEOUT.total_seconds():.0f} s"


def this_rank() -> str:
    """`rank 3 on node-1 (10.0.0.2)`: with the address from which its host reaches the first one."""
    address = own_address(os.environ["MASTER_ADDR"])
    host = socket.gethostname() + (f" ({address})" if address else "")
    return f"rank {os.environ['RANK']} on {host}"


def own_address(peer: str) -> str | None:
    """The address of this host on the way to `peer`, None if that is this host's loopback. Nothing is sent."""
    with suppress(OSError, UnicodeError):  # an unknown name, one that none can have, or no way there
        family, kind, _, _, address = socket.getaddrinfo(peer, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            own_ip = str(probe.getsockname()[0])
            return None if ipaddress.ip_address(own_ip.partition("%")[0]).is_loopback else own_ip
    return None


def knows(name: str) -> bool:
    try:
        return bool(socket.getaddrinfo(name, None))
    except (OSError, UnicodeError):
        return False


def interface_of(address: str) -> str | None:
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address for entry in entries):
            return str(name)
    return None


# One environment


def share_environment() -> None:
    """Give every host the variables that it lacks and the first one has; only names are printed. Every rank calls it.

    In place of the first host the one where `deepspeed` was called: pdsh starts the ranks there without the variables, too.
    """
    called = shared(caller_environment())
    own_values = called | shared(os.environ)
    offers = exchange("names", [bool(called), sorted(own_values)])
    source = next((rank for rank, (is_caller, _) in enumerate(offers) if is_caller), 0)
    wanted_names = exchange("wanted", sorted(lacking(offers[source][1], os.environ)))
    if not any(wanted_names):
        return
    rank = int(os.environ["RANK"])
    values = exchange(
        "values", {name: own_values[name] for name in set().union(*wanted_names)} if rank == source else None
    )[source]
    os.environ.update({name: values[name] for name in wanted_names[rank]})
    if wanted_names[rank] and os.environ["LOCAL_RANK"] == "0":
        say(
            f"{this_rank()} takes these variables from where the job was started: {', '.join(wanted_names[rank])}",
            err=True,
        )
    exchange("taken", None)
    if rank == source:
        join().delete_key(f"values/{rank}")


def caller_environment() -> dict[str, str]:
    """Of the shell that `deepspeed --hostfile` was called in, where that was on this host."""
    for process in launchers():
        with suppress(psutil.Error):
            if process.name() in PDSH:
                return dict(process.environ())
    return {}


def shared(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if SHARED.fullmatch(name) and name not in OWN}


def lacking(names: Collection[str], environment: Mapping[str, str]) -> set[str]:
    """Those of the first host's variables that a host with `environment` takes."""
    own_credentials = set().union(*(together for together in CREDENTIALS if together & environment.keys()))
    return set(names) - environment.keys() - own_credentials


def use_interface(addresses: Sequence[str | None]) -> None:
    """Have gloo use the interface that leads to the other hosts.

    By itself it takes the one that this host's name stands for: often 127.0.1.1, where no other host finds it.
    """
    peer = next((address for address in addresses if address and interface_of(address) is None), None)
    interface = interface_of(own_address(peer) or "") if peer else None
    if interface:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


# One code and one configuration


def check_alike(config: JobConfig, options: Mapping[str, str | None]) -> None:
    """Compare the hosts, if there are several. Every rank calls it.

    Args:
        options: of the command line, those that are not in the configuration.

    Raises:
        ConfigError: on every rank, where a host differs from the first one.
    """
    if not several_hosts():
        return
    device = launch.device_kind(launch.gpu_count())
    deepspeed = resolve_deepspeed(config.deepspeed, config, device=device, world_size=int(os.environ["WORLD_SIZE"]))
    settings = flat({**dump_config(config), "deepspeed": deepspeed})
    compare({**versions(), "device": device, **code_facts(config), **options, **settings})


def compare(facts: Mapping[str, Any]) -> None:
    """ConfigError on every rank where a host's facts differ from the first one's. Every rank calls it."""
    entry = (f"{socket.gethostname()} (rank {os.environ['RANK']})", facts) if os.environ["LOCAL_RANK"] == "0" else None
    differing = differences([host_facts for host_facts in exchange("facts", entry) if host_facts])
    if not differing:
        return
    with suppress(DsReasonError, dist.DistError):
        exchange("compared", None)  # the store ends with rank 0
    lines = listed(differing, SHOWN, separator="\n  ")
    raise ConfigError(
        f"the hosts of this job differ:\n  {lines}\n"
        "give all of them the same environment, code, files and options, and start again"
    )


def differences(hosts: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
    """One text for each fact that is not the same on all hosts: the first host's value, and the first other one."""
    (first, facts), *other_hosts = hosts
    texts = []
    for name in dict.fromkeys(name for _, host_facts in hosts for name in host_facts):
        differing = [
            (host, host_facts.get(name)) for host, host_facts in other_hosts if host_facts.get(name) != facts.get(name)
        ]
        if differing:
            host, value = differing[0]
            count = len(differing) - 1
            more = f", and {count} more of the hosts differ{'s' * (count == 1)}" if count else ""
            texts.append(f"{name}: {facts.get(name)!r} on {first}, {value!r} on {host}{more}")
    return texts


def code_facts(config: JobConfig) -> dict[str, str]:
    """Hashes of this package, and of the Python files that a configuration names: `my_adapter.py`, `mine.rewards:short`."""
    root, total = Path(dsreason.__file__).parents[1], hashlib.sha256()
    for package in ("dsreason", "data_adapters"):
        for file in sorted((root / package).rglob("*.py")):
            total.update(f"{file.relative_to(root)} {sha256_of(file)}\n".encode())
    return {"code of dsreason": total.hexdigest()[:12]} | {
        f"code of {file}": sha256_of(file)[:12] for file in named_files(dump_config(config))
    }


def named_files(document: Any) -> list[Path]:
    """The Python files that the keys and values of a JSON document name, also as `package.module:attr`."""
    targets = set(re.findall(r'"([\w./~-]{1,200})[":]', json.dumps(document, ensure_ascii=False)))
    names = [target if target.endswith(".py") else f"{target.replace('.', '/')}.py" for target in sorted(targets)]
    return [file for file in (Path(name).expanduser() for name in names) if file.is_file()]
