"""CPU seconds that it takes to start a command, now and at an earlier commit.

    python benchmarks/process_start.py [--against COMMIT] [--rounds 3]

The commands are `--version`, `--help`, a run with a misspelt key, a run with a missing file, `sft --dry-run` on the built-in
task, and `sft --nproc 2` on that task up to the first step in metrics.jsonl. The result is the user and system time of the
command and of all processes that it started; the minimum of the rounds counts. The commits take turns; the earlier commit runs
from a separate git worktree, with the packages of this environment.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
GOALS = {"--version": 0.5, "--help": 0.5, "a misspelt key": 0.5, "a missing file": 0.5, "sft --dry-run": 8.0}
"""Maximum number of CPU seconds, by command."""
FIRST_STEP = "sft --nproc 2, to the first step"
FIRST_STEP_GOAL = 0.5
"""Maximum ratio of the CPU seconds now to the CPU seconds at the earlier commit."""
TIME_LIMIT_S = 900.0


def build_commands(folder: Path) -> dict[str, list[str]]:
    misspelt = folder / "misspelt.toml"
    misspelt.write_text("[optim]\nlrr = 1\n")
    return {
        "--version": ["--version"],
        "--help": ["--help"],
        "a misspelt key": ["sft", f"--config={misspelt}"],
        "a missing file": ["sft", f"--config={folder / 'missing.toml'}"],
        "sft --dry-run": ["sft", "--dry-run"],
    }


def start(tree: Path, arguments: list[str], folder: Path) -> subprocess.Popen[bytes]:
    """Start `dsreason ARGUMENTS` from the working tree `tree`."""
    command = [sys.executable, "-P", "-m", "dsreason", *arguments]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.Popen(command, cwd=folder, env={**os.environ, "PYTHONPATH": str(tree)}, **quiet)


def time_command(tree: Path, arguments: list[str], folder: Path) -> float:
    """Run a command that exits on its own, and return the CPU seconds that it used."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start(tree, arguments, folder).wait(TIME_LIMIT_S)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def time_first_step(tree: Path, folder: Path) -> float:
    """Return the CPU seconds that the command and its ranks use until the first step is done."""
    with tempfile.TemporaryDirectory(dir=folder) as output:
        process = start(tree, ["sft", "--nproc=2", f"--output-dir={output}/run"], folder)
        metrics = Path(output) / "run" / "metrics.jsonl"
        deadline = time.monotonic() + TIME_LIMIT_S
        try:
            while not (metrics.exists() and "train/loss" in metrics.read_text()):
                if process.poll() is not None or time.monotonic() > deadline:
                    sys.exit(f"{tree}: dsreason sft --nproc 2 finished no step; run it there to see why")
                time.sleep(0.05)
            return sum_cpu_seconds(psutil.Process(process.pid))
        finally:
            process.kill()  # the ranks end with the command
            process.wait()


def sum_cpu_seconds(process: psutil.Process) -> float:
    """Return the CPU seconds of a process and its descendants, including those that have ended."""
    seconds = 0.0
    for member in [process, *process.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            seconds += sum(member.cpu_times()[:4])
    return seconds


def compile_bytecode(tree: Path) -> None:
    """Compile a tree's sources in advance, so that Python does not compile them during a measurement."""
    subprocess.run([sys.executable, "-m", "compileall", "-q", tree / "dsreason", tree / "data_adapters"], check=True)


def measure(trees: list[Path], folder: Path, rounds: int) -> dict[str, list[float]]:
    """Return the minimum CPU seconds of each command in each tree: command → one value per tree."""
    rounds_by_name: dict[str, list[list[float]]] = {}
    for number in range(rounds):
        for side, tree in enumerate(trees):
            seconds_by_name = {
                name: time_command(tree, arguments, folder) for name, arguments in build_commands(folder).items()
            }
            seconds_by_name[FIRST_STEP] = time_first_step(tree, folder)
            for name, seconds in seconds_by_name.items():
                rounds_by_name.setdefault(name, [[] for _ in trees])[side].append(seconds)
            print(f"round {number + 1}, {tree}: {seconds_by_name}", file=sys.stderr, flush=True)
    return {name: [min(values) for values in sides] for name, sides in rounds_by_name.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", metavar="COMMIT", help="also measure this commit, and print the ratio")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
        folder, trees = Path(scratch), [ROOT]
        if arguments.against:
            trees.append(folder / "earlier")
            git = ["git", "-C", str(ROOT), "worktree"]
            subprocess.run([*git, "add", "-q", "--detach", str(trees[1]), arguments.against], check=True)
            stack.callback(subprocess.run, [*git, "remove", "--force", str(trees[1])], check=True)
        for tree in trees:
            compile_bytecode(tree)
        for name, (now, *earlier) in measure(trees, folder, arguments.rounds).items():
            goal = f"goal {GOALS[name]:g} s" if name in GOALS else f"goal a ratio of {FIRST_STEP_GOAL:g}"
            ratio = f" / {earlier[0]:.2f} = {now / earlier[0]:.2f}" if earlier else ""
            print(f"{name}: {now:.2f}{ratio} s of CPU ({goal})")


if __name__ == "__main__":
    main()
