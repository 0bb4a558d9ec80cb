"""What rows of segments save: prompts that completions share, padding, and memory where ranks share a row.

    python benchmarks/packing.py [prompts] [rows] [--rounds 3] [--threads 1]

Each side runs in a process of its own, in turn, pinned to as many cores as it has threads, in fp32 without recomputation.

`prompts`: seconds of a GRPO update (forward, backward, optimizer) of 8 completions of 128 tokens with a prompt of 1,024,
where each row has the prompt itself / where they share it; 8 samples a forward, packed on both sides.
`rows`: seconds of an SFT step of rows of 50 to 1,500 tokens, padded / packed, with as many tokens a forward.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpo_vs_trl
import sft_vs_trl
from sides import add_size, build_model, log_uniform, report, run_side, seconds_per_step, write_rows

Pair = tuple[float, float]
GENERATIONS, PROMPT, COMPLETION = 8, 1024, 128
BUDGET = 4096


def grpo_side(task: dict[str, Any]) -> None:
    from dsreason.train.grpo import update

    if task["side"] == "each its own":
        update.shares_prompts = lambda config: False
    grpo_vs_trl.dsreason_side(task | {"side": "transformers"})


def sft_side(task: dict[str, Any]) -> None:
    sft_vs_trl.dsreason_side(task | {"packing": task["side"] == "packed"})


SIDES: dict[str, Callable[[dict[str, Any]], None]] = {
    "each its own": grpo_side,
    "shared": grpo_side,
    "padded": sft_side,
    "packed": sft_side,
}


def prompts(arguments: argparse.Namespace, folder: Path) -> None:
    model = grpo_vs_trl.build_endless(arguments, folder / "endless")
    num_rows = arguments.steps
    data = write_rows(folder, [PROMPT - grpo_vs_trl.AROUND] * num_rows, [1] * num_rows)
    (folder / "rewards.py").write_text(grpo_vs_trl.REWARD)
    task = {"model": str(model), "data": str(data), "prompts": 1, "generations": GENERATIONS, "length": COMPLETION}
    task |= {"micro_batch": GENERATIONS, "steps": arguments.steps, "ds_config": arguments.ds_config}

    def mean_update(result: dict[str, Any]) -> Pair:
        wall, cpu = (statistics.mean(times) for times in zip(*result["updates"][arguments.warmup :], strict=True))
        return wall, cpu

    compare("GRPO updates/s", ("each its own", "shared"), task, mean_update, folder, arguments, goal=3.0)


def rows(arguments: argparse.Namespace, folder: Path) -> None:
    model = build_model(arguments, folder / "model")
    lengths = log_uniform(arguments.rows, sft_vs_trl.SHORTEST, sft_vs_trl.LONGEST)
    answers = [max(1, length // 10) for length in lengths]
    questions = [max(1, length - sft_vs_trl.AROUND - n) for length, n in zip(lengths, answers, strict=True)]
    data = write_rows(folder, questions, answers)
    task = {"model": str(model), "data": str(data), "rows": arguments.rows, "budget": BUDGET}
    task |= {"steps": arguments.steps, "ds_config": arguments.ds_config}
    compare(
        "SFT steps/s",
        ("padded", "packed"),
        task,
        lambda result: seconds_per_step(result, arguments.warmup),
        folder,
        arguments,
    )


def compare(
    unit: str,
    sides: tuple[str, str],
    task: dict[str, Any],
    seconds_of: Callable[[dict[str, Any]], Pair],
    folder: Path,
    arguments: argparse.Namespace,
    goal: float | None = None,
) -> None:
    seconds: dict[str, list[Pair]] = {side: [] for side in sides}
    for number in range(arguments.rounds):
        for side in sides:
            own = task | {"side": side, "output": str(folder / f"{side.replace(' ', '_')}_{number}")}
            seconds[side].append(seconds_of(run_side(__file__, own, arguments.threads)))
            wall, cpu = seconds[side][-1]
            print(f"{side:20}{wall:8.3f} s, {cpu:.3f} of CPU (load {os.getloadavg()[0]:.1f})", flush=True)
    wall, cpu = report(seconds, 1, unit, sides[0])[sides[1]]
    print(f"{unit}, {sides[1]} / {sides[0]}: {wall:.2f}, by CPU time {cpu:.2f}" + (f" (goal {goal})" if goal else ""))


PARTS = {"prompts": prompts, "rows": rows}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=(*PARTS, []), help="all, unless named")
    add_size(parser)
    parser.set_defaults(hidden=256, layers=6, vocabulary=512)
    parser.add_argument("--ds-config", default="zero2.json")
    parser.add_argument("--rows", type=int, default=32, help="of an SFT step")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--side", type=json.loads, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    if arguments.side:
        SIDES[arguments.side["side"]](arguments.side)
        return
    for name in arguments.parts or PARTS:
        with tempfile.TemporaryDirectory() as scratch:
            PARTS[name](arguments, Path(scratch))


if __name__ == "__main__":
    main()
