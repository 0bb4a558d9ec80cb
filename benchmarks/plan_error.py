"""Errors in the estimates that `dsreason plan` makes, part by part.

    python benchmarks/plan_error.py [training] [vllm] [--cases full lora nf4 video fp32 …] [--threads 1]

`training`: random models of several hundred million parameters, on 1 and 2 ranks under ZeRO-3, with rows of several lengths. Each
case trains for two steps in new processes. The second step is measured: the memory that a rank holds before the step (weights,
gradients, optimizer), and the memory that forward and backward, and then the optimizer, add at their peak. On a CPU, this is
resident memory (anonymous memory and its high-water mark); on a GPU, allocated memory. The buckets in the DeepSpeed JSON are
smaller than those in `zero3.json`, in proportion to the models.
`vllm` (GPUs only): the number of blocks in vLLM's KV cache, for the model `--vllm-model`.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lora_memory import measure_held_bytes
from loss_memory import PeakMemory
from PIL import Image
from sides import make_words

GOAL = 0.15
MATTERS = 40 * 2**20
"""Number of bytes below which an error is printed, but does not count."""
BUCKETS = {
    "reduce_bucket_size": 4e6,
    "stage3_prefetch_bucket_size": 2e6,
    "stage3_max_live_parameters": 4e7,
    "stage3_max_reuse_distance": 4e7,
    "stage3_param_persistence_threshold": 10000,
}


@dataclass(frozen=True)
class Case:
    name: str
    family: str = "qwen2_5_vl"
    ranks: int = 1
    tokens: int = 2048
    images: int = 0
    """Number of images with 256 tokens each; these tokens are included in `tokens`."""
    lora: int = 0
    quantize: str | None = None
    precision: str = "bf16"
    freeze: tuple[str, ...] = ()
    recompute: bool = True
    offload: bool = False
    hidden: int = 1024
    layers: int = 4
    vocabulary: int = 32768
    tied: bool = False


FULL = Case("full")
FROZEN: dict[str, Any] = {"layers": 8, "vocabulary": 196608, "tokens": 1024}
"""Sizes of models with frozen weights. These models are larger than the others, because frozen weights take little memory."""
CASES = [
    replace(FULL, tokens=512),
    FULL,
    replace(FULL, tokens=4096),
    replace(FULL, ranks=2),
    replace(FULL, ranks=2, tokens=4096),
    replace(FULL, name="full, no recomputation", recompute=False),
    replace(FULL, name="full, Qwen3-VL, tied", family="qwen3_vl", tied=True, ranks=2),
    replace(FULL, name="fp32", precision="fp32", tokens=4096),
    replace(FULL, name="offload", offload=True),
    replace(FULL, name="lora", lora=16, **FROZEN),
    replace(FULL, name="lora", lora=16, **FROZEN, ranks=2),
    replace(FULL, name="nf4", lora=16, quantize="nf4", **FROZEN),
    replace(FULL, name="nf4", lora=16, quantize="nf4", **FROZEN, ranks=2),
    replace(FULL, name="video", tokens=2048, images=7, hidden=512),
    replace(FULL, name="video, Qwen3-VL", family="qwen3_vl", tokens=2048, images=7, hidden=512),
    replace(FULL, name="video, frozen tower", tokens=2048, images=7, hidden=512, freeze=("visual",)),
]
VISION = {"hidden": 768, "depth": 6}
"""Sizes of the vision tower in models that get images; the other models have a tiny tower."""


def build_model(case: Case, folder: Path) -> Path:
    from dsreason.models.tiny import build_tiny

    tower = {"vision_hidden_size": VISION["hidden"], "vision_depth": VISION["depth"]} if case.images else {}
    return build_tiny(
        case.family,
        folder,
        hidden_size=case.hidden,
        intermediate_size=4 * case.hidden,
        num_layers=case.layers,
        vocabulary_size=case.vocabulary,
        head_size=64,
        tie_embeddings=case.tied,
        dtype=torch.bfloat16,
        **tower,
    )


def build_run_config(case: Case, model: Path, tokens: int, ds_config: Path) -> Any:
    from dsreason.config.schema import SFTConfig

    document = {
        "deepspeed": str(ds_config),
        "model": {
            "path": str(model),
            "max_length": 2 * tokens,
            "freeze": case.freeze,
            "quantize": case.quantize,
            "gradient_checkpointing": case.recompute,
        },
        "lora": {"rank": case.lora},
        "train": {"precision": case.precision, "max_tokens_per_micro_batch": tokens},
    }
    return SFTConfig.model_validate(document)


def build_conversation(case: Case, folder: Path, side: int) -> list[dict[str, Any]]:
    """Build a conversation of about `case.tokens` tokens: square pictures of `side` pixels, and an answer that fills the row."""
    random = np.random.default_rng(0)
    parts: list[dict[str, Any]] = []
    for number in range(case.images):
        file = folder / f"{number}_{os.environ['RANK']}.png"
        Image.fromarray(random.integers(0, 256, (side, side, 3), dtype=np.uint8)).save(file)
        parts.append({"type": "image", "image": str(file)})
    answer = case.tokens - 256 * case.images - 64 - 2 * case.images
    return [
        {"role": "user", "content": [*parts, {"type": "text", "text": make_words(16)}]},
        {"role": "assistant", "content": make_words(answer)},
    ]


def measure(case: Case, model: Path, ds_config: Path, folder: Path) -> dict[str, float]:
    """Return the bytes that a rank holds before the second step, and the bytes that the two halves of the step add."""
    import peft  # noqa: F401 (imported first, because the phases of a plan exclude the memory of libraries)

    from dsreason.config.deepspeed import resolve_deepspeed
    from dsreason.data.micro_batches import align_micro_batches
    from dsreason.data.types import Sample
    from dsreason.job.ranks import gather_objects, init_world
    from dsreason.losses.sft import compute_sft_loss
    from dsreason.train.common.opening import build_policy_engine
    from dsreason.train.common.preflight import build_encoder

    world = init_world()
    config = build_run_config(case, model, case.tokens, ds_config)
    encoder = build_encoder(config, model)
    side = 16 * 2 * encoder.family.tiny.patch_size
    sample = encoder.encode(Sample(id="0", messages=build_conversation(case, folder, side)))
    kind = "cuda" if world.device.type == "cuda" else "cpu"
    deepspeed = resolve_deepspeed(config.deepspeed, config, device=kind, world_size=world.size)
    before = measure_held_bytes(world.device)
    engine = build_policy_engine(config, deepspeed, model)
    results: dict[str, float] = {"tokens": len(sample), "trained": int(sample.loss_mask.sum())}
    for _ in range(2):
        (batch,) = align_micro_batches([[sample]], encoder, gather_objects, packing=True)
        engine.set_gradient_accumulation_boundary(True)
        results["held"] = measure_held_bytes(world.device) - before
        with PeakMemory(world.device) as peak:
            loss = compute_sft_loss(engine(batch.to(engine.device)), num_tokens=len(batch.targets))
            engine.backward(loss, scale_wrt_gas=False)
            del loss
        results["forward and backward"] = peak.added
        gc.collect()
        with PeakMemory(world.device) as peak:
            engine.step()
        results["optimizer"] = peak.added
    return results


def estimate(case: Case, model: Path, ds_config: Path, results: dict[str, float], device: str) -> dict[str, Any]:
    from dsreason.tools.planning.request import Machine, PlanRequest
    from dsreason.tools.planning.states import compute_states
    from dsreason.tools.planning.training import plan_forward_backward, plan_optimizer_step

    machine = Machine(case.ranks, device=device)
    media = 256 * case.images or 4  # a row without media gets a small dummy image of 4 tokens
    config = build_run_config(case, model, int(results["tokens"]), ds_config)
    tokens = {"media_tokens": media, "trained_tokens": int(results["trained"])}
    request = PlanRequest("sft", config, machine, str(ds_config), **tokens)
    states = compute_states(request)
    held = states.weights + states.persistent + states.gradients + states.optimizer
    held += states.host if device == "cpu" else 0
    return {
        "held": held + min(states.bucket, 4 * request.parameters.num_trained),
        "forward and backward": plan_forward_backward(request, ()).total,
        "optimizer": plan_optimizer_step(request, ()).total,
        "parameters": request.parameters.numel,
        "items": {item.name: item.nbytes / 2**20 for item in plan_forward_backward(request, ()).items},
    }


def training(arguments: argparse.Namespace, folder: Path) -> None:
    from dsreason.job import launch

    launch.prepare_environment()
    # Otherwise, the allocator would keep freed memory, which would hide the next peak.
    os.environ |= {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    os.environ |= {"OMP_NUM_THREADS": str(arguments.threads), "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
    offload_sections = {f"offload_{states}": {"device": "cpu"} for states in ("optimizer", "param")}
    for name, more in (("on_device", {}), ("offload", offload_sections)):
        section = {"stage": 3, "contiguous_gradients": True, **BUCKETS, **more}
        (folder / f"{name}.json").write_text(json.dumps({"zero_optimization": section}))
    print(f"{'case':26}{'ranks':>6}{'tokens':>7}  {'part':22}{'estimate':>9}{'measured':>9}  MiB per rank, error")
    worst = 0.0
    for number, case in enumerate(CASES):
        if arguments.cases and not any(case.name.startswith(name) for name in arguments.cases):
            continue
        case_folder = folder / str(number)
        case_folder.mkdir()
        model = build_model(case, case_folder / "model")
        ds_config = folder / ("offload.json" if case.offload else "on_device.json")
        task = json.dumps(
            {"case": asdict(case), "model": str(model), "ds_config": str(ds_config), "folder": str(case_folder)}
        )
        command = [__file__, "--side", task]
        launch.start_ranks(lambda attempt, command=command: command, ranks=case.ranks, log_dir=case_folder / "logs")
        ranks = [json.loads((case_folder / f"rank_{rank}.json").read_text()) for rank in range(case.ranks)]
        planned = estimate(case, model, ds_config, ranks[0], arguments.device)
        for part in ("held", "forward and backward", "optimizer"):
            measured = max(rank[part] for rank in ranks)
            error = planned[part] / measured - 1 if measured > 0 else 0.0
            judged = max(measured, planned[part]) >= MATTERS
            worst = max(worst, abs(error)) if judged else worst
            print(
                f"{case.name:26}{case.ranks:6}{int(ranks[0]['tokens']):7}  {part:22}{planned[part] / 2**20:9.0f}"
                f"{measured / 2**20:9.0f}  {error:+.1%}{'' if judged else ' (too small to count)'}",
                flush=True,
            )
        if arguments.verbose:
            print({name: round(value) for name, value in planned["items"].items()})
    print(f"largest error: {worst:.1%} (goal {GOAL:.0%})")


def vllm(arguments: argparse.Namespace, folder: Path) -> None:
    from dsreason.job import launch

    if not torch.cuda.is_available():
        print("vllm: skipped, because no GPU is available")
        return
    launch.prepare_environment()
    task = json.dumps({"model": arguments.vllm_model, "folder": str(folder)})
    launch.start_ranks(lambda attempt: [__file__, "--side", task], ranks=1, log_dir=folder / "logs")
    tokens = json.loads((folder / "vllm.json").read_text())
    error = tokens["estimate"] / tokens["measured"] - 1
    print(f"KV cache of vLLM: {tokens['estimate']:,} tokens estimated, {tokens['measured']:,} measured, {error:+.1%}")


def run_vllm_side(task: dict[str, Any]) -> None:
    """Start a GRPO run's engine without a policy, and write the number of tokens that fit into its cache."""
    from dsreason.cli.plan import find_machine
    from dsreason.config.schema_grpo import GRPOConfig
    from dsreason.files.cache import get_cache_dir
    from dsreason.job.ranks import init_world
    from dsreason.models.load import resolve_model
    from dsreason.models.processors.loading import load_processor
    from dsreason.rollout.opening import open_rollout_engine
    from dsreason.tools.planning.request import PlanRequest
    from dsreason.tools.planning.sampling import VLLM
    from dsreason.train.grpo.build import build_engine_settings

    world = init_world()
    config = GRPOConfig.model_validate({"model": {"path": task["model"]}, "reward": {"functions": {"format": 1.0}}})
    folder = resolve_model(config.model, get_cache_dir() / "models")
    settings, tokenizer = build_engine_settings(config, world), load_processor(folder).tokenizer
    with open_rollout_engine(folder, tokenizer, world, settings, dtype=torch.bfloat16) as engine:
        cache = engine.llm.llm_engine.vllm_config.cache_config  # type: ignore[attr-defined]
        measured = cache.num_gpu_blocks * cache.block_size
    planned = VLLM(PlanRequest("grpo", config, find_machine(1, None, 8), config.deepspeed), config).cache_tokens
    (Path(task["folder"]) / "vllm.json").write_text(json.dumps({"measured": measured, "estimate": planned}))


def run_rank_side(task: dict[str, Any]) -> None:
    from dsreason.job import launch

    launch.enter_rank()
    if "case" not in task:
        run_vllm_side(task)
        return
    case = Case(**task["case"] | {"freeze": tuple(task["case"]["freeze"])})
    results = measure(case, Path(task["model"]), Path(task["ds_config"]), Path(task["folder"]))
    (Path(task["folder"]) / f"rank_{os.environ['RANK']}.json").write_text(json.dumps(results))


PARTS = {"training": training, "vllm": vllm}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=(*PARTS, []), help="default: all")
    parser.add_argument("--cases", nargs="*", help="names of cases, or prefixes of names; default: all")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--verbose", action="store_true", help="also print the items of the forward and backward estimate"
    )
    parser.add_argument("--vllm-model", default="tiny:qwen2_5_vl", help="folder or name on the Hub")
    parser.add_argument("--side", type=json.loads, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    if arguments.side:
        run_rank_side(arguments.side)
        return
    for name in arguments.parts or PARTS:
        with tempfile.TemporaryDirectory() as scratch:
            PARTS[name](arguments, Path(scratch))


if __name__ == "__main__":
    main()
