"""The ranks of a job: this process's identity and device, and collectives for small Python objects."""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist

from dsreason.errors import ConfigError, DsReasonError
from dsreason.job import hosts, network
from dsreason.job.gpu import choose_device, translate_gpu_errors
from dsreason.job.launch import is_started_by_us
from dsreason.job.part_of import PartOf

COLLECTIVE_TIMEOUT = timedelta(minutes=60)
WAITING_TIMEOUT = timedelta(hours=24)
"""Time limit for collectives in which ranks wait while one rank downloads, converts or exports data for all of them."""

T = TypeVar("T")

_waiting_group: dist.ProcessGroup | None = None


@dataclass(frozen=True)
class World:
    """This process's position in the job: `World(rank=3, local_rank=1, size=4, device=torch.device("cuda:1"))`."""

    rank: int
    local_rank: int
    size: int
    device: torch.device
    folder_ranks: tuple[int, ...] = ()
    """If hosts have separate output folders, the ranks that share this rank's folder; empty if all ranks share one folder."""
    ranks_per_row: int = 1
    """Number of consecutive ranks that compute each row together."""
    group: Any = None
    """Process group of this rank and the ranks that compute rows together with it; None if each rank has its own rows."""

    @property
    def row_part(self) -> PartOf:
        """The part of each row that this rank computes."""
        return PartOf(self.rank % self.ranks_per_row, self.ranks_per_row)

    def select_group_values(self, values: Sequence[T]) -> list[T]:
        """Return one value per row group, given one value per rank; the values within each group must be equal."""
        return list(values[:: self.ranks_per_row])

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def ranks_here(self) -> Sequence[int]:
        """The ranks that write to this rank's output folder."""
        return self.folder_ranks or range(self.size)

    @property
    def is_first_of_folder(self) -> bool:
        """Whether this rank does the work that is done once per output folder."""
        return self.rank == self.ranks_here[0]


def init_world() -> World:
    """Join the job that the environment variables describe, or start a single-process job if no launcher was used.

    This works under dsreason's own launcher, torchrun and `deepspeed`.

    Raises:
        ConfigError: the environment variables are incomplete, or the GPUs cannot be used.
    """
    global _waiting_group
    _set_single_process_variables()
    local_rank = int(os.environ["LOCAL_RANK"])
    device = choose_device(local_rank)
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    set_threads(network.count_local_ranks())
    if not dist.is_initialized():
        import deepspeed  # noqa: F401 (not earlier: importing it chooses the accelerator from DS_ACCELERATOR)

        store = hosts.join()
        hosts.exchange("ready to connect", None)  # wait for ranks whose imports take longer
        store.set_timeout(COLLECTIVE_TIMEOUT)
        with hosts.limit_connecting_time(), translate_gpu_errors():
            _init_deepspeed(device, store)
            _waiting_group = dist.new_group(backend="gloo", timeout=WAITING_TIMEOUT)
            dist.all_reduce(torch.zeros(1, device=device))  # NCCL connects at the first collective
            wait_for_ranks()
    return World(dist.get_rank(), local_rank, dist.get_world_size(), device)


def _set_single_process_variables() -> None:
    set_names = {name for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE") if name in os.environ}
    if not set_names:
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")
        os.environ["MASTER_PORT"] = str(find_free_port())
        return
    missing = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} - os.environ.keys()
    if missing:
        raise ConfigError(
            f"environment: contains {', '.join(sorted(set_names))}, but not {', '.join(sorted(missing))}; "
            "start with torchrun or deepspeed, or unset them to start without a launcher"
        )


