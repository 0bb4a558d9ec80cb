"""Memory for the parameters, gradients and optimizer of a rank that trains adapters, relative to training all weights.

    python benchmarks/lora_memory.py [--gb 1.0] [--rank 16] [--quantize] [--ds-config zero3.json]

Each side trains the same random model in bf16 for two steps, in a new process, and reports the memory in use before the second
optimizer step minus the memory in use before the model was loaded: anonymous memory on a CPU (mapped weight files belong to the
page cache), allocated memory on a GPU. `--quantize` also measures adapters on a 4-bit base model. The training text is a few
words, so activations are negligible.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

GOAL = 0.15
HIDDEN, INTERMEDIATE = 1024, 4096
LAYER = HIDDEN * (2 * HIDDEN + 2 * 64 + 3 * INTERMEDIATE)
"""Number of parameters in a layer, without the norms."""


def measure_held_bytes(device: torch.device) -> int:
    gc.collect()
    if device.type == "cuda":
        return torch.cuda.memory_allocated()
    line = next(entry for entry in Path("/proc/self/status").read_text().splitlines() if entry.startswith("RssAnon:"))
    return int(line.split()[1]) * 1024


def build_model(folder: Path, gb: float) -> None:
    from dsreason.models.tiny import build_tiny

    sizes = {"hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE, "num_layers": max(1, round(gb * 5e8 / LAYER))}
    build_tiny("qwen3_vl", folder, dtype=torch.bfloat16, num_key_value_heads=2, **sizes)


def measure(model: Path, lora_rank: int, ds_config: str, quantize: str | None) -> dict[str, float]:
    from dsreason.config.deepspeed import resolve_deepspeed
    from dsreason.config.schema import SFTConfig
    from dsreason.data.collate import collate
    from dsreason.data.types import Sample
    from dsreason.job.ranks import init_world
    from dsreason.losses.sft import compute_sft_loss
    from dsreason.monitor.flops import count_values
    from dsreason.train.common.opening import build_policy_engine
    from dsreason.train.common.preflight import build_encoder

    world = init_world()
    config = SFTConfig.model_validate(
        {"model": {"path": str(model), "quantize": quantize}, "lora": {"rank": lora_rank}, "deepspeed": ds_config}
    )
    encoder = build_encoder(config, model)
    turns = [{"role": "user", "content": "Which colour?"}, {"role": "assistant", "content": "red and blue"}]
    batch = collate([encoder.encode(Sample(id="0", messages=turns))], pad_id=encoder.pad_id)
    kind = "cuda" if world.device.type == "cuda" else "cpu"
    deepspeed = resolve_deepspeed(config.deepspeed, config, device=kind, world_size=world.size)
    before = measure_held_bytes(world.device)
    engine = build_policy_engine(config, deepspeed, model)
    for step in range(2):
        engine.set_gradient_accumulation_boundary(True)
        engine.backward(
            compute_sft_loss(engine(batch.to(engine.device)), num_tokens=len(batch.targets)), scale_wrt_gas=False
        )
        held = measure_held_bytes(world.device) - before
        if step == 0:
            engine.step()
    policy = engine.module
    sizes = [
        (count_values(policy, name, parameter), parameter.requires_grad)
        for name, parameter in policy.named_parameters()
    ]
    return {
        "bytes": held,
        "parameters": sum(size for size, _ in sizes),
        "trained": sum(size for size, is_trained in sizes if is_trained),
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=1.0, help="size of the weights, in 10^9 bytes")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--quantize", action="store_true", help="also measure adapters with model.quantize = nf4")
    parser.add_argument("--ds-config", default="zero3.json")
    parser.add_argument("--only", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--bits", help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    if arguments.only is not None:
        print(json.dumps(measure(arguments.model, arguments.only, arguments.ds_config, arguments.bits)))
        return
    held = {}
    with tempfile.TemporaryDirectory() as folder:
        build_model(Path(folder) / "model", arguments.gb)
        sides: list[tuple[str, int, list[str]]] = [("all weights", 0, []), ("adapters", arguments.rank, [])]
        if arguments.quantize:
            sides.append(("4 bits", arguments.rank, ["--bits", "nf4"]))
        for name, rank, more in sides:
            only = ["--only", str(rank), "--model", f"{folder}/model", *more]
            command = [sys.executable, __file__, *sys.argv[1:], *only]
            output = subprocess.run(
                command, check=True, text=True, stdout=subprocess.PIPE, env=build_environment()
            ).stdout
            result = json.loads(output.splitlines()[-1])
            held[name] = result["bytes"]
            print(
                f"{name:12} {result['bytes'] / 1e9:7.3f} GB, {result['bytes'] / result['parameters']:5.2f} bytes per parameter; "
                f"{result['trained'] / 1e6:.1f} of {result['parameters'] / 1e6:.1f} million are trained",
                flush=True,
            )
    print(f"adapters / all weights: {held['adapters'] / held['all weights']:.3f} (goal {GOAL})")
    if arguments.quantize:
        print(f"adapters on 4 bits / all weights: {held['4 bits'] / held['all weights']:.3f}")


def build_environment() -> dict[str, str]:
    root = str(Path(__file__).parents[1])
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # DeepSpeed searches PATH for ninja
    accelerator = {} if torch.cuda.is_available() else {"DS_ACCELERATOR": "cpu"}
    # Trim at once: otherwise, the allocator would keep freed memory, which would then be counted.
    return os.environ | accelerator | {"PATH": path, "PYTHONPATH": root, "MALLOC_TRIM_THRESHOLD_": "0"}


if __name__ == "__main__":
    main()
