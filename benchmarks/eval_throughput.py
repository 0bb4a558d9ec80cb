"""Questions per second of `dsreason eval`, relative to querying the same engine with one question at a time.

    python benchmarks/eval_throughput.py [--engine vllm] [--questions 128] [--rounds 3]

Both sides take turns answering the same built-in questions, greedily and in float32, with the same tiny random model and
engine. The rate is the one that the evaluation reports; it excludes the engine's startup and the report. Retries are off, so
both sides sample the same number of tokens. If an answer differs between the sides, the exit code is 1. `--length` sets the
number of tokens per answer.
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
    """Run an evaluation and return its throughput in questions per second."""
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
    completed = subprocess.run(command, capture_output=True, text=True, check=False)
    if completed.returncode:
        sys.exit(completed.stderr)
    return float(re.search(r"([\d.]+) questions/s", completed.stderr)[1])


def read_responses(folder: Path) -> dict[str, str]:
    """Return the full responses: question id → response."""
    items = [item for file in folder.glob("*/*/builtin/*.json") for item in json.loads(file.read_text())]
    return {item["id"]: item["full_response"] for item in items}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("vllm", "transformers"), default="vllm")
    parser.add_argument("--model", default="tiny:qwen2_5_vl")
    parser.add_argument("--questions", type=int, default=128)
    parser.add_argument("--length", type=int, default=32, help="maximum length of an answer, in tokens")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    rates: dict[str, list[float]] = {name: [] for name in SIDES}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for number in range(arguments.rounds):
            for name, size in SIDES.items():
                rates[name].append(evaluate(folder, f"{size}", size, arguments))
                print(f"round {number + 1}: {name:14} {rates[name][-1]:8.2f} questions/s", flush=True)
        responses = [read_responses(folder / str(size)) for size in SIDES.values()]
    batched, single = (statistics.median(rates[name]) for name in SIDES)
    print(f"questions per second, batches / one at a time: {batched / single:.2f} (goal {GOAL}; {arguments.engine})")
    compare(*responses)


def compare(batched: dict[str, str], single: dict[str, str]) -> None:
    """If any answers differ, exit with a list of them: the two sides did different work, so the ratio means nothing."""
    differing = sorted(id for id in batched.keys() | single.keys() if batched.get(id) != single.get(id))
    if differing or not batched:
        examples = "".join(
            f"\n  {id}: {batched.get(id)!r} in batches, {single.get(id)!r} one at a time" for id in differing[:5]
        )
        sys.exit(
            f"{len(differing)} of {len(batched)} questions have different answers in batches and one at a time:{examples}"
        )
    print(f"both sides gave the same answers to all {len(batched)} questions")


if __name__ == "__main__":
    main()