def find_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def build_row_groups(world: World, ranks_per_row: int) -> World:
    """Group ranks on the same host so that `ranks_per_row` of them compute each row together; return the new `World`. Collective.

    Raises:
        ConfigError: `ranks_per_row` does not divide the number of ranks on a host; raised on every rank.
    """
    if ranks_per_row == 1:
        return world
    with share_errors():
        if network.count_local_ranks() % ranks_per_row:
            raise ConfigError(
                f"train.sequence_parallel_size ({ranks_per_row}) does not divide the number of ranks on {socket.gethostname()} "
                f"({network.count_local_ranks()}), and ranks that compute a packed row together must be on one host; lower it, "
                "or start a different number of ranks there"
            )
    starts = range(0, world.size, ranks_per_row)
    groups = [dist.new_group(list(range(first, first + ranks_per_row)), timeout=COLLECTIVE_TIMEOUT) for first in starts]
    return replace(world, ranks_per_row=ranks_per_row, group=groups[world.rank // ranks_per_row])


def gather_in_group(value: T, world: World) -> list[T]:
    """Gather values from the ranks in this rank's row group, in rank order. The objects must not contain large tensors."""
    if world.group is None:
        return [value]
    values: list[Any] = [None] * world.ranks_per_row
    dist.all_gather_object(values, value, group=world.group)
    return values


def set_threads(local_size: int) -> None:
    """Divide this host's cores among its ranks, unless OMP_NUM_THREADS is set.

    Under torchrun, OMP_NUM_THREADS is ignored, because torchrun sets it to 1 when it starts several ranks, regardless of what
    the user wants.
    """
    under_torchrun = "TORCHELASTIC_RUN_ID" in os.environ and not is_started_by_us()
    if "OMP_NUM_THREADS" in os.environ and not under_torchrun:
        return
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // local_size))


def _init_deepspeed(device: torch.device, store: dist.Store) -> None:
    import deepspeed

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    backend, bound = ("nccl", device) if device.type == "cuda" else ("gloo", None)
    if backend == "gloo":
        # Otherwise, DeepSpeed would compile its shared-memory all-reduce and crash if ninja or a compiler is missing.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # This is what DeepSpeed would call, but with the job's store. The device is bound only if the job has several ranks.
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=size,
        timeout=COLLECTIVE_TIMEOUT,
        device_id=bound if size > 1 else None,
    )
    deepspeed.init_distributed(backend, auto_mpi_discovery=False, timeout=COLLECTIVE_TIMEOUT, verbose=False)


def shutdown() -> None:
    """Leave the job; do nothing if this process has not joined one."""
    global _waiting_group
    if dist.is_initialized():
        dist.destroy_process_group()
    _waiting_group = None
    hosts.release_store()


def seed_everything(seed: int, rank: int) -> None:
    """Seed Python, NumPy and torch (on all devices), with a different seed on each rank."""
    random.seed(seed + rank)
    np.random.seed((seed + rank) % 2**32)
    torch.manual_seed(seed + rank)


def connect_to_store() -> dist.Store:
    """Open a separate connection to the job's store, because the default one is blocked while a thread waits for a key."""
    store: dist.Store = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]  # not in torch's stubs
    return store


def wait_for_ranks() -> None:
    """Wait for all ranks, for up to `WAITING_TIMEOUT`. Collective."""
    dist.barrier(_waiting_group)


def gather_objects(value: T) -> list[T]:
    """Gather small Python objects from all ranks, and return them on every rank, in rank order."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group=_waiting_group)
    return values


def broadcast_object(value: Any) -> Any:
    """Return rank 0's value on every rank."""
    values = [value]
    dist.broadcast_object_list(values, src=0, group=_waiting_group)
    return values[0]


def reduce_sum(value: float) -> float:
    """Return the sum of `value` over all ranks, computed in float64."""
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total, group=_waiting_group)
    return float(total)


def run_on_rank_zero(call: Callable[[], T]) -> T:
    """Run `call` only on rank 0 and return its result, which must be small, on every rank.

    If `call` raises a `DsReasonError`, every rank raises the error, so that no rank waits forever.
    """
    with share_errors():
        result = call() if dist.get_rank() == 0 else None
    return cast(T, broadcast_object(result))


def run_once_per_folder(world: World, call: Callable[[], object]) -> None:
    """Run `call` on one rank per output folder. If `call` raises a `DsReasonError`, every rank raises the error."""
    with share_errors():
        if world.is_first_of_folder:
            call()


@contextmanager
def share_errors() -> Iterator[None]:
    """If any rank raises a `DsReasonError` in the block, raise that of the lowest such rank on every rank. Collective.

    Otherwise, the remaining ranks would wait forever in the next collective.
    """
    error: DsReasonError | None = None
    try:
        yield
    except DsReasonError as caught:
        error = caught
    for rank_error in gather_objects(error):
        if rank_error is not None:
            raise rank_error


@contextmanager
def run_first_rank_first(world: World) -> Iterator[None]:
    """Run the block on the first rank of each host before the other ranks, which can then use the caches that it has filled."""
    if world.local_rank != 0:
        wait_for_ranks()
    yield
    if world.local_rank == 0:
        wait_for_ranks()
    wait_for_ranks()
