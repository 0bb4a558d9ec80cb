"""Tokens per second of `dsreason sft` against TRL's SFTTrainer: same tiny model, rows, global batch, and fp32.

    python benchmarks/sft_vs_trl.py [--family qwen2_5_vl] [--ds-config zero2.json] [--rounds 3] [--threads 1]

Each side runs in one process of its own, in turn (A B A B …), pinned to as many cores as it has threads. Both decode
the images in that process unless `--workers` is given. Neither saves, validates or recomputes activations. A side's
speed is that of the wall clock from the end of the warm-up to the last step; tokens are the rows' own, without padding,
counted once for both. Both have `--micro-batch` rows in a forward, or with `--cut tokens` dsreason cuts by tokens, with no
more padded tokens in a forward than TRL's largest has. First a video row is tried with TRL, and what became of its pixels
is printed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

GOAL = 1.3
COLOURS = {"red": (220, 30, 30), "green": (30, 200, 30), "blue": (30, 30, 220), "yellow": (220, 220, 30)}


def write_rows(folder: Path, count: int, lengths: str) -> Path:
    """Image rows: one picture of 56 to 168 pixels a side, and a question of a number of sentences.

    `even`: one to four of them. `spread`: log-normal, as instruction data are: mostly short, some 10 times as long.
    """
    random = np.random.default_rng(0)
    rows = []
    for i in range(count):
        name = list(COLOURS)[i % len(COLOURS)]
        height, width = (int(size) for size in random.integers(56, 169, 2))
        pixels = random.integers(0, 60, (height, width, 3), dtype=np.uint8)
        pixels[10:40, 10:40] = COLOURS[name]
        Image.fromarray(pixels).save(folder / f"{i}.png")
        sentences = random.integers(1, 5) if lengths == "even" else np.ceil(random.lognormal(1.0, 0.9)).clip(1, 40)
        question = " ".join(["What is the colour of the square?"] * int(sentences))
        rows.append({"id": str(i), "image": f"{i}.png", "question": question, "answer": f"The square is {name}."})
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def row_lengths(model: Path, rows: Path) -> list[int]:
    """Tokens of each row, vision tokens included."""
    from dsreason.config.schema import SFTConfig
    from dsreason.data.sources import open_datasets
    from dsreason.train.common.preflight import build_encoder

    config = SFTConfig.model_validate({"data": {"adapter": "jsonl", "path": str(rows)}})
    encoder, (samples, _) = build_encoder(config, model), open_datasets(config.data)
    return [encoder.measure(samples[i]) for i in range(len(samples))]


def seconds_per_step(times: dict[int, float], warmup: int) -> float:
    """Mean wall-clock seconds of the steps after the warm-up; `times` are the ends of (some) steps."""
    first = min(step for step in times if step >= warmup)
    last = max(times)
    return (times[last] - times[first]) / (last - first)


def run_dsreason(model: Path, rows: Path, budget: int, output: Path, arguments: argparse.Namespace) -> float:
    cut = {"micro_batch_size": arguments.micro_batch}
    if arguments.cut == "tokens":
        cut = {"max_tokens_per_micro_batch": budget}
    config = {
        "deepspeed": arguments.ds_config,
        "model": {"path": str(model), "gradient_checkpointing": False},
        "data": {"adapter": "jsonl", "path": str(rows), "workers": arguments.workers},
        "optim": {"lr": 1e-4, "warmup": 0, "schedule": "constant"},
        "train": {
            "precision": "fp32",
            "epochs": 1000,
            "max_steps": arguments.steps,
            "global_batch_size": arguments.global_batch,
            **cut,
        },
        "checkpoint": {"every": 0, "export": "none"},
        "monitor": {"log_every": arguments.log_every},
    }
    output.mkdir(parents=True)
    (output.parent / f"{output.name}.json").write_text(json.dumps(config))
    command = [sys.executable, "-m", "dsreason", "sft", f"--config={output.parent / output.name}.json", "--nproc=1"]
    run_side([*command, f"--output-dir={output}"], arguments)
    return seconds_per_step(board_times(output / "tensorboard"), arguments.warmup)


def board_times(folder: Path) -> dict[int, float]:
    """When each logged step ended, by TensorBoard's clock."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    board.Reload()
    return {event.step: event.wall_time for event in board.Scalars("train/loss")}


