"""Training's use of a device, step by step.

Each function runs in a separate process, on whatever device that process has.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

TEMPERATURE = 0.9


def start(folder: str | None) -> None:
    """First thing in a process: with a `folder` to compile it in, it has the stand-in for a GPU."""
    import sys

    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["DS_ACCELERATOR"] = "cuda" if folder else "cpu"
    if folder:
        from tests.stand_in import device

        device.install(Path(folder))
    import torch

    torch.set_num_threads(1)


def counted(scenario: Callable[..., Any], *args: Any) -> tuple[Any, list[str]]:
    """The result, and every mixed operation on the way."""
    from tests.stand_in import device

    with device.noting() as mixed:
        result = scenario(*args)
    return result, list(mixed)


def refused() -> dict[str, bool]:
    """Return, by expression, whether it is rejected.

    `here` is on the device of this process, `cpu` on the CPU; each has six values.
    """
    import torch

    cpu, place = torch.arange(6.0), torch.tensor([1, 4])
    values = {"here": cpu.to("cuda"), "at": place.to("cuda"), "cpu": cpu, "place": place, "torch": torch}
    expressions = (
        *("here + 1", "here * cpu[2]", "here[place]", "here[at]", "here.to('cpu') + cpu", "here.cpu()[place]"),
        *("here.index_put((place,), cpu[2])", "here.clone().copy_(cpu)", "torch.cat([here, here])"),
        *(
            "here + cpu",
            "cpu + here",
            "cpu[at]",
            "here.index_put((at,), cpu[:2])",
            "cpu.clone().index_put_((place,), here[:2])",
        ),
        *(
            "torch.cat([here, cpu])",
            "torch.stack([here[0], cpu[0]])",
            "torch.where(here > 1, here, cpu)",
            "here.gather(0, place)",
        ),
        *("torch.nn.functional.linear(here, cpu)", "torch.isin(here, cpu)", "here.clone().add_(cpu)"),
    )
    result = {}
    for expression in expressions:
        try:
            eval(expression, values)
            result[expression] = False
        except RuntimeError:
            result[expression] = True
    return result


def plant(fault: str, scenario: Callable[..., Any], *args: Any) -> str:
    """The error that the scenario ends with when a fault is planted."""
    from unittest import mock

    import torch

    from dsreason.engine import engine
    from dsreason.train.grpo import update

    def flat_on_the_cpu(rollouts: Any, device: Any) -> Any:
        return flatten(rollouts, torch.device("cpu"))

    flatten = update.flatten
    faults = {
        "buffers stay behind": mock.patch.object(engine, "place_buffers", lambda module, device: None),
        "a tensor made without a device": mock.patch.object(update, "flatten", flat_on_the_cpu),
    }
    with faults[fault]:
        try:
            scenario(*args)
        except RuntimeError as error:
            return str(error)
    return "no error"


# ---------------------------------------------------------------- the policy in its DeepSpeed engine


def build(model: str, attention: str, settings: dict[str, Any]) -> Any:
    """(world, config, encoder, engine), as a run builds them."""
    from dsreason.config.deepspeed import resolve_deepspeed
    from dsreason.config.schema_grpo import GRPOConfig
    from dsreason.job.ranks import init_world
    from dsreason.train.common.opening import build_policy_engine
    from dsreason.train.common.preflight import build_encoder

    world = init_world()
    config = GRPOConfig.model_validate(
        {
            "model": {"path": model, "attention": attention, "fused_kernels": False},
            "train": {"precision": "fp32", "micro_batch_size": 3},
            "rollout": {"temperature": TEMPERATURE, "max_completion_length": 6},
            "reward": {"functions": {"format": 1.0}},
            **settings,
        }
    )
    deepspeed = resolve_deepspeed(config.deepspeed, config, device=world.device.type, world_size=world.size)
    engine = build_policy_engine(config, deepspeed, Path(model))
    return world, config, build_encoder(config, Path(model)), engine


def policy(model: str, attention: str, deepspeed: str = "zero3.json") -> dict[str, Any]:
    """Forward, backward, a step; then its state away and back, another policy in its place, and its weights' fingerprints."""
    import torch

    from dsreason.data.collate import collate
    from dsreason.engine.engine import get_grad_norm, iter_full_parameters
    from dsreason.engine.offload import StateOffload
    from dsreason.engine.reference import ReferencePolicy
    from dsreason.losses.sft import compute_sft_loss
    from dsreason.rollout.weight_sync import WeightStream, compute_fingerprints
    from tests.engines import full_gradients

    world, _, encoder, engine = build(model, attention, {"deepspeed": deepspeed})
    samples = [encoder.build_dummy("image"), encoder.build_dummy("video")]
    samples = [replace(s, loss_mask=torch.arange(len(s)) >= len(s) - 3 - i, id=str(i)) for i, s in enumerate(samples)]
    batch = collate(samples, pad_id=0).to(engine.device)
    banned = torch.tensor([1, 2], device=engine.device)

    def look() -> list[float]:
        with torch.no_grad():
            return engine(batch, TEMPERATURE, banned).tolist()

    def step() -> float:
        engine.set_gradient_accumulation_boundary(True)
        engine.backward(compute_sft_loss(engine(batch, TEMPERATURE, banned), num_tokens=7), scale_wrt_gas=False)
        recorded["squared gradient"] = sum(float(g.double().square().sum()) for g in full_gradients(engine).values())
        engine.step()
        return get_grad_norm(engine)

    recorded: dict[str, Any] = {"device": engine.device.type, "first": look()}
    reference, offload = ReferencePolicy(engine), StateOffload(engine)
    recorded["norm"] = step()
    recorded["second"] = look()
    offload.offload()
    recorded["moved"] = len(offload.away) + len(offload.dropped)
    offload.reload()
    with reference.in_place():
        recorded["reference"] = look()
    recorded["norm after the trip"] = step()
    recorded["third"] = look()
    weights = dict(iter_full_parameters(engine))
    shapes = {name: tensor.shape for name, tensor in weights.items()}
    sending = WeightStream(iter_full_parameters(engine), shapes, torch.float32, engine.device)
    sending.read_remaining()
    sending.finish()
    recorded["fingerprints"] = {name: numbers.tolist() for name, numbers in sending.fingerprints.items()}
    recorded["same fingerprints"] = {
        name: numbers.tolist() for name, numbers in compute_fingerprints(weights.items()).items()
    } == recorded["fingerprints"]
    recorded["buffers"] = sorted({f"{buffer.device.type} {buffer.dtype}" for buffer in engine.module.buffers()})
    return recorded


