"""Speed of dsreason relative to TRL on one GPU, each in a separate process: SFT, or GRPO with colocated vLLM in sleep mode.

    python benchmarks/gpu_vs_trl.py sft|grpo [--size 2B] [--sides dsreason trl] [--seconds 150]

SFT trains on image rows of 50 to 1,500 tokens, 64 per step, in bf16 with gradient checkpointing. TRL's weights are bf16, which is
usual with TRL; dsreason keeps float32 master weights. GRPO samples 8 completions of 256 tokens for each of 16 prompts, and both
sides let vLLM sleep while the policy trains. The model is random, and its end token is never sampled, so every completion has the
full length.

The output is each side's seconds per step after two warm-up steps and, at the end, the ratio. A side that exceeds its time limit
is stopped, and the steps that it has finished count. Without a GPU, the model is tiny, and TRL generates without vLLM, because
its weight sync fails on CPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sides import build_trl_clock, make_log_uniform_lengths, time_steps, write_rows

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.gpu_report import materials  # noqa: E402 (the root is on the path only now)

SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 64, "num_layers": 2, "intermediate_size": 128},
    "2B": materials.REAL | materials.TOWER | materials.SIZES["2B"],
    "4B": materials.REAL | materials.TOWER | {"hidden_size": 2560, "num_layers": 36, "intermediate_size": 9728},
}
ROWS, BUDGET = 64, 16_384
PROMPTS, GENERATIONS, LENGTH = 16, 8, 256
STEPS = {"sft": 6, "grpo": 5}
WARMUP = 2
REWARD = "import random\n\n\ndef chance(completion, sample):\n    return random.random()\n"


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def prepare(task: str, size: str, folder: Path) -> dict[str, Any]:
    """Write a comparison's model, rows and reward; return the settings that both sides need.

    The tokens `media_ids` must not be sampled: TRL's forward pass would take them for missing media, and dsreason bans them.
    """
    import torch
    from transformers import AutoTokenizer, GenerationConfig

    from dsreason.families import get_family
    from dsreason.models.tiny import build_tiny
    from dsreason.rollout.protocol import find_media_token_ids

    model = folder / "model"
    build_tiny("qwen3_vl", model, dtype=torch.bfloat16, device="cuda" if has_gpu() else "cpu", **SIZES[size])
    tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    never_drawn = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    GenerationConfig(eos_token_id=[never_drawn], pad_token_id=tokenizer.pad_token_id).save_pretrained(model)
    (folder / "rewards.py").write_text(REWARD)
    lengths = make_log_uniform_lengths(ROWS, 50, 1500)
    if task == "sft":
        answers = [max(1, length // 2) for length in lengths]
        questions = [max(1, length - 50 - answer) for length, answer in zip(lengths, answers, strict=True)]
        rows = write_rows(folder, questions, answers)
    else:
        count = PROMPTS * STEPS["grpo"]
        rows = write_rows(folder, [512 - 44] * count, [1] * count)
    media_ids = find_media_token_ids(tokenizer, get_family("qwen3_vl"))
    return {
        "model": str(model),
        "rows": str(rows),
        "tokens": sum(lengths),
        "longest": max(lengths),
        "media_ids": media_ids,
    }


# ---------------------------------------------------------------- dsreason


def run_dsreason(task: str, facts: dict[str, Any], output: Path) -> None:
    from dsreason.job.launch import prepare_environment

    prepare_environment()
    settings = materials.build_run_settings(Path(facts["model"]), Path(facts["rows"])) | {"deepspeed": "zero2.json"}
    settings["data"]["workers"] = 8
    settings["checkpoint"]["last"] = False
    settings["optim"]["lr"] = 1e-6
    settings["train"] |= {"max_steps": STEPS[task], "max_tokens_per_micro_batch": BUDGET}
    if task == "sft":
        from dsreason.config.schema import SFTConfig
        from dsreason.train.sft import loop as sft_loop

        settings["train"]["global_batch_size"] = ROWS
        time_steps(print_ends)
        sft_loop.run(SFTConfig.model_validate(settings), output_dir=output)
        return
    from dsreason.config.schema_grpo import GRPOConfig
    from dsreason.train.grpo import loop as grpo_loop

    settings |= {
        "grpo": {"prompts_per_step": PROMPTS, "num_generations": GENERATIONS, "kl_coef": 0.0},
        "rollout": {"gpu_memory_utilization": 0.4, "max_completion_length": LENGTH},
        "reward": {"functions": {f"{Path(facts['rows']).parent / 'rewards.py'}:chance": 1.0}},
    }
    time_steps(print_ends)
    grpo_loop.run(GRPOConfig.model_validate(settings), output_dir=output)


def print_ends(ends: dict[int, tuple[float, float]]) -> None:
    print("ENDS " + json.dumps({step: end[0] for step, end in ends.items()}), flush=True)


# ---------------------------------------------------------------- TRL


def run_trl(task: str, facts: dict[str, Any], output: Path) -> None:
    import torch
    from transformers import AutoModelForImageTextToText, AutoProcessor, TrainerCallback

    ends: dict[int, tuple[float, float]] = {}

    class PrintEnds(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            print_ends(ends)

    model = AutoModelForImageTextToText.from_pretrained(facts["model"], dtype=torch.bfloat16, trust_remote_code=False)
    processor = AutoProcessor.from_pretrained(
        facts["model"], padding_side="left", truncation_side="left", trust_remote_code=False
    )
    common = {
        "output_dir": str(output),
        "max_steps": STEPS[task],
        "learning_rate": 1e-6,
        "lr_scheduler_type": "constant",
        "bf16": has_gpu(),
        "use_cpu": not has_gpu(),
        "gradient_checkpointing": True,
        "dataloader_num_workers": 4,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    build = {"sft": build_trl_sft, "grpo": build_trl_grpo}[task]
    trainer = build(model, processor, common, facts, [build_trl_clock(ends), PrintEnds()])
    trainer.train()


def build_trl_sft(
    model: Any, processor: Any, common: dict[str, Any], facts: dict[str, Any], callbacks: list[Any]
) -> Any:
    from datasets import Dataset, Features, Value
    from datasets import Image as ImageFeature
    from datasets import List as ListFeature
    from trl import SFTConfig, SFTTrainer

    folder = Path(facts["rows"]).parent
    messages = [{"role": Value("string"), "content": Value("string")}]
    rows = [
        {
            "prompt": [{"role": "user", "content": row["question"]}],
            "completion": [{"role": "assistant", "content": row["answer"]}],
            "images": [str(folder / row["image"])],
        }
        for row in read_rows(facts)
    ]
    features = Features({"prompt": messages, "completion": messages, "images": ListFeature(ImageFeature())})
    batch = max(size for size in (1, 2, 4, 8, 16, 32, 64) if size * facts["longest"] <= BUDGET)
    settings = SFTConfig(
        per_device_train_batch_size=batch, gradient_accumulation_steps=ROWS // batch, max_length=None, **common
    )
    dataset = Dataset.from_list(rows, features=features)
    return SFTTrainer(model, settings, train_dataset=dataset, processing_class=processor, callbacks=callbacks)


def build_trl_grpo(
    model: Any, processor: Any, common: dict[str, Any], facts: dict[str, Any], callbacks: list[Any]
) -> Any:
    import random

    from datasets import Dataset, Features, Value
    from datasets import Image as ImageFeature
    from trl import GRPOConfig, GRPOTrainer

    folder = Path(facts["rows"]).parent
    rows = [
        {"prompt": [{"role": "user", "content": row["question"]}], "image": str(folder / row["image"])}
        for row in read_rows(facts)
    ]
    features = Features({"prompt": [{"role": Value("string"), "content": Value("string")}], "image": ImageFeature()})
    sampling: dict[str, Any] = {"use_vllm": False, "generation_kwargs": {"suppress_tokens": facts["media_ids"]}}
    if has_gpu():
        sampling = {
            "use_vllm": True,
            "vllm_mode": "colocate",
            "vllm_gpu_memory_utilization": 0.4,
            "vllm_enable_sleep_mode": True,
            "vllm_max_model_length": 1024,
            "generation_kwargs": {"logit_bias": dict.fromkeys(facts["media_ids"], -100.0)},
        }
    batch = 16
    settings = GRPOConfig(
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=PROMPTS * GENERATIONS // batch,
        num_generations=GENERATIONS,
        max_completion_length=LENGTH,
        beta=0.0,
        loss_type="grpo",
        **sampling,
        **common,
    )
    return GRPOTrainer(
        model,
        reward_funcs=lambda completions, **_: [random.random() for _ in completions],
        args=settings,
        train_dataset=Dataset.from_list(rows, features=features),
        processing_class=processor,
        callbacks=callbacks,
    )


def read_rows(facts: dict[str, Any]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(facts["rows"]).read_text().splitlines()]


# ---------------------------------------------------------------- the comparison

SIDES: dict[str, Callable[[str, dict[str, Any], Path], None]] = {"dsreason": run_dsreason, "trl": run_trl}


def measure(side: str, arguments: argparse.Namespace, facts: dict[str, Any], folder: Path) -> float | None:
    """Run one side in a separate process; return its seconds per step, or None if it finished too few steps."""
    command = [sys.executable, __file__, arguments.task, "--side", side, "--facts", json.dumps(facts)]
    command += ["--output", str(folder / side)]
    variables = {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}", "TOKENIZERS_PARALLELISM": "false"}
    log = folder / f"{side}.log"
    with log.open("w") as output:
        process = subprocess.Popen(command, env=os.environ | variables, stdout=output, stderr=subprocess.STDOUT)
        try:
            process.wait(arguments.seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    lines = log.read_text(errors="replace").splitlines()
    reports = [line for line in lines if line.startswith("ENDS ")]
    ends = {int(step): end for step, end in json.loads(reports[-1][5:]).items()} if reports else {}
    if len(ends) <= WARMUP:
        print(f"{side}: finished only {len(ends)} steps within {arguments.seconds} s; raise --seconds. Its last lines:")
        print("\n".join(lines[-25:]))
        return None
    last = max(ends)
    seconds = (ends[last] - ends[WARMUP]) / (last - WARMUP)
    amount, unit = (
        (facts["tokens"], "tokens/s") if arguments.task == "sft" else (PROMPTS * GENERATIONS, "completions/s")
    )
    print(f"{side}: {seconds:.3f} s per step, {amount / seconds:,.1f} {unit}, {last} steps", flush=True)
    return seconds


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=STEPS)
    parser.add_argument("--size", choices=SIZES, help="default: 2B, or tiny without a GPU")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--seconds", type=float, default=150.0, help="time limit of each side")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--facts", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    if arguments.side:
        SIDES[arguments.side](arguments.task, arguments.facts, arguments.output)
        return
    size = arguments.size or ("2B" if has_gpu() else "tiny")
    with tempfile.TemporaryDirectory(prefix="gpu-vs-trl-") as scratch:
        facts = prepare(arguments.task, size, Path(scratch))
        seconds = {side: measure(side, arguments, facts, Path(scratch)) for side in arguments.sides}
    if seconds.get("dsreason") and seconds.get("trl"):
        print(f"dsreason / TRL: {seconds['trl'] / seconds['dsreason']:.2f} times as fast (goal: above 1)")


if __name__ == "__main__":
    main()
