"""Tokens per second of `dsreason sft`, relative to TRL's SFTTrainer, with the same model, image rows and global batch, in fp32.

    python benchmarks/sft_vs_trl.py [--lengths spread|even] [--trained 0.1] [--rounds 1] [--threads 1]

The sides run in turn, each in a separate process pinned to one core per thread; this process also decodes the images. Neither
side saves, validates or recomputes activations. Every step uses all rows, so all measured steps have the same tokens. With
`--lengths spread`, rows have 50 to 1,500 tokens, and the logarithms of their lengths are evenly spaced; with `even`, all rows
have the mean of these lengths. Padding does not count.

For a fair comparison, dsreason fills rows with up to `--budget` tokens, and TRL's batch size is the largest for which a batch of
only the longest rows does not exceed that number, which is what its users would choose for the same memory. TRL draws its batches
at random, which is its default, and supports neither packing nor padding-free training for vision-language models (1.16). Both
sides train only on the answers, which make up the share `--trained` of each row's tokens. On a CPU, TRL would compute the logits
of all tokens: `TRL` is patched to compute only those of trained tokens, as on a GPU, and `TRL as it comes` is not patched.

`--video` instead trains TRL on a video row, and prints whether the model received its pixels.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image
from sides import (
    Ends,
    add_size,
    build_model,
    build_trl_clock,
    compute_seconds_per_step,
    make_log_uniform_lengths,
    report,
    run_side,
    score_trained_tokens_only,
    time_steps,
    write_rows,
)

GOALS = {"spread": 1.8, "even": 1.1}
SHORTEST, LONGEST = 50, 1500
AROUND = 50
"""Mean number of tokens that the picture and the chat format add to a prompt's question."""
TRL, AS_IT_COMES, OURS = "TRL", "TRL as it comes", "dsreason"


def make_rows(folder: Path, arguments: argparse.Namespace) -> Path:
    lengths = make_log_uniform_lengths(arguments.rows, SHORTEST, LONGEST)
    if arguments.lengths == "even":
        lengths = [round(sum(lengths) / len(lengths))] * len(lengths)
    answers = [max(1, round(arguments.trained * length)) for length in lengths]
    return write_rows(
        folder, [max(1, length - AROUND - n) for length, n in zip(lengths, answers, strict=True)], answers
    )


def measure(model: Path, rows: Path) -> tuple[list[int], int]:
    """Return each row's number of tokens, including vision tokens, and the total number of trained tokens."""
    from dsreason.config.schema import SFTConfig
    from dsreason.data.sources import open_datasets
    from dsreason.train.common.preflight import build_encoder

    config = SFTConfig.model_validate({"data": {"adapter": "jsonl", "path": str(rows)}})
    encoder, (samples, _) = build_encoder(config, model), open_datasets(config.data)
    encoded = [encoder.encode(samples[i]) for i in range(len(samples))]
    return [len(sample) for sample in encoded], sum(int(sample.loss_mask.sum()) for sample in encoded)


def compute_largest_batch(longest: int, num_rows: int, budget: int) -> int:
    """Return TRL's number of rows per batch: the largest that fits into the budget and divides the number of rows per step."""
    return max(size for size in range(1, num_rows + 1) if num_rows % size == 0 and size * longest <= budget)


def run_dsreason_side(task: dict[str, Any]) -> None:
    """Run `dsreason sft` as a job with one process; print the time at which each step ended."""
    from dsreason.config.schema import SFTConfig
    from dsreason.job.launch import prepare_environment

    prepare_environment()
    from dsreason.train.sft import loop

    ends = time_steps()
    config = {
        "deepspeed": task["ds_config"],
        "model": {"path": task["model"], "gradient_checkpointing": False},
        "data": {"adapter": "jsonl", "path": task["data"], "workers": 0},
        "optim": {"lr": 1e-4, "warmup": 0, "schedule": "constant"},
        "train": {
            "precision": "fp32",
            "epochs": 1000,
            "max_steps": task["steps"],
            "global_batch_size": task["rows"],
            "packing": task.get("packing", True),
            "max_tokens_per_micro_batch": task["budget"],
        },
        "checkpoint": {"every": 0, "export": "none"},
    }
    loop.run(SFTConfig.model_validate(config), output_dir=Path(task["output"]))
    print(json.dumps({"ends": ends}))


def run_trl_side(task: dict[str, Any]) -> None:
    """Run TRL's SFT on image rows; print the time at which each step ended."""
    import torch
    from datasets import Dataset, Features, Value
    from datasets import Image as ImageFeature
    from datasets import List as ListFeature
    from transformers import AutoModelForImageTextToText, AutoProcessor
    from trl import SFTConfig, SFTTrainer

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if task["side"] == TRL:
        score_trained_tokens_only()
    ends: Ends = {}
    rows = [json.loads(line) for line in Path(task["data"]).read_text().splitlines()]
    folder = Path(task["data"]).parent
    message = [{"role": Value("string"), "content": Value("string")}]
    dataset = Dataset.from_list(
        [
            {
                "prompt": [{"role": "user", "content": row["question"]}],
                "completion": [{"role": "assistant", "content": row["answer"]}],
                "images": [str(folder / row["image"])],
            }
            for row in rows
        ],
        features=Features({"prompt": message, "completion": message, "images": ListFeature(ImageFeature())}),
    )
    settings = SFTConfig(
        output_dir=task["output"],
        max_steps=task["steps"],
        per_device_train_batch_size=task["batch"],
        gradient_accumulation_steps=task["rows"] // task["batch"],
        learning_rate=1e-4,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        weight_decay=0.01,
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        dataloader_num_workers=0,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        max_length=None,
        disable_tqdm=True,
    )
    trainer = SFTTrainer(
        model=AutoModelForImageTextToText.from_pretrained(task["model"], dtype=torch.float32, trust_remote_code=False),
        args=settings,
        train_dataset=dataset,
        processing_class=AutoProcessor.from_pretrained(task["model"], trust_remote_code=False),
        callbacks=[build_trl_clock(ends)],
    )
    trainer.train()
    print(json.dumps({"ends": ends}))


