"""Samples per second of `dsreason grpo`, relative to TRL's GRPOTrainer, with the same model, image prompts and lengths, in fp32.

    python benchmarks/grpo_vs_trl.py [--engines transformers vllm] [--rounds 1] [--threads 1]

Each side is a complete trainer in a separate process; the sides take turns, each pinned to one core per thread. dsreason samples
with the engines in `--engines`, by default transformers; TRL samples with transformers' `generate`, as its vLLM does not run on a
CPU. All sides use the same number of prompts and completions per step, the same number of samples per forward, one optimizer step
per rollout, AdamW, no KL, and random rewards. No completion ends early: neither side may sample the model's end token. TRL is
patched to compute only the logits of completions, as it does on a GPU; on a CPU, it would compute those of all tokens (`TRL as it
comes`).

Times run from the end of the warm-up to the end of the last step, in wall-clock time and in the process's CPU time. On an
otherwise idle core, the two agree; if other work runs, CPU time is more reliable.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from sides import (
    Ends,
    add_size,
    build_model,
    build_trl_clock,
    compute_seconds_per_step,
    report,
    run_side,
    score_trained_tokens_only,
    time_calls,
    time_steps,
    write_rows,
)

GOAL = 2.5
TRL, AS_IT_COMES, OURS = "TRL", "TRL as it comes", "dsreason"
SETTINGS = ("steps", "prompts", "generations", "micro_batch", "length", "ds_config")
REWARD = "import random\n\ndef chance(completion, sample):\n    return random.random()\n"
NEVER_DRAWN = "<|image_pad|>"
AROUND = 44
"""Mean number of tokens that the picture and the chat format add to a prompt's question."""


