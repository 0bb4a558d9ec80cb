"""Questions per second of `dsreason eval` against asking the same engine one question at a time.

    python benchmarks/eval_throughput.py [--engine vllm] [--questions 128] [--rounds 3]

The same built-in questions, greedy in float32, on the same tiny random model and engine, in turn; what the evaluation
itself counts, the start of the engine and the report left out. Retries are off, so both sides draw as many tokens. An
answer that differs between the sides ends it with code 1. `--length` sets how many tokens an answer has.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

GOAL = 1.5
SIDES = {"batches of 64": 64, "one at a time": 1}


def evaluate(folder: Path, name: str, batch_size: int, arguments: argparse.Namespace) -> float:
    """Questions per second."""
    changes = {
        "model.engine": arguments.engine,
        "model.dtype": "float32",
        "model.max_length": 2048,
        "evaluation.batch_size": batch_size,
        "generation.max_retries": 0,
        "generation.letter_max_tokens": arguments.length,
        "generation.max_tokens": arguments.length,
        "vision.nframes": 2,
    }
    command = [
        sys.executable,
        "-m",
        "dsreason",
        "eval",
        "--model",
        arguments.model,
        "--adapter",
        "builtin",
    ]
    command += ["--limit", str(arguments.questions), "--results-dir", str(folder / name), "--overwrite"]
    command += [f"--set={key}={json.dumps(value)}" for key, value in changes.items()]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        sys.exit(ended.stderr)
    return float(re.search(r"([\d.]+) questions/s", ended.stderr)[1])


def answers(folder: Path) -> dict[str, str]:
    """The whole responses by question."""
    items = [item for file in folder.glob("*/*/builtin/*.json") for item in json.loads(file.read_text())]
    return {item["id"]: item["full_response"] for item in items}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("vllm", "transformers"), default="vllm")
    parser.add_argument("--model", default="tiny:qwen2_5_vl")
    parser.add_argument("--questions", type=int, default=128)
    parser.add_argument("--length", type=int, default=32, help="longest answer, in tokens")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    rates: dict[str, list[float]] = {name: [] for name in SIDES}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for number in range(arguments.rounds):
            for name, size in SIDES.items():
                rates[name].append(evaluate(folder, f"{size}", size, arguments))
                print(f"round {number + 1}: {name:14} {rates[name][-1]:8.2f} questions/s", flush=True)
        found = [answers(folder / str(size)) for size in SIDES.values()]
    batched, alone = (statistics.median(rates[name]) for name in SIDES)
    print(f"questions per second, batches / one at a time: {batched / alone:.2f} (goal {GOAL}; {arguments.engine})")
    compare(*found)


def compare(batched: dict[str, str], alone: dict[str, str]) -> None:
    """End with what differs, if anything does: other answers are other work, and the ratio means nothing."""
    differing = sorted(id for id in batched.keys() | alone.keys() if batched.get(id) != alone.get(id))
    if differing or not batched:
        shown = "".join(f"\n  {id}: {batched.get(id)!r} in batches, {alone.get(id)!r} alone" for id in differing[:5])
        sys.exit(f"{len(differing)} of {len(batched)} questions have another answer in batches than alone:{shown}")
    print(f"the same answer to all {len(batched)} questions")


if __name__ == "__main__":
    main()
