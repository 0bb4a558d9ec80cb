"""Comparison of what both configurations do: batch size, learning rate, steps, tokens, weight decay."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsreason.files.address import is_s3
from dsreason.tools.cosmos_rl.draft import COSMOS_FRAMEWORK, Draft, Settings

MOST_BYTES = 512 * 1024**2
"""Maximum size, in bytes, of a file whose rows are counted."""


@dataclass(frozen=True)
class Meaning:
    """One line of the comparison: a quantity, and its value in cosmos-rl and in dsreason."""

    name: str
    cosmos_rl: str
    dsreason: str


def list_meanings(cosmos: Settings, draft: Draft) -> list[Meaning]:
    if draft.trainer == "world":
        return [*compare_world_batch(draft), *compare_learning_rate(draft)]
    rows = count_rows(draft)
    if cosmos.tool == COSMOS_FRAMEWORK:
        return [*compare_framework(cosmos, draft), *compare_learning_rate(draft), *compare_optimizer()]
    return [
        *compare_batch(cosmos, draft),
        *compare_learning_rate(draft),
        *compare_steps(draft, rows),
        *compare_tokens(cosmos, draft),
        *compare_optimizer(),
    ]


def compare_batch(cosmos: Settings, draft: Draft) -> list[Meaning]:
    each = cosmos["train.train_batch_per_replica"]
    replicas = max(cosmos["policy.parallelism.n_init_replicas"], 1)
    gpus = Meaning("GPUs", describe_gpus(cosmos, draft), f"{draft.num_gpus}, one rank per GPU")
    if draft.trainer == "grpo":
        size, prompts = draft.get("grpo.num_generations"), draft.get("grpo.prompts_per_step")
        updates = draft.get("grpo.optimizer_steps_per_rollout") or 1
        completions = prompts * size
        dsreason = (
            f"{prompts} prompts x {size} completions = {completions} per rollout, {completions // updates} per update"
        )
        cosmos_rl = f"{each} completions per replica x {replicas} = {each * replicas} per step"
        return [gpus, Meaning("global batch", cosmos_rl, dsreason)]
    global_batch = draft.get("train.global_batch_size")
    cosmos_rl = f"{each} per data-parallel rank x {global_batch // each} = {global_batch} samples"
    return [gpus, Meaning("global batch", cosmos_rl, f"{global_batch} samples, on any number of GPUs")]


def compare_framework(cosmos: Settings, draft: Draft) -> list[Meaning]:
    """Compare the batch, steps and tokens with those of cosmos-framework, which counts packed rows."""
    batch, steps, longest = (
        draft.get(key) for key in ("train.global_batch_size", "train.max_steps", "model.max_length")
    )
    accumulated = cosmos["trainer.grad_accum_iter"]
    each = cosmos["dataloader_train.max_samples_per_batch"] or 1
    rows = f"{batch // (accumulated * each)} ranks x {accumulated} rows of at most {each} sample{'s' * (each != 1)}"
    return [
        Meaning("GPUs", str(draft.num_gpus), f"{draft.num_gpus}, one rank per GPU"),
        Meaning("global batch", rows, f"{batch} samples, on any number of GPUs"),
        Meaning("steps", f"{steps}, rows repeat", f"{steps}, rows repeat"),
        Meaning("tokens per row", f"{longest:,}", f"at most {longest:,}, without padding"),
    ]


def describe_gpus(cosmos: Settings, draft: Draft) -> str:
    if draft.trainer != "grpo" or cosmos["mode"] != "disaggregated":
        return str(draft.num_gpus)
    rollout = max(cosmos["rollout.parallelism.n_init_replicas"], 1)
    rollout *= cosmos["rollout.parallelism.tp_size"] * max(cosmos["rollout.parallelism.dp_shard_size"], 1)
    rollout *= max(cosmos["rollout.parallelism.pp_size"], 1)
    return f"{draft.num_gpus - rollout} for training and {rollout} for rollouts"


def compare_world_batch(draft: Draft) -> list[Meaning]:
    gpus = Meaning("GPUs", str(draft.num_gpus), f"{draft.num_gpus}, one rank per GPU")
    prompts, size = draft.get("world.prompts_per_step"), draft.get("world.num_generations")
    if prompts is None:
        global_batch = draft.get("train.global_batch_size")
        return [gpus, Meaning("global batch", f"{global_batch} clips", f"{global_batch} clips")]
    text = f"{prompts} prompts x {size} clips = {prompts * size} per step"
    return [gpus, Meaning("global batch", text, text)]


def compare_learning_rate(draft: Draft) -> list[Meaning]:
    peak, schedule = draft.get("optim.lr"), draft.get("optim.schedule")
    warmup = draft.get("optim.warmup") or 0
    rise = f"{warmup} steps" if isinstance(warmup, int) else f"{warmup:g} of all steps"
    share = draft.get("optim.decay_share")
    last = f" over the last {share:g} of all steps" if share else ""
    least = draft.get("optim.min_lr_share")
    end = f" to {least * peak:g}" if schedule != "constant" and least else ""
    scaled = (draft.get("optim.lr_multipliers") or {}).items()
    parts = "".join(f"; {multiplier * peak:g} for {pattern}" for pattern, multiplier in scaled)
    start = (draft.get("optim.warmup_start") or 0) * peak
    length = draft.get("optim.schedule_steps")
    span = f" until step {length}" if length else ""
    text = f"{start:g} to {peak:g} in {rise}, then {schedule}{last}{end}{span}{parts}"
    return [Meaning("learning rate", text, text)]


def compare_steps(draft: Draft, rows: int | None) -> list[Meaning]:
    if draft.trainer == "grpo":
        size, unit = draft.get("grpo.prompts_per_step"), "prompts"
    else:
        size, unit = draft.get("train.global_batch_size"), "samples"
    epochs, most = draft.get("train.epochs"), draft.get("train.max_steps")
    capped = f", at most {most}" if most else ""
    if rows is None:
        cosmos_rl = f"rows / {size}, rounded down, x {epochs} epochs{capped}"
        return [Meaning("steps", cosmos_rl, f"rows x {epochs} epochs / {size}, rounded down{capped}")]
    held_out = draft.get("data.validation") or 0
    used = rows - (count_held_out_rows(rows, held_out) if not isinstance(held_out, dict) else 0)
    cosmos_steps, dsreason_steps = used // size * epochs, used * epochs // size
    if most:
        cosmos_steps, dsreason_steps = min(cosmos_steps, most), min(dsreason_steps, most)
    each = f"{used} {unit} / {size} = {used / size:.1f} per epoch"
    return [Meaning("steps", f"{each}, {cosmos_steps} in total{capped}", f"{each}, {dsreason_steps} in total{capped}")]


def count_held_out_rows(rows: int, share: float) -> int:
    return max(1, round(share * rows)) if 0 < share < 1 else int(share)


def compare_tokens(cosmos: Settings, draft: Draft) -> list[Meaning]:
    """Compare the maximum numbers of tokens, the treatment of longer samples, and how the loss is averaged."""
    longest = draft.get("model.max_length")
    samples = draft.get("train.global_batch_size") or draft.get("grpo.prompts_per_step") * draft.get(
        "grpo.num_generations"
    )
    row = draft.get("train.max_tokens_per_micro_batch")
    mini = cosmos["train.train_policy.mini_batch"]
    return [
        Meaning("tokens per step", f"at most {samples * longest:,}", f"at most {samples * longest:,}"),
        Meaning(
            "tokens per forward pass",
            f"{mini} samples of at most {longest:,}, padded to the longest",
            f"one packed row of at most {row:,}, without padding",
        ),
        Meaning("longer samples", "the text is truncated", "an error names the sample (model.on_too_long)"),
        Meaning(
            "mean of the loss", "equal weight for each micro-batch", "equal weight for each token of the global batch"
        ),
    ]


def compare_optimizer() -> list[Meaning]:
    return [Meaning("weight decay", "all weights", "matrices, not norms and biases")]


def count_rows(draft: Draft) -> int | None:
    """Count the rows in a local file or folder; return None if the data is remote, too large or in an unknown format."""
    path = draft.get("data.path") or ""
    if not path or is_s3(path):
        return None
    file = Path(path).expanduser()
    try:
        if (file / "metas").is_dir():
            return sum(1 for _ in (file / "metas").glob("*.label.json"))
        if not file.is_file() or file.stat().st_size > MOST_BYTES:
            return None
        if file.suffix == ".jsonl":
            with file.open("rb") as lines:
                return sum(1 for line in lines if line.strip())
        rows: Any = json.loads(file.read_bytes()) if file.suffix == ".json" else None
    except (OSError, ValueError, RecursionError):
        return None
    return len(rows) if isinstance(rows, list) else None