def build_endless(arguments: argparse.Namespace, folder: Path) -> Path:
    """Build a model whose end token neither side ever samples."""
    from transformers import AutoTokenizer, GenerationConfig

    build_model(arguments, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    end = tokenizer.convert_tokens_to_ids(NEVER_DRAWN)
    GenerationConfig(eos_token_id=[end], pad_token_id=tokenizer.pad_token_id).save_pretrained(folder)
    return folder


def run_dsreason_side(task: dict[str, Any]) -> None:
    """Run `dsreason grpo` as a job with one process; print the time at which each step ended."""
    from dsreason.config.schema_grpo import GRPOConfig
    from dsreason.job.launch import prepare_environment

    prepare_environment()
    from dsreason.train.grpo import loop
    from dsreason.train.grpo.sampling import RolloutSampler

    ends, output = time_steps(), Path(task["output"])
    config = {
        "deepspeed": task["ds_config"],
        "model": {"path": task["model"], "gradient_checkpointing": False},
        "data": {"adapter": "jsonl", "path": task["data"], "workers": 0},
        "optim": {"lr": 1e-5, "warmup": 0, "schedule": "constant", "weight_decay": 0.0},
        "train": {
            "precision": "fp32",
            "epochs": 1000,
            "max_steps": task["steps"],
            "micro_batch_size": task["micro_batch"],
        },
        "grpo": {"prompts_per_step": task["prompts"], "num_generations": task["generations"], "kl_coef": 0.0},
        "rollout": {
            "engine": task["side"].removeprefix(f"{OURS}, "),
            "max_completion_length": task["length"],
            "batch_size": task["prompts"] * task["generations"],  # all completions at once, as in TRL
        },
        "reward": {"functions": {f"{Path(task['data']).parent / 'rewards.py'}:chance": 1.0}},
        "validation": {"before_training": False, "generate": False},
        "checkpoint": {"every": 0, "export": "none"},
    }
    sampling, updates = time_calls(RolloutSampler, "sample"), time_calls(loop, "run_grpo_step")
    loop.run(GRPOConfig.model_validate(config), output_dir=output)
    metrics = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    lengths = [line["completion/length_mean"] for line in metrics if "completion/length_mean" in line]
    print(json.dumps({"ends": ends, "lengths": lengths, "sampling": sampling, "updates": updates}))


def run_trl_side(task: dict[str, Any]) -> None:
    """Run TRL's GRPO on image rows; print the time at which each step ended."""
    import random

    import torch
    from datasets import Dataset, Features, Value
    from datasets import Image as ImageFeature
    from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor
    from trl import GRPOConfig, GRPOTrainer

    from dsreason.families import get_family
    from dsreason.rollout.protocol import find_media_token_ids

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if task["side"] == TRL:
        score_trained_tokens_only()
    ends: Ends = {}

    def chance(completions: list[Any], **_: Any) -> list[float]:
        return [random.random() for _ in completions]

    folder = Path(task["data"]).parent
    rows = [json.loads(line) for line in Path(task["data"]).read_text().splitlines()]
    dataset = Dataset.from_list(
        [
            {"prompt": [{"role": "user", "content": row["question"]}], "image": str(folder / row["image"])}
            for row in rows
        ],
        features=Features({"prompt": [{"role": Value("string"), "content": Value("string")}], "image": ImageFeature()}),
    )
    processor = AutoProcessor.from_pretrained(
        task["model"], padding_side="left", truncation_side="left", trust_remote_code=False
    )
    family = get_family(AutoConfig.from_pretrained(task["model"], trust_remote_code=False).model_type)
    never = {*find_media_token_ids(processor.tokenizer, family), processor.tokenizer.eos_token_id}
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
        dataloader_num_workers=0,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=AutoModelForImageTextToText.from_pretrained(task["model"], dtype=torch.float32, trust_remote_code=False),
        reward_funcs=chance,
        args=settings,
        train_dataset=dataset,
        processing_class=processor,
        callbacks=[build_trl_clock(ends)],
    )
    sampling = time_calls(trainer, "_generate")
    trainer.train()
    lengths = [
        line["completions/mean_length"] for line in trainer.state.log_history if "completions/mean_length" in line
    ]
    print(json.dumps({"ends": ends, "lengths": lengths, "sampling": sampling}))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_size(parser)
    parser.add_argument("--engines", nargs="+", choices=("vllm", "transformers"), default=("transformers",))
    parser.add_argument(
        "--as-it-comes",
        action="store_true",
        help="also run TRL without the patch, so that it computes the logits of all tokens",
    )
    parser.add_argument("--ds-config", default="zero2.json")
    parser.add_argument("--prompts", type=int, default=2, help="prompts per step")
    parser.add_argument(
        "--prompt-length", type=int, default=512, help="tokens per prompt, including picture and chat format"
    )
    parser.add_argument("--generations", type=int, default=8)
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=128, help="tokens per completion")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--side", type=json.loads, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    if arguments.side:
        (run_dsreason_side if arguments.side["side"].startswith(OURS) else run_trl_side)(arguments.side)
        return
    sides = [TRL, *[AS_IT_COMES] * arguments.as_it_comes, *(f"{OURS}, {engine}" for engine in arguments.engines)]
    num_samples = arguments.prompts * arguments.generations
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        task = {"model": str(build_endless(arguments, folder / "model"))}
        num_rows = arguments.prompts * arguments.steps
        task["data"] = str(write_rows(folder, [arguments.prompt_length - AROUND] * num_rows, [1] * num_rows))
        (folder / "rewards.py").write_text(REWARD)
        task |= {name: vars(arguments)[name] for name in SETTINGS}
        print(
            f"{platform.machine()}, {arguments.threads} threads, {arguments.ds_config}; per step {arguments.prompts} prompts of "
            f"{arguments.prompt_length} tokens, {num_samples} completions of {arguments.length}, "
            f"{arguments.micro_batch} per forward",
            flush=True,
        )
        seconds: dict[str, list[tuple[float, float]]] = {side: [] for side in sides}
        for number in range(arguments.rounds):
            for side in sides:
                side_task = task | {"side": side, "output": str(folder / f"{side.replace(', ', '_')}_{number}")}
                result = run_side(__file__, side_task, arguments.threads)
                if set(result["lengths"]) != {arguments.length}:
                    sys.exit(f"{side}: completions have {set(result['lengths'])} tokens instead of {arguments.length}")
                wall, cpu = compute_seconds_per_step(result, arguments.warmup)
                seconds[side].append((wall, cpu))
                sampling = statistics.mean(cpu for _, cpu in result["sampling"][arguments.warmup :])
                print(
                    f"{side:24}{wall:8.2f} s per step, {cpu:.2f} of CPU: {sampling:.2f} sampling and {cpu - sampling:.2f} "
                    f"the rest (load {os.getloadavg()[0]:.1f})",
                    flush=True,
                )
        ratios = report(seconds, num_samples, "samples/s", TRL)
        best = max(sides[1 + arguments.as_it_comes :], key=lambda side: ratios[side][0])
        wall, cpu = ratios[best]
        print(f"samples per second, {best} / TRL: {wall:.2f}, by CPU time {cpu:.2f} (goal {GOAL})")


if __name__ == "__main__":
    main()
