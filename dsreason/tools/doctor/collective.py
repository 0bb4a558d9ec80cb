"""Test of a collective, in which two ranks connect and sum numbers. Run as `python -m dsreason.tools.doctor.collective`.

The process started this way starts the ranks, and each rank runs this module, too.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from dsreason.job import launch
from dsreason.job.leftovers import make_temporary_folder
from dsreason.screen import print_message

RANKS = 2
VALUES = 8 * 1024**2
"""Number of float32 values in the timed all-reduce."""


def run_rank() -> None:
    """Run one rank: check and time an all-reduce of `VALUES` values.

    Raises:
        DsReasonError: the sum is wrong.
    """
    import torch
    import torch.distributed as dist

    from dsreason.errors import DsReasonError
    from dsreason.job.ranks import init_world, shutdown

    world = init_world()
    expected = float(sum(range(1, world.size + 1)))
    values = torch.full((VALUES,), float(world.rank + 1), device=world.device)
    dist.all_reduce(values.clone())  # the first collective establishes the connection, so it is not timed
    started = time.monotonic()
    dist.all_reduce(values)
    total = values.double().mean().item()
    seconds = time.monotonic() - started
    if total != expected or not torch.all(values == expected).item():
        raise DsReasonError(
            f"the sum over {world.size} ranks is {total:g}, but should be {expected:g}; the connection corrupts data"
        )
    if world.is_main:
        speed = VALUES * 4 / seconds / 1e9
        print_message(f"collective: {dist.get_backend()}, {world.size} ranks, sums are correct, {speed:.1f} GB/s")
    shutdown()


def main() -> None:
    """Run one rank per GPU, at most `RANKS`; without GPUs, run `RANKS` ranks on the CPU."""
    launch.prepare_environment()
    gpus = launch.count_gpus()
    ranks = min(RANKS, gpus) or RANKS
    with make_temporary_folder() as folder:
        launch.start_ranks(
            lambda attempt: ["-m", "dsreason.tools.doctor.collective"], ranks=ranks, log_dir=Path(folder)
        )


if __name__ == "__main__":
    try:
        if launch.is_rank():
            launch.enter_rank()
            run_rank()
        else:
            main()
    except Exception as error:  # noqa: BLE001 (any error is reported as the `dsreason` command does)
        sys.exit(launch.report(error))
