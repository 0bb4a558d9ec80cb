"""Time to sample clips with a run's engine, relative to diffusers' pipeline.

    python benchmarks/world_sampling.py [--ds-config zero3.json] [--steps 10] [--batch 2] [--scale 3] [--rounds 5]

The model is a random Cosmos-Predict2.5 transformer that is large enough for its matrix products to take most of the time, on one
rank and one thread. The sides take turns with the same prompts and noise, from embeddings to pixels: the pipeline's call; the
solver for validation, whose pixels must equal the pipeline's; and the noisy steps of a rollout, with their
log-probabilities. The output is the median seconds per clip, in wall-clock and CPU time, and the ratio of the CPU time to the
pipeline's. ZeRO-3's hooks take a fixed time per module and forward pass, which `--side 64` makes visible. The engine decodes
several clips (`--batch`) one by one, so that pixels do not depend on the batch; with a tiny autoencoder on a CPU, this is slow.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsreason.job import launch

if TYPE_CHECKING:  # nothing may import torch before `launch.prepare_environment` runs
    import torch

    from dsreason.world.training.build import WorldTrainer
    from dsreason.world.training.clips import ClipMicroBatch

GOAL = 1.0
FRAMES, TEXT = 17, 64


def build_small(folder: Path, layers: int, heads: int) -> Path:
    """Write a tiny model with a larger transformer. It is still quick to build, because it has only 96 features per head."""
    import torch
    from diffusers import CosmosTransformer3DModel

    from dsreason.world.families import FAMILIES

    FAMILIES["cosmos_predict2_5"].build_tiny(folder)
    settings = json.loads((folder / "transformer" / "config.json").read_text())
    torch.manual_seed(0)
    sizes = {"num_layers": layers, "num_attention_heads": heads, "attention_head_dim": 96, "mlp_ratio": 4.0}
    CosmosTransformer3DModel.from_config(settings | sizes).save_pretrained(folder / "transformer")
    return folder


def build_run_config(folder: Path, ds_config: str, side: int, **sections: dict[str, Any]) -> dict[str, Any]:
    document: dict[str, Any] = {
        "deepspeed": ds_config,
        "model": {"path": str(folder), "max_prompt_length": TEXT, "gradient_checkpointing": False},
        "data": {"frames": FRAMES, "height": side, "width": side, "limit": 64},
        "optim": {"lr": 1e-5, "warmup": 0, "schedule": "constant"},
        "train": {"precision": "fp32", "max_steps": 100, "epochs": 1000},
        "reward": {"functions": {"brightness": 1.0}},
        "validation": {"before_training": False, "max_samples": 0},
        "checkpoint": {"every": 0, "export": "none"},
    }
    for name, section in sections.items():
        document[name] = {**document.get(name, {}), **section}
    return document


def time_call(call: Callable[[], Any]) -> tuple[float, float, Any]:
    """Call the function; return its wall-clock seconds, its CPU seconds and its result."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = call()
    return time.perf_counter() - wall, time.process_time() - cpu, result


def open_pipeline(folder: Path) -> Any:
    import torch
    from diffusers import Cosmos2_5_PredictBasePipeline

    class NoSafety(torch.nn.Module):
        device, dtype = torch.device("cpu"), torch.float32

        def check_text_safety(self, prompt: str) -> bool:
            return True

        def check_video_safety(self, frames: Any) -> Any:
            return frames

    pipeline = Cosmos2_5_PredictBasePipeline.from_pretrained(folder, safety_checker=NoSafety(), trust_remote_code=False)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def sample_with_pipeline(
    pipeline: Any, batch: ClipMicroBatch, negative: torch.Tensor, arguments: argparse.Namespace
) -> torch.Tensor:
    """Sample with the pipeline; return pixels `[B, 3, T, H, W]` from 0 to 1."""
    output = pipeline(
        prompt_embeds=batch.text,
        negative_prompt_embeds=negative,
        latents=batch.start,
        height=arguments.side,
        width=arguments.side,
        num_frames=FRAMES,
        num_inference_steps=arguments.steps,
        guidance_scale=arguments.scale - 1 if arguments.scale > 1 else 1.0,  # the pipeline adds 1 to its scale
        output_type="pt",
    )
    return output.frames.transpose(1, 2)