def run_trl(model: Path, rows: Path, output: Path, arguments: argparse.Namespace) -> float:
    settings = {
        name: vars(arguments)[name] for name in ("steps", "global_batch", "micro_batch", "workers", "log_every")
    }
    task = {"model": str(model), "rows": str(rows), "output": str(output), **settings}
    printed = run_side([sys.executable, __file__, "--trl-side", json.dumps(task)], arguments)
    times = {int(step): moment for step, moment in json.loads(printed.splitlines()[-1]).items()}
    return seconds_per_step(times, arguments.warmup)


def run_side(command: list[str], arguments: argparse.Namespace) -> str:
    environment = os.environ | {
        "OMP_NUM_THREADS": str(arguments.threads),
        "CUDA_VISIBLE_DEVICES": "",
        "DS_ACCELERATOR": "cpu",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }
    cores = sorted(os.sched_getaffinity(0))[-arguments.threads :]  # no side may use more, whatever its launcher sets
    pin = partial(os.sched_setaffinity, 0, cores)
    found = subprocess.run(command, check=False, env=environment, text=True, capture_output=True, preexec_fn=pin)
    if found.returncode:
        sys.exit(
            f"{' '.join(command)}\nfailed with {found.returncode}:\n{found.stdout[-3000:]}\n{found.stderr[-6000:]}"
        )
    return found.stdout


def trl_side(task: dict[str, Any]) -> None:
    """TRL's own way of training on image rows, in this process; prints the time at the end of each step."""
    import torch
    from datasets import Dataset, Features, Value
    from datasets import Image as ImageFeature
    from datasets import List as ListFeature
    from transformers import AutoModelForImageTextToText, AutoProcessor, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    times: dict[int, float] = {}

    class Clock(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            times[state.global_step] = time.time()

    rows = [json.loads(line) for line in Path(task["rows"]).read_text().splitlines()]
    folder = Path(task["rows"]).parent
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
        per_device_train_batch_size=task["micro_batch"],
        gradient_accumulation_steps=task["global_batch"] // task["micro_batch"],
        learning_rate=1e-4,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        weight_decay=0.01,
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        dataloader_num_workers=task["workers"],
        logging_steps=task["log_every"],
        save_strategy="no",
        report_to="none",
        max_length=None,
        disable_tqdm=True,
    )
    trainer = SFTTrainer(
        model=AutoModelForImageTextToText.from_pretrained(task["model"], dtype=torch.float32),
        args=settings,
        train_dataset=dataset,
        processing_class=AutoProcessor.from_pretrained(task["model"]),
        callbacks=[Clock()],
    )
    trainer.train()
    print(json.dumps(times))


