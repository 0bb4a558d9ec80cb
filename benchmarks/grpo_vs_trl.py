"""Samples per second of `dsreason grpo` against TRL's GRPOTrainer: same tiny model, image prompts, lengths, and fp32.

    python benchmarks/grpo_vs_trl.py [--family qwen2_5_vl] [--engines vllm transformers] [--rounds 3] [--threads 1]

Each side is the whole trainer, in one process of its own, in turn (A B C A B C …), pinned to as many cores as it has
threads. dsreason samples with each of its engines; TRL with transformers' `generate`, as its vLLM does not run on a CPU.
All take the same number of prompts, completions and micro-batches a step, one optimizer step a rollout, AdamW, no KL, and
a reward that counts vowels. No completion ends early: what the folder calls its end token may not be drawn on either
side. A side's speed is that of the wall clock from the end of the warm-up to the last step; beside it stands that of the
process's CPU time, which on one core is the same where nothing else runs, and tells more where something does.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from sft_vs_trl import run_side, seconds_per_step, write_rows

GOAL = 2.0
TRL = "TRL"
SETTINGS = ("steps", "prompts", "generations", "micro_batch", "length", "workers", "ds_config")
REWARD = "def vowels(completion, sample):\n    return sum(letter in 'aeiou' for letter in completion)\n"
NEVER_DRAWN = "<|image_pad|>"


def build_endless(family: str, folder: Path, sizes: dict[str, int]) -> Path:
    """A tiny model whose end token is one that neither side ever draws."""
    from transformers import AutoTokenizer, GenerationConfig

    from dsreason.models.tiny import build_tiny

    build_tiny(family, folder, **sizes)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    end = tokenizer.convert_tokens_to_ids(NEVER_DRAWN)
    GenerationConfig(eos_token_id=[end], pad_token_id=tokenizer.pad_token_id).save_pretrained(folder)
    return folder


def dsreason_config(engine: str, task: dict[str, Any]) -> dict[str, Any]:
    return {
        "deepspeed": task["ds_config"],
        "model": {"path": task["model"], "gradient_checkpointing": False, "max_length": 512},
        "data": {"adapter": "jsonl", "path": task["rows"], "workers": task["workers"]},
        "optim": {"lr": 1e-5, "warmup": 0, "schedule": "constant", "weight_decay": 0.0},
        "train": {
            "precision": "fp32",
            "epochs": 1000,
            "max_steps": task["steps"],
            "micro_batch_size": task["micro_batch"],
        },
        "grpo": {"prompts_per_step": task["prompts"], "num_generations": task["generations"], "kl_coef": 0.0},
        "rollout": {
            "engine": engine,
            "max_completion_length": task["length"],
            "batch_size": task["prompts"] * task["generations"],  # all together, as TRL does
        },
        "reward": {"functions": {f"{Path(task['rows']).parent / 'rewards.py'}:vowels": 1.0}},
        "validation": {"before_training": False, "generate": False},
        "checkpoint": {"every": 0, "export": "none"},
    }


def run(side: str, task: dict[str, Any], output: Path, arguments: argparse.Namespace) -> tuple[float, float]:
    """Seconds of a step in a process of its own: by the clock, and of CPU time."""
    task = task | {"side": side, "output": str(output)}
    printed = run_side([sys.executable, __file__, "--side", json.dumps(task)], arguments)
    result = json.loads(printed.splitlines()[-1])
    if set(result["lengths"]) != {arguments.length}:
        sys.exit(f"{side}: completions of {set(result['lengths'])} tokens instead of {arguments.length}")
    ends = ({int(step): end[i] for step, end in result["ends"].items()} for i in range(2))
    wall, cpu = (seconds_per_step(end, arguments.warmup) for end in ends)
    return wall, cpu


def dsreason_side(engine: str, task: dict[str, Any]) -> None:
    """`dsreason grpo` as a job of one process; prints when each step ended."""
    from dsreason.config.schema_grpo import GRPOConfig
    from dsreason.job.launch import prepare_environment

    prepare_environment()
    from dsreason.train.grpo import loop as grpo

    ends: dict[int, tuple[float, float]] = {}
    finish_step = grpo.finish_step

    def timed(run: Any, *rest: Any) -> None:
        finish_step(run, *rest)
        ends[run.state.step] = time.time(), time.process_time()

    grpo.finish_step = timed
    output = Path(task["output"])
    grpo.run(GRPOConfig.model_validate(dsreason_config(engine, task)), output_dir=output)
    lengths = [
        json.loads(line).get("completion/length_mean") for line in (output / "metrics.jsonl").read_text().splitlines()
    ]
    print(json.dumps({"ends": ends, "lengths": [length for length in lengths if length]}))


def trl_side(task: dict[str, Any]) -> None:
    """TRL's own way of GRPO on image rows; prints when each step ended."""
    import torch
    from datasets import Dataset, Features, Value
    from datasets import Image as ImageFeature
    from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from dsreason.families import family_of
    from dsreason.rollout.protocol import media_token_ids

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    ends: dict[int, tuple[float, float]] = {}
    lengths: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            ends[state.global_step] = time.time(), time.process_time()

        def on_log(self, args, state, control, logs, **_):
            lengths.extend([logs["completions/mean_length"]] if "completions/mean_length" in logs else [])

    def vowels(completions: list[Any], **_: Any) -> list[float]:
        return [float(sum(letter in "aeiou" for letter in one[0]["content"])) for one in completions]

    folder = Path(task["rows"]).parent
    rows = [json.loads(line) for line in Path(task["rows"]).read_text().splitlines()]
    dataset = Dataset.from_list(
        [
            {"prompt": [{"role": "user", "content": row["question"]}], "image": str(folder / row["image"])}
            for row in rows
        ],
        features=Features({"prompt": [{"role": Value("string"), "content": Value("string")}], "image": ImageFeature()}),
    )
    processor = AutoProcessor.from_pretrained(task["model"], padding_side="left", truncation_side="left")
    family = family_of(AutoConfig.from_pretrained(task["model"]).model_type)
    never = {*media_token_ids(processor.tokenizer, family), processor.tokenizer.eos_token_id}
    settings = GRPOConfig(
        output_dir=task["output"],
        max_steps=task["steps"],
        per_device_train_batch_size=task["micro_batch"],
        gradient_accumulation_steps=task["prompts"] * task["generations"] // task["micro_batch"],
        num_generations=task["generations"],
        max_completion_length=task["length"],
        generation_kwargs={"suppress_tokens": sorted(never)},
        temperature=1.0,
        top_k=0,
        beta=0.0,
        loss_type="grpo",
        learning_rate=1e-5,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        dataloader_num_workers=task["workers"],
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=AutoModelForImageTextToText.from_pretrained(task["model"], dtype=torch.float32),
        reward_funcs=vowels,
        args=settings,
        train_dataset=dataset,
        processing_class=processor,
        callbacks=[Clock()],
    )
    trainer.train()
    print(json.dumps({"ends": ends, "lengths": lengths}))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=("qwen2_5_vl", "qwen3_vl"), default="qwen2_5_vl")
    parser.add_argument("--hidden", type=int, default=128, help="hidden size of the tiny model")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--engines", nargs="+", choices=("vllm", "transformers"), default=("vllm", "transformers"))
    parser.add_argument("--ds-config", default="zero2.json")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--lengths", choices=("spread", "even"), default="even", help="of the rows' questions")
    parser.add_argument("--prompts", type=int, default=4, help="a step")
    parser.add_argument("--generations", type=int, default=8)
    parser.add_argument("--micro-batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=48, help="of the completions, in tokens")
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--workers", type=int, default=0, help="data workers on both sides")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--side", type=json.loads, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    if arguments.side:
        side = arguments.side["side"]
        trl_side(arguments.side) if side == TRL else dsreason_side(side.removeprefix("dsreason, "), arguments.side)
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        sizes = {"hidden_size": arguments.hidden, "num_layers": arguments.layers}
        model = build_endless(arguments.family, folder / "model", sizes)
        rows = write_rows(folder, arguments.rows, arguments.lengths)
        (folder / "rewards.py").write_text(REWARD)
        task = {"model": str(model), "rows": str(rows)}
        task |= {name: vars(arguments)[name] for name in SETTINGS}
        print(f"{arguments.threads} threads; {num_samples(arguments)} completions of {arguments.length} tokens a step")
        seconds: dict[str, list[tuple[float, float]]] = {}
        for number in range(arguments.rounds):
            for side in (TRL, *(f"dsreason, {engine}" for engine in arguments.engines)):
                wall, cpu = run(side, task, folder / f"{side.replace(', ', '_')}_{number}", arguments)
                seconds.setdefault(side, []).append((wall, cpu))
                print(f"{side:24}{wall:7.3f} s a step, {cpu:.3f} of CPU (load {os.getloadavg()[0]:.1f})", flush=True)
        report(seconds, arguments)


def report(seconds: dict[str, list[tuple[float, float]]], arguments: argparse.Namespace) -> None:
    """Medians of the rounds."""
    print(f"{'samples/s':24}{'wall':>8}{'/ TRL':>7}{'CPU':>9}{'/ TRL':>7}")
    speeds = {
        side: [num_samples(arguments) / statistics.median(times) for times in zip(*found, strict=True)]
        for side, found in seconds.items()
    }
    ratios = {side: [ours / theirs for ours, theirs in zip(speeds[side], speeds[TRL], strict=True)] for side in speeds}
    for side, (wall, cpu) in speeds.items():
        print(f"{side:24}{wall:8.1f}{ratios[side][0]:7.2f}{cpu:9.1f}{ratios[side][1]:7.2f}")
    best = max((side for side in ratios if side != TRL), key=lambda side: ratios[side])
    print(f"samples per second, {best} / TRL: {ratios[best][0]:.2f} (goal {GOAL}; {arguments.ds_config})")


def num_samples(arguments: argparse.Namespace) -> int:
    return arguments.prompts * arguments.generations


if __name__ == "__main__":
    main()