def measure(trainer: WorldTrainer, arguments: argparse.Namespace) -> None:
    import torch

    from dsreason.world.training.clips import ClipIndex
    from dsreason.world.training.rollout import PendingBatch, plan_steps, sample_batch
    from dsreason.world.training.validate import solve_ode

    maker = trainer.clip_maker
    pipeline = open_pipeline(maker.model_path)
    places = tuple(ClipIndex(number, 0) for number in range(arguments.batch))
    rows = range(arguments.batch)
    [batch] = maker.inputs.build_micro_batches([(places, True)], trainer.training, rows, 1, with_clean=False)
    negative = maker.inputs.negative(arguments.batch)
    plan = plan_steps(maker.config, maker.sigmas, 1)

    def run_rollout() -> torch.Tensor:
        pending: list[PendingBatch] = []
        return sample_batch(maker, batch, plan, 1, pending).latents

    with torch.no_grad():
        sides: dict[str, Callable[[], Any]] = {
            "pipeline": lambda: sample_with_pipeline(pipeline, batch, negative, arguments),
            "solver": lambda: maker.codec.decode(solve_ode(maker, batch)),
            "rollout": run_rollout,
        }
        pixels = {name: side() for name, side in sides.items()}  # this also warms up all sides
        difference = (pixels["pipeline"] - pixels["solver"]).abs().max().item()
        seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
        for _ in range(arguments.rounds):
            for name, side in sides.items():
                wall, cpu, _ = time_call(side)
                seconds[name].append((wall / arguments.batch, cpu / arguments.batch))
    parameters = sum(p.numel() for p in pipeline.transformer.parameters())
    print(f"{parameters / 1e6:.1f} M parameters, {arguments.batch} clips at a time, guidance {arguments.scale:g}")
    print(f"load {os.getloadavg()[0]:.1f}; largest difference of pixels, solver to pipeline: {difference:.1e}")
    medians = {
        name: [statistics.median(column) for column in zip(*rows, strict=True)] for name, rows in seconds.items()
    }
    for name, (wall, cpu) in medians.items():
        ratio = cpu / medians["pipeline"][1]
        print(f"{name:10}{wall:8.3f} s per clip{cpu:8.3f} s of CPU time  / pipeline {ratio:.3f} (goal {GOAL:g})")


def run_rank(arguments: argparse.Namespace, measure: Callable[[WorldTrainer, argparse.Namespace], None]) -> None:
    import torch

    from dsreason.world.schema import WorldConfig
    from dsreason.world.training.build import build_world

    torch.set_num_threads(arguments.threads)
    config = WorldConfig.model_validate(json.loads((arguments.folder / "run.json").read_text()))
    with build_world(config, arguments.folder / "run", None) as trainer:
        measure(trainer, arguments)


def run_on_one_rank(
    file: str,
    arguments: argparse.Namespace,
    measure: Callable[[WorldTrainer, argparse.Namespace], None],
    **sections: dict[str, Any],
) -> None:
    """Start `file` again as the only rank of a run whose configuration contains `sections`, and call `measure` there."""
    if launch.is_rank():
        launch.enter_rank()
        run_rank(arguments, measure)
        return
    launch.prepare_environment()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model = build_small(folder / "model", arguments.layers, arguments.heads)
        document = build_run_config(model, arguments.ds_config, arguments.side, **sections)
        (folder / "run.json").write_text(json.dumps(document))
        command = [file, *sys.argv[1:], f"--folder={folder}"]
        launch.start_ranks(lambda attempt: command, ranks=1, log_dir=folder / "logs")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ds-config", default="zero3.json")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--side", type=int, default=128, help="height and width of a clip, in pixels")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--scale", type=float, default=1.0, help="guidance scale; 1 means no guidance")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    world = {
        "sampling_steps": arguments.steps,
        "guidance_scale": arguments.scale,
        "window": 2,
        "prompts_per_step": 8,
    }
    run_on_one_rank(__file__, arguments, measure, world=world, train={"micro_batch_size": arguments.batch})


if __name__ == "__main__":
    main()