def drawing(model: str, attention: str, share: float = 1.0) -> list[Any]:
    """Tokens and log-probabilities drawn with every setting that changes a distribution.

    `share` of the weights have room on the device; the others stay in their files.
    """
    import torch

    from dsreason.config.schema import SFTConfig
    from dsreason.job.ranks import init_world
    from dsreason.models import placement
    from dsreason.rollout.protocol import Sampling
    from dsreason.rollout.transformers_engine import draw_tokens
    from dsreason.train.common.preflight import build_encoder

    device = init_world().device
    encoder = build_encoder(SFTConfig(), Path(model))
    full, _ = placement.build_checked_model(Path(model), dtype=torch.float32)
    size = sum(parameter.nbytes for parameter in full.parameters())
    placement.compute_budget = lambda device: int(share * size)
    copy = placement.load_where_it_fits(Path(model), dtype=torch.float32, device=device, attention=attention)
    assert any(parameter.is_meta for parameter in copy.parameters()) == (share < 1)
    image, video = encoder.build_dummy("image"), encoder.build_dummy("video")
    settings = (
        Sampling(temperature=0, max_completion_length=4),
        Sampling(temperature=1.3, top_p=0.8, top_k=40, max_completion_length=4, seed=3),
        Sampling(repetition_penalty=1.2, presence_penalty=0.1, frequency_penalty=0.2, max_completion_length=4),
    )
    result = []
    for sampling in settings:
        steps = draw_tokens(
            copy,
            [image, video, image],
            [0, 1, 2],
            sampling,
            banned_ids=torch.tensor([5, 6], device=device),
            stop_ids=torch.tensor([7], device=device),
        )
        result += [(token.tolist(), logprob.tolist()) for token, logprob in steps]
    return result


# ---------------------------------------------------------------- GRPO's update