def try_trl_video(task: dict[str, Any]) -> None:
    """One step of SFTTrainer on a video row; prints what became of the video."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForImageTextToText, AutoProcessor
    from trl import SFTConfig, SFTTrainer

    model = AutoModelForImageTextToText.from_pretrained(task["model"], dtype=torch.float32)
    question = [{"type": "video", "video": task["video"]}, {"type": "text", "text": "Which way?"}]
    answer = [{"type": "text", "text": "left"}]
    row = {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
    settings = SFTConfig(
        output_dir=task["output"], max_steps=1, per_device_train_batch_size=1, bf16=False, use_cpu=True,
        save_strategy="no", report_to="none", max_length=None, disable_tqdm=True,
    )  # fmt: skip
    shown: list[str] = []
    forward = model.model.forward
    model.model.forward = lambda *args, **kwargs: (shown.extend(kwargs), forward(*args, **kwargs))[1]
    trainer = SFTTrainer(
        model=model,
        args=settings,
        train_dataset=Dataset.from_list([row] * 2, on_mixed_types="use_json"),
        processing_class=AutoProcessor.from_pretrained(task["model"]),
    )
    trainer.train()
    pixels = "pixel_values_videos" in shown
    print(f"it trains, and the model {'got' if pixels else 'did not get'} the video's pixels")


def describe_video_trial(model: Path, folder: Path, arguments: argparse.Namespace) -> str:
    """What TRL makes of a video row; the video is given as frames, so that no decoder is in the way."""
    frames = [folder / f"frame_{i}.png" for i in range(8)]
    for i, path in enumerate(frames):
        Image.new("RGB", (64, 64), (30 * i, 0, 0)).save(path)
    task = {"model": str(model), "video": [str(path) for path in frames], "output": str(folder / "video")}
    command = [sys.executable, __file__, "--trl-video", json.dumps(task)]
    environment = os.environ | {"OMP_NUM_THREADS": str(arguments.threads), "CUDA_VISIBLE_DEVICES": ""}
    found = subprocess.run(command, check=False, env=environment, text=True, capture_output=True)
    if found.returncode:
        return f"refused: {found.stderr.strip().splitlines()[-1]}"
    return found.stdout.strip().splitlines()[-1]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=("qwen2_5_vl", "qwen3_vl"), default="qwen2_5_vl")
    parser.add_argument("--hidden", type=int, default=128, help="hidden size of the tiny model")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--ds-config", default="zero2.json")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--lengths", choices=("spread", "even"), default="spread", help="of the rows' questions")
    parser.add_argument("--global-batch", type=int, default=32)
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--cut", choices=("tokens", "count"), default="count", help="of dsreason's micro-batches")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--log-every", type=int, default=5)
    parser.add_argument("--workers", type=int, default=0, help="data workers on both sides")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--trl-side", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--trl-video", type=json.loads, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    if arguments.trl_side or arguments.trl_video:
        (trl_side if arguments.trl_side else try_trl_video)(arguments.trl_side or arguments.trl_video)
        return
    from dsreason.models.tiny import build_tiny

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        sizes = {"hidden_size": arguments.hidden, "num_layers": arguments.layers}
        model = build_tiny(arguments.family, folder / "model", **sizes)
        rows = write_rows(folder, arguments.rows, arguments.lengths)
        lengths = row_lengths(model, rows)
        tokens = statistics.mean(lengths) * arguments.global_batch
        budget = arguments.micro_batch * max(lengths)  # padded tokens in TRL's largest forward
        print(
            f"{platform.machine()}, {arguments.threads} threads; {tokens:.0f} tokens a step, {arguments.lengths} lengths"
        )
        print(f"TRL on video rows: {describe_video_trial(model, folder, arguments)}", flush=True)
        sides = {"TRL": partial(run_trl, model, rows), "dsreason": partial(run_dsreason, model, rows, budget)}
        speeds: dict[str, list[float]] = {name: [] for name in sides}
        for number in range(arguments.rounds):
            for name, run in sides.items():
                seconds = run(folder / f"{name}_{number}", arguments)
                speeds[name].append(tokens / seconds)
                print(f"{name:8} {seconds:.4f} s a step  {speeds[name][-1]:9.0f} tokens/s", flush=True)
        medians = {name: statistics.median(values) for name, values in speeds.items()}
        print(f"medians: TRL {medians['TRL']:.0f}, dsreason {medians['dsreason']:.0f} tokens/s ({arguments.ds_config})")
        print(f"tokens per second, dsreason / TRL: {medians['dsreason'] / medians['TRL']:.2f} (goal {GOAL})")


if __name__ == "__main__":
    main()
