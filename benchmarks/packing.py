"""Savings from packed rows: shared prompts, no padding, and less memory per rank if ranks share a row.

    python benchmarks/packing.py [prompts] [rows] [memory] [--rounds 3] [--threads 1]

The sides run in turn, each in a separate process pinned to one core per thread, in fp32 without recomputation.

`prompts`: seconds per GRPO update (forward, backward, optimizer) on 8 completions of 128 tokens for a prompt of 1,024 tokens.
One side has a copy of the prompt per completion, the other a shared prompt. Both pack 8 samples per forward.
`rows`: seconds per SFT step on rows of 50 to 1,500 tokens, padded or packed, with the same number of tokens per forward.
`memory`: peak memory that a row's forward and backward add to a rank (high-water mark of the resident memory in the second step;
the maximum over the ranks). One side has a row of 2 x `--tokens` tokens that 2 ranks share, the other a row of `--tokens` tokens
on one rank. The same is then measured for rows that consist mostly of a video; the output includes the memory that the vision
tower's forward adds.
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
from sides import (
    add_size,
    build_model,
    compute_seconds_per_step,
    make_log_uniform_lengths,
    make_words,
    report,
    run_side,
    write_rows,
)

Pair = tuple[float, float]
GENERATIONS, PROMPT, COMPLETION = 8, 1024, 128
BUDGET = 4096


def run_grpo_side(task: dict[str, Any]) -> None:
    from dsreason.config.schema import RunConfig

    if task["side"] == "each its own":
        RunConfig.shares_prompts = property(lambda config: False)
    grpo_vs_trl.run_dsreason_side(task | {"side": "transformers"})


def run_sft_side(task: dict[str, Any]) -> None:
    sft_vs_trl.run_dsreason_side(task | {"packing": task["side"] == "packed"})


def measure_prompt_sharing(arguments: argparse.Namespace, folder: Path) -> None:
    model = grpo_vs_trl.build_endless(arguments, folder / "endless")
    num_rows = arguments.steps
    data = write_rows(folder, [PROMPT - grpo_vs_trl.AROUND] * num_rows, [1] * num_rows)
    (folder / "rewards.py").write_text(grpo_vs_trl.REWARD)
    task = {"model": str(model), "data": str(data), "prompts": 1, "generations": GENERATIONS, "length": COMPLETION}
    task |= {"micro_batch": GENERATIONS, "steps": arguments.steps, "ds_config": arguments.ds_config}

    def compute_mean_update(result: dict[str, Any]) -> Pair:
        wall, cpu = (statistics.mean(times) for times in zip(*result["updates"][arguments.warmup :], strict=True))
        return wall, cpu

    compare("GRPO updates/s", ("each its own", "shared"), task, compute_mean_update, folder, arguments, goal=3.0)


def measure_row_packing(arguments: argparse.Namespace, folder: Path) -> None:
    model = build_model(arguments, folder / "model")
    lengths = make_log_uniform_lengths(arguments.rows, sft_vs_trl.SHORTEST, sft_vs_trl.LONGEST)
    answers = [max(1, length // 10) for length in lengths]
    questions = [max(1, length - sft_vs_trl.AROUND - n) for length, n in zip(lengths, answers, strict=True)]
    data = write_rows(folder, questions, answers)
    task = {"model": str(model), "data": str(data), "rows": arguments.rows, "budget": BUDGET}
    task |= {"steps": arguments.steps, "ds_config": arguments.ds_config}
    compare(
        "SFT steps/s",
        ("padded", "packed"),
        task,
        lambda result: compute_seconds_per_step(result, arguments.warmup),
        folder,
        arguments,
    )


def measure_rank_memory(arguments: argparse.Namespace, folder: Path) -> None:
    from dsreason.job import launch

    launch.prepare_environment()
    # Otherwise, the allocator would keep freed memory, which would hide the peak of the next step.
    os.environ |= {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    model = build_model(arguments, folder / "model")
    for kind, write in (("text", write_text), ("video", write_video)):
        added = {}
        for size in (1, 2):
            side_folder = folder / f"{kind}_{size}"
            side_folder.mkdir()
            task = {
                "model": str(model),
                "data": str(write(side_folder, size * arguments.tokens)),
                "output": str(side_folder / "run"),
            }
            task |= {"side": "memory", "ranks": size, "tokens": size * arguments.tokens}
            task |= {"ds_config": arguments.ds_config, "recompute": arguments.recompute}
            command = [__file__, "--side", json.dumps(task)]
            launch.start_ranks(lambda attempt, command=command: command, ranks=size, log_dir=side_folder / "logs")
            results = [json.loads((side_folder / f"rank_{rank}.json").read_text()) for rank in range(size)]
            added[size] = max(result["added"] for result in results)
            tower = max(result["tower"] for result in results)
            print(
                f"{kind}, {results[0]['tokens']} tokens on {size}: {added[size] / 2**20:.0f} MiB per rank, "
                f"{tower / 2**20:.0f} of them held by the vision tower",
                flush=True,
            )
        ratio = added[2] / added[1]
        print(f"peak memory of a {kind} row, twice the tokens on 2 ranks / on one: {ratio:.2f} (goal 1.1)", flush=True)


def write_text(folder: Path, tokens: int) -> Path:
    return write_rows(folder, [tokens - tokens // 10 - sft_vs_trl.AROUND], [tokens // 10])


def write_video(folder: Path, tokens: int) -> Path:
    """Write a row of `tokens` tokens, half of them from a video, which has 256 tokens per two frames."""
    import av
    import numpy as np

    frames, side = tokens // 256, 16 * 28
    random = np.random.default_rng(0)
    with av.open(folder / "clip.mp4", "w") as container:
        stream = container.add_stream("libx264", rate=2)
        stream.width = stream.height = side
        for _ in range(frames):
            picture = np.full((side, side, 3), random.integers(0, 256, 3), dtype=np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture)))
        container.mux(stream.encode())
    answer = tokens // 10
    row = {
        "id": "0",
        "video": "clip.mp4",
        "question": make_words(tokens - tokens // 2 - answer),
        "answer": make_words(answer),
    }
    (folder / "rows.jsonl").write_text(json.dumps(row) + "\n")
    return folder / "rows.jsonl"


def run_memory_side(task: dict[str, Any]) -> None:
    """Run one rank, and write to a file next to the rows how much memory its second step added."""
    from dsreason.job import launch

    launch.enter_rank()
    import torch
    from loss_memory import PeakMemory, read_status_bytes

    from dsreason.config.schema import SFTConfig
    from dsreason.train.sft import loop

    accumulate, results = loop.accumulate_gradients, {"tower": 0, "added": 0, "tokens": 0}

    def measure_gradients(engine: Any, batches: Any, *arguments: Any) -> dict[str, float]:
        tower = engine.module.model.model.visual
        before: list[int] = []
        hooks = [
            tower.register_forward_pre_hook(lambda *_: before.append(read_status_bytes("VmRSS"))),
            tower.register_forward_hook(lambda *_: results.update(tower=read_status_bytes("VmRSS") - before[-1])),
        ]
        with PeakMemory(torch.device("cpu")) as peak:
            metrics = accumulate(engine, batches, *arguments)
        for hook in hooks:
            hook.remove()
        results.update(added=peak.added, tokens=batches.num_input_tokens)
        return metrics

    loop.accumulate_gradients = measure_gradients
    config = {
        "deepspeed": task["ds_config"],
        "model": {
            "path": task["model"],
            "gradient_checkpointing": task["recompute"],
            "max_length": 2 * task["tokens"],
        },
        "data": {"adapter": "jsonl", "path": task["data"], "workers": 0},
        "optim": {"warmup": 0, "schedule": "constant"},
        "train": {
            "precision": "fp32",
            "epochs": 2,
            "global_batch_size": 1,
            "sequence_parallel_size": task["ranks"],
        },
        "checkpoint": {"every": 0, "export": "none"},
    }
    loop.run(SFTConfig.model_validate(config), output_dir=Path(task["output"]))
    (Path(task["output"]).parent / f"rank_{os.environ['RANK']}.json").write_text(json.dumps(results))


def compare(
    unit: str,
    sides: tuple[str, str],
    task: dict[str, Any],
    compute_seconds: Callable[[dict[str, Any]], Pair],
    folder: Path,
    arguments: argparse.Namespace,
    goal: float | None = None,
) -> None:
    seconds: dict[str, list[Pair]] = {side: [] for side in sides}
    for number in range(arguments.rounds):
        for side in sides:
            side_task = task | {"side": side, "output": str(folder / f"{side.replace(' ', '_')}_{number}")}
            seconds[side].append(compute_seconds(run_side(__file__, side_task, arguments.threads)))
            wall, cpu = seconds[side][-1]
            print(f"{side:20}{wall:8.3f} s, {cpu:.3f} of CPU (load {os.getloadavg()[0]:.1f})", flush=True)
    wall, cpu = report(seconds, 1, unit, sides[0])[sides[1]]
    print(f"{unit}, {sides[1]} / {sides[0]}: {wall:.2f}, by CPU time {cpu:.2f}" + (f" (goal {goal})" if goal else ""))


SIDES: dict[str, Callable[[dict[str, Any]], None]] = {
    "each its own": run_grpo_side,
    "shared": run_grpo_side,
    "padded": run_sft_side,
    "packed": run_sft_side,
    "memory": run_memory_side,
}
PARTS = {"prompts": measure_prompt_sharing, "rows": measure_row_packing, "memory": measure_rank_memory}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=(*PARTS, []), help="default: all")
    add_size(parser)
    parser.set_defaults(hidden=256, layers=6, vocabulary=512)
    parser.add_argument("--ds-config", default="zero2.json")
    parser.add_argument("--rows", type=int, default=32, help="rows per SFT step")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of the row that is measured on one rank")
    parser.add_argument("--recompute", action="store_true", help="measure memory with recomputation")
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
