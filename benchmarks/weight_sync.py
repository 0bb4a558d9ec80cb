"""Time to gather the policy's weights for the rollout engine, in buckets or with one `GatheredParameters` per parameter.

    python benchmarks/weight_sync.py [--layers 26] [--hidden 256] [--buckets 1 4 16 512] [--rounds 15] [--threshold 0]

Two real ranks, connected by gloo, hold a tiny Qwen3-VL under ZeRO-3, and the ways of gathering take turns (A B C … A B C …).
`gather` only iterates over the parameters; `sync` does the same as a training run: it copies the parameters into the model of the
transformers engine, which computes fingerprints of the received weights. Seconds are measured from barrier to barrier; the output
is the median of the rounds, and the fastest round, which other work on the machine disturbs least. `peak` is the maximum number
of bytes of partitioned parameters that are gathered at a time; `collectives` is the number that gloo counts.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from dsreason.job import launch

if TYPE_CHECKING:  # nothing may import torch before `launch.prepare_environment` runs
    from deepspeed import DeepSpeedEngine
    from torch import Tensor

    from dsreason.job.ranks import World
    from dsreason.rollout.transformers_engine import TransformersEngine

GOAL = 1.5
PLAIN = "one by one"

Weights = Iterator[tuple[str, "Tensor"]]


def iter_one_by_one(engine: DeepSpeedEngine) -> Weights:
    """Yield the weights as `iter_full_parameters` does, but gather each parameter in a separate context."""
    import deepspeed

    from dsreason.engine.engine import is_partitioned, to_hf_name

    for name, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter], enabled=is_partitioned(parameter)):
            yield to_hf_name(name), parameter.detach()


def build_engines(arguments: argparse.Namespace, world: World) -> tuple[DeepSpeedEngine, TransformersEngine]:
    import torch

    from dsreason.config.deepspeed import resolve_deepspeed
    from dsreason.config.schema import SFTConfig
    from dsreason.rollout.transformers_engine import TransformersEngine, TransformersSettings
    from dsreason.train.common.opening import build_policy_engine
    from dsreason.train.common.preflight import build_encoder

    config = SFTConfig.model_validate(
        {"model": {"path": str(arguments.model), "gradient_checkpointing": False}, "train": {"precision": "fp32"}}
    )
    deepspeed = resolve_deepspeed("zero3.json", config, device="cpu", world_size=world.size)
    deepspeed["zero_optimization"]["stage3_param_persistence_threshold"] = arguments.threshold
    engine = build_policy_engine(config, deepspeed, arguments.model)
    tokenizer = build_encoder(config, arguments.model).processor.tokenizer
    rollout = TransformersEngine(
        arguments.model, tokenizer, TransformersSettings(batch_size=1), dtype=torch.float32, device=world.device
    )
    rollout.wake()
    return engine, rollout


def inspect(engine: DeepSpeedEngine, weights: Weights) -> tuple[int, int]:
    """Iterate over the weights once; return this rank's number of collectives, and the peak bytes of gathered parameters."""
    import torch.distributed as dist

    partitioned = [p for p in engine.module.parameters() if p.numel() == 0]
    group = dist.distributed_c10d._get_default_group()
    before, peak = group._get_sequence_number_for_group(), 0
    for _ in weights:
        peak = max(peak, sum(p.numel() * p.element_size() for p in partitioned))
    return group._get_sequence_number_for_group() - before, peak


def measure_seconds(work: Callable[[], object]) -> float:
    from dsreason.job.ranks import wait_for_ranks

    wait_for_ranks()
    started = time.perf_counter()
    work()
    wait_for_ranks()
    return time.perf_counter() - started


def consume(weights: Iterable[object]) -> None:
    for _ in weights:
        pass


def run_rank(arguments: argparse.Namespace) -> None:
    from dsreason.engine.engine import iter_full_parameters
    from dsreason.job.ranks import init_world, shutdown

    world = init_world()
    engine, rollout = build_engines(arguments, world)
    walks: dict[str, Callable[[], Weights]] = {PLAIN: partial(iter_one_by_one, engine)}
    walks |= {f"{size:g} MiB": partial(iter_full_parameters, engine, size) for size in arguments.buckets}
    facts = {name: inspect(engine, walk()) for name, walk in walks.items()}
    gather: dict[str, list[float]] = {name: [] for name in walks}
    sync: dict[str, list[float]] = {name: [] for name in walks}
    for number in range(arguments.rounds):
        for name, walk in walks.items():
            gather[name].append(measure_seconds(lambda walk=walk: consume(walk())))
            sync[name].append(measure_seconds(lambda walk=walk, number=number: rollout.sync(walk(), number)))
    if world.is_main:
        count = sum(p.numel() == 0 for p in engine.module.parameters())
        size = sum(p.ds_numel * p.element_size() for p in engine.module.parameters()) / 2**20
        print(
            f"{count} partitioned tensors, {size:.1f} MiB in total, {world.size} ranks; load {os.getloadavg()[0]:.1f}"
        )
        report(facts, gather, sync)
    shutdown()


def report(facts: dict[str, tuple[int, int]], gather: dict[str, list[float]], sync: dict[str, list[float]]) -> None:
    ratios = {}
    for title, choose in (("medians", statistics.median), ("fastest", min)):
        print(f"{title:12}{'collectives':>12}{'peak MiB':>10}{'gather s':>10}{'ratio':>7}{'sync s':>9}{'ratio':>7}")
        plain = choose(gather[PLAIN]), choose(sync[PLAIN])
        for name, (collectives, peak) in facts.items():
            walked, synced = choose(gather[name]), choose(sync[name])
            ratios[title, name] = plain[0] / walked
            print(
                f"{name:12}{collectives:12}{peak / 2**20:10.2f}{walked:10.4f}{plain[0] / walked:7.2f}"
                f"{synced:9.4f}{plain[1] / synced:7.2f}"
            )
    name = max(facts, key=lambda name: ratios["medians", name])
    print(f"seconds one by one / in buckets of {name}: {ratios['medians', name]:.2f} (goal {GOAL})")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=26, help="number of layers, which have 11 tensors each")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--buckets", type=float, nargs="+", default=[1, 4, 16, 512], metavar="MIB")
    parser.add_argument("--threshold", type=int, default=0, help="parameters with fewer values are not partitioned")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    if launch.is_rank():
        launch.enter_rank()
        run_rank(arguments)
        return
    launch.prepare_environment()
    from dsreason.models.tiny import build_tiny

    with tempfile.TemporaryDirectory() as scratch:
        sizes = {"hidden_size": arguments.hidden, "num_layers": arguments.layers}
        model = build_tiny("qwen3_vl", Path(scratch) / "model", **sizes)
        command = [__file__, *sys.argv[1:], f"--model={model}"]
        launch.start_ranks(lambda attempt: command, ranks=2, log_dir=Path(scratch))


if __name__ == "__main__":
    main()
