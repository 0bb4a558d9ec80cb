"""A minimal launcher and its ranks, which test_launch.py starts with `python ranks.py launch MODE RANKS RESTARTS LOG_DIR`."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from dsreason.errors import DataError, RewardError
from dsreason.job import launch
from dsreason.job.failures import record_activity


def work(mode: str, attempt: int) -> None:
    rank = int(os.environ["RANK"])
    Path(f"worked_{rank}_in_attempt_{launch.get_attempt()}").touch()
    if mode == "environment":
        print(f"out of rank {rank}", flush=True)
        print(f"err of rank {rank}", file=sys.stderr, flush=True)
        os.system(f"echo native of rank {rank}")
        names = ("OMP_NUM_THREADS", "DS_ACCELERATOR", "TOKENIZERS_PARALLELISM", "WORLD_SIZE", "LOCAL_RANK")
        print(" ".join(f"{name}={os.environ[name]}" for name in names), flush=True)
        print("python on PATH:", str(Path(sys.executable).parent) in os.environ["PATH"].split(os.pathsep), flush=True)
    elif mode == "user_fixable":
        raise DataError("rows.jsonl, row 3: video is missing; correct the path")
    elif mode == "user_fixable-on-1" and rank == 1:
        raise DataError("rows.jsonl, row 4: video is missing; correct the path")
    elif mode == "crash-on-1" and rank == 1:
        raise ZeroDivisionError("a bug of ours")
    elif mode == "kill-1" and rank == 1:
        print("the last words\n", flush=True)
        record_activity('in phase "step" after step 3')
        os.kill(os.getpid(), signal.SIGKILL)
    elif mode == "exit-on-1" and rank == 1:
        os._exit(7)
    elif mode == "crash-once" and attempt == 0:
        raise RuntimeError("only the first time")
    elif mode == "error-once" and attempt == 0:
        raise RewardError("only the first time")
    if mode in ("sleep", "user_fixable-on-1", "crash-on-1", "kill-1", "exit-on-1"):
        Path(f"pid_{rank}").write_text(str(os.getpid()))
        time.sleep(600)
    print(f"rank {rank} done in attempt {attempt}", flush=True)


def main() -> None:
    role, mode, *remainder = sys.argv[1:]
    try:
        if role == "rank":
            launch.enter_rank()
            work(mode, int(remainder[0]))
        else:
            ranks, restarts, log_dir = remainder
            launch.start_ranks(
                lambda attempt: [__file__, "rank", mode, str(attempt)],
                ranks=int(ranks),
                log_dir=Path(log_dir),
                max_restarts=int(restarts),
            )
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        sys.exit(launch.report(error))


if __name__ == "__main__":
    main()