def update(model: str, attention: str, rows: str, algorithms: list[dict[str, Any]]) -> list[dict[str, float]]:
    """Return the metrics of each algorithm's update and its gradient norm.

    The completions are of text, an image and a video.
    """
    import torch

    from dsreason.config.schema_data import DataConfig
    from dsreason.data.sources import open_datasets
    from dsreason.engine.engine import get_grad_norm, set_learning_rate
    from dsreason.engine.reference import ReferencePolicy
    from dsreason.rollout.protocol import find_media_token_ids, make_single_turn
    from dsreason.train.grpo.rollouts import Rollout
    from dsreason.train.grpo.update import accumulate_gradients, add_fixed_logprobs, split_into_micro_batches

    world, config, encoder, engine = build(model, attention, {})
    set_learning_rate(engine, 0.0)
    reference = ReferencePolicy(engine)
    data = DataConfig(adapter="jsonl", path=rows, vision={"fps": 4.0})
    training, _ = open_datasets(data)
    prompts = [encoder.encode_prompt(training[i]) for i in range(3)]
    rollouts = [
        Rollout(prompt, make_single_turn(ids, "", (-6.0,) * len(ids), "stop", 0), 0.0, {}, advantage)
        for prompt in prompts
        for ids, advantage in (((40, 41, 42), 0.7), ((50, 51), -0.7))
    ]
    banned = torch.tensor(find_media_token_ids(encoder.processor.tokenizer, encoder.family), device=world.device)
    result = []
    for algorithm in algorithms:
        changed = config.model_copy(update={"grpo": config.grpo.model_validate(algorithm)})
        micro_batches = split_into_micro_batches(rollouts, changed, encoder)
        against = reference if algorithm["kl_coef"] else None
        (micro_batches,) = add_fixed_logprobs([micro_batches], engine, against, None, changed, banned)
        metrics, _ = accumulate_gradients(engine, micro_batches, changed, world, banned)
        engine.step()
        result.append({**metrics, "norm": get_grad_norm(engine)})
    return result


def objectives() -> list[tuple[float, ...]]:
    """Loss, clipped tokens and gradient of every preset with every correction and KL."""
    from typing import get_args

    import torch

    from dsreason.config.schema_grpo import AlgorithmConfig
    from dsreason.job.ranks import init_world
    from dsreason.losses.objective import build_objective
    from dsreason.losses.policy import GlobalCounts, LossInputs

    device = init_world().device
    random = torch.Generator().manual_seed(0)
    logprobs = -torch.rand(12, generator=random)
    old, ref, engines = (logprobs + 0.1 * torch.randn(12, generator=random) for _ in range(3))
    advantages, entropy = torch.randn(12, generator=random), torch.rand(12, generator=random)
    old, ref, engines, advantages, entropy = (t.to(device) for t in (old, ref, engines, advantages, entropy))
    sequence = torch.tensor([0] * 5 + [1] * 7, device=device)
    counts = GlobalCounts(num_tokens=12, num_sequences=2, max_length=16)
    choices = {
        name: get_args(AlgorithmConfig.model_fields[name].annotation)
        for name in ("preset", "correction", "kl_estimator")
    }
    actual = []
    for preset, correction, estimator in product(*choices.values()):
        config = AlgorithmConfig(
            preset=preset, correction=correction, kl_estimator=estimator, kl_coef=0.1, entropy_coef=0.01
        )
        objective = build_objective(config)
        leaf = logprobs.clone().to(device).requires_grad_()
        weights = None if objective.correction is None else objective.correction(old - engines, sequence)
        penalty = objective.compute_penalty(leaf, ref, old, entropy)
        result = objective.loss(LossInputs(leaf, old, advantages, sequence, counts, weights, penalty))
        result.loss.backward()
        actual.append((result.loss.item(), float(result.clipped.sum()), float(leaf.grad.double().square().sum())))
    return actual


# ---------------------------------------------------------------- whole runs


def run(folder: str, command: str, output_dir: str, options: list[str]) -> list[dict[str, float]]:
    """`dsreason <command>` in this process; returns the lines of metrics.jsonl."""
    import json
    from unittest import mock

    from dsreason.config.load import load_config
    from dsreason.config.schema import SFTConfig
    from dsreason.config.schema_grpo import GRPOConfig
    from dsreason.train.common import job
    from dsreason.train.grpo import loop as grpo
    from dsreason.train.sft import loop as sft

    here = Path.cwd()
    os.chdir(folder)
    try:
        schema, train = {"sft": (SFTConfig, sft.run), "grpo": (GRPOConfig, grpo.run)}[command]
        config = load_config(schema, Path(f"{command}.toml"), options, default_recipe="")
        with mock.patch.object(job, "shutdown"):  # the process goes on, and DeepSpeed joins a job only once
            train(config, output_dir=Path(output_dir))
    finally:
        os.chdir(here)
    return [json.loads(line) for line in (Path(folder) / output_dir / "metrics.jsonl").read_text().splitlines()]