def try_trl_video(task: dict[str, Any]) -> None:
    """Run one step of SFTTrainer on a video row; print whether the model received the video."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForImageTextToText, AutoProcessor
    from trl import SFTConfig, SFTTrainer

    model = AutoModelForImageTextToText.from_pretrained(task["model"], dtype=torch.float32, trust_remote_code=False)
    question = [{"type": "video", "video": task["video"]}, {"type": "text", "text": "Which way?"}]
    answer = [{"type": "text", "text": "left"}]
    row = {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
    settings = SFTConfig(
        output_dir=task["output"], max_steps=1, per_device_train_batch_size=1, bf16=False, use_cpu=True,
        save_strategy="no", report_to="none", max_length=None, disable_tqdm=True,
    )  # fmt: skip
    arguments: list[str] = []
    forward = model.model.forward
    model.model.forward = lambda *args, **kwargs: (arguments.extend(kwargs), forward(*args, **kwargs))[1]
    trainer = SFTTrainer(
        model=model,
        args=settings,
        train_dataset=Dataset.from_list([row] * 2, on_mixed_types="use_json"),
        processing_class=AutoProcessor.from_pretrained(task["model"], trust_remote_code=False),
    )
    trainer.train()
    pixels = "pixel_values_videos" in arguments
    print(f"training runs, and the model {'got' if pixels else 'did not get'} the video's pixels")


def describe_video_trial(model: Path, folder: Path) -> str:
    """Describe what TRL does with a video row. The video is passed as frames, so that no decoder is involved."""
    frames = [folder / f"frame_{i}.png" for i in range(8)]
    for i, path in enumerate(frames):
        Image.new("RGB", (64, 64), (30 * i, 0, 0)).save(path)
    task = {"model": str(model), "video": [str(path) for path in frames], "output": str(folder / "video")}
    command = [sys.executable, __file__, "--side", json.dumps(task | {"side": "video"})]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    completed = subprocess.run(command, check=False, env=environment, text=True, capture_output=True)
    if completed.returncode:
        return f"refused: {completed.stderr.strip().splitlines()[-1]}"
    return completed.stdout.strip().splitlines()[-1]


SIDES = {TRL: run_trl_side, AS_IT_COMES: run_trl_side, OURS: run_dsreason_side, "video": try_trl_video}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_size(parser)
    parser.add_argument("--ds-config", default="zero2.json")
    parser.add_argument("--sides", nargs="+", choices=(TRL, AS_IT_COMES, OURS), default=(TRL, OURS))
    parser.add_argument("--lengths", choices=tuple(GOALS), default="spread", help="lengths of the rows")
    parser.add_argument("--trained", type=float, default=0.1, help="share of a row's tokens that belong to its answer")
    parser.add_argument("--rows", type=int, default=16, help="rows per step")
    parser.add_argument("--budget", type=int, default=6144, help="tokens per forward")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--video", action="store_true", help="train TRL on a video row instead")
    parser.add_argument("--side", type=json.loads, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    if arguments.side:
        SIDES[arguments.side["side"]](arguments.side)
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model = build_model(arguments, folder / "model")
        if arguments.video:
            print(f"TRL on video rows: {describe_video_trial(model, folder)}")
            return
        data = make_rows(folder, arguments)
        lengths, num_trained = measure(model, data)
        batch = compute_largest_batch(max(lengths), arguments.rows, arguments.budget)
        print(
            f"{platform.machine()}, {arguments.threads} threads, {arguments.ds_config}; {len(lengths)} rows of {min(lengths)} "
            f"to {max(lengths)} tokens, {sum(lengths)} per step, {num_trained} of them trained; dsreason fills rows of "
            f"{arguments.budget}, TRL has batches of {batch}",
            flush=True,
        )
        task = {"model": str(model), "data": str(data), "batch": batch}
        task |= {name: vars(arguments)[name] for name in ("steps", "rows", "budget", "ds_config")}
        seconds: dict[str, list[tuple[float, float]]] = {side: [] for side in arguments.sides}
        for number in range(arguments.rounds):
            for side in arguments.sides:
                side_task = task | {"side": side, "output": str(folder / f"{side}_{number}")}
                seconds[side].append(
                    compute_seconds_per_step(run_side(__file__, side_task, arguments.threads), arguments.warmup)
                )
                wall, cpu = seconds[side][-1]
                print(f"{side:20}{wall:8.2f} s per step, {cpu:.2f} of CPU (load {os.getloadavg()[0]:.1f})", flush=True)
        ratios = report(seconds, sum(lengths), "tokens/s", arguments.sides[0])
        if OURS in ratios:
            wall, cpu = ratios[OURS]
            goal = GOALS[arguments.lengths]
            print(
                f"tokens per second, dsreason / {arguments.sides[0]}: {wall:.2f}, by CPU time {cpu:.2f} (goal {goal})"
            )


if __name__ == "__main__":
    main()
