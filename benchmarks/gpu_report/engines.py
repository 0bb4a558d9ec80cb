"""Measurements of vLLM next to a policy: memory handover, weight sync, state that sleep loses, and media processing."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from benchmarks.gpu_report.materials import (
    build_grpo_settings,
    build_random_model,
    build_tiny_model,
    check_fits,
    find_largest_size,
    write_rows,
)
from benchmarks.gpu_report.parts import BenchmarkSetup, SkipPart, Value
from benchmarks.gpu_report.timing import measure_seconds, sync_device
from benchmarks.gpu_report.training import count_parameters, train_on_a_clip

if TYPE_CHECKING:
    from vllm import LLM

    from dsreason.data.chat import EncodedPrompt, Encoder
    from dsreason.rollout.protocol import Completion
    from dsreason.rollout.sleep_state import SleepState
    from dsreason.rollout.vllm_engine import VLLMEngine
    from dsreason.train.common.sampler import Sampler

HOST_GIB_7B = 100
"""GiB of host memory for the weights, gradients and master weights of 7 billion parameters, including the rounding of pinned
blocks."""
ROUNDS = 3
PHASES = ("offload", "wake", "sync", "generate", "sleep", "reload")


@dataclass(frozen=True)
class Opened:
    """A policy and a sleeping engine, built as `dsreason grpo` builds them."""

    sampler: Sampler
    encoder: Encoder
    prompts: list[EncodedPrompt]
    """Three prompts: text only, text with a picture, and text with a clip."""

    def generate(self, engine: Any, version: int, *, times: int = 1, length: int = 16) -> list[Completion]:
        from dsreason.rollout.protocol import Sampling

        return engine.generate(
            self.prompts * times, Sampling(temperature=0, max_completion_length=length), version=version
        )


@contextmanager
def open_policy(
    setup: BenchmarkSetup, model: Path, deepspeed: str = "zero3.json", *, train: bool = True
) -> Iterator[Opened]:
    """Open a policy and an engine; if `train` is true, first run one training step to create the optimizer's moments."""
    from dsreason.config.deepspeed import resolve_deepspeed
    from dsreason.config.schema_grpo import GRPOConfig
    from dsreason.job.ranks import init_world, shutdown
    from dsreason.job.watchdog import Watchdog
    from dsreason.rollout.opening import open_rollout_engine
    from dsreason.train.common.opening import build_policy_engine
    from dsreason.train.common.preflight import DTYPES, build_encoder
    from dsreason.train.common.sampler import open_sampler
    from dsreason.train.grpo.build import build_engine_settings

    settings = build_grpo_settings(setup, model, prompts=1, generations=2, length=64)
    config = GRPOConfig.model_validate(settings)
    with ExitStack() as stack:
        world = init_world()
        stack.callback(shutdown)
        watchdog = stack.enter_context(Watchdog(world, time_limit=config.monitor.phase_time_limit))
        encoder = build_encoder(config, model)
        resolved = resolve_deepspeed(deepspeed, config, device=world.device.type, world_size=world.size)
        policy = build_policy_engine(config, resolved, model)
        if train:
            train_on_a_clip(policy, encoder)
        tokenizer, dtype = encoder.processor.tokenizer, DTYPES[config.train.precision]
        engine = open_rollout_engine(model, tokenizer, world, build_engine_settings(config, world), dtype=dtype)
        sampler = open_sampler(policy, engine, watchdog, stack)
        yield Opened(sampler, encoder, encode_prompts(setup, encoder))


def encode_prompts(setup: BenchmarkSetup, encoder: Encoder) -> list[EncodedPrompt]:
    from dsreason.config.schema import SFTConfig
    from dsreason.data.sources import open_datasets

    data = {"adapter": "jsonl", "path": str(write_rows(setup, 24)), "vision": {"fps": 4.0}}
    samples, _ = open_datasets(SFTConfig.model_validate({"data": data}).data)
    return [encoder.encode_prompt(samples[i]) for i in range(3)]


# ---------------------------------------------------------------- memory and sync


def measure_ledger(setup: BenchmarkSetup, *, size: str) -> Iterator[tuple[str, Value]]:
    """Hand memory over for three rollouts; the seconds are the minimum over all rollouts but the first, which is a warm-up."""
    model = build_random_model(setup, check_fits(setup, size))
    large = size == "7B"
    started = time.perf_counter()
    with open_policy(setup, model, "zero3_offload.json" if large else "zero3.json", train=not large) as run:
        yield "policy and engine built, s", time.perf_counter() - started
        yield "parameters, billions", count_parameters(run.sampler.policy) / 1e9
        ledgers = []
        for version in range(ROUNDS):
            with run.sampler.awake(version) as engine:
                run.generate(engine, version, times=1 if setup.tiny else 8)
            ledgers.append(run.sampler.memory.take())
        yield "first wake + sync, s", ledgers[0]["memory/wake/seconds"] + ledgers[0]["memory/sync/seconds"]
        for phase in PHASES:
            yield f"{phase}, s", min(values[f"memory/{phase}/seconds"] for values in ledgers[1:])
        yield "wake + sync, s", min(v["memory/wake/seconds"] + v["memory/sync/seconds"] for v in ledgers[1:])
        if setup.cards:
            yield from measure_memory(ledgers[-1])


def measure_memory(values: dict[str, float]) -> Iterator[tuple[str, Value]]:
    """Yield the device memory that the driver reports after each phase of a rollout, and the fraction of the rollout's memory
    that sleep releases."""
    import torch

    device_gib = {phase: values[f"memory/{phase}/device_gib"] for phase in PHASES}
    yield from ((f"device after {phase}, GiB", gib) for phase, gib in device_gib.items())
    yield (
        "given back by sleep / taken by wake, sync and generate",
        ((device_gib["generate"] - device_gib["sleep"]) / (device_gib["generate"] - device_gib["offload"])),
    )
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    outside_torch = total - free - torch.cuda.memory_reserved()
    yield "device left beside torch's own while asleep, GiB", outside_torch / 2**30


ledger_05b = partial(measure_ledger, size="0.5B")
ledger_2b = partial(measure_ledger, size="2B")


def ledger_7b(setup: BenchmarkSetup) -> Iterator[tuple[str, Value]]:
    from dsreason.monitor.memory import count_available_bytes

    available = count_available_bytes() / 2**30
    if not setup.tiny and available < HOST_GIB_7B:
        raise SkipPart(
            f"7B parameters need {HOST_GIB_7B} GiB of host memory, but only {available:.0f} GiB are available"
        )
    yield from measure_ledger(setup, size="7B")


def sync(setup: BenchmarkSetup) -> Iterator[tuple[str, Value]]:
    """Time the sync for several bucket sizes and, for comparison, a copy of the same number of bytes on the device."""
    with open_policy(setup, build_random_model(setup, find_largest_size(setup)), train=False) as run:
        size = sum(2 * shape.numel() for shape in run.sampler.rollout.expected.values())
        yield "weights, GB", size / 1e9
        copied = time_device_copy(size, setup.device)
        yield "device copy, s", copied
        yield "device copy, GB/s", size / copied / 1e9
        version = 0
        for bucket in (512.0, 64.0, 2048.0):
            sampler, seconds = replace(run.sampler, bucket_mb=bucket), []
            for _ in range(2):
                version += 1
                with sampler.awake(version):
                    pass
                seconds.append(sampler.memory.take()["memory/sync/seconds"])
            yield f"buckets of {bucket:.0f} MiB: sync, s", min(seconds)
            yield f"buckets of {bucket:.0f} MiB: GB/s", size / min(seconds) / 1e9
            yield f"buckets of {bucket:.0f} MiB: sync / device copy", min(seconds) / copied


def time_device_copy(size: int, device: str) -> float:
    """Return how many seconds it takes to copy `size` bytes on the device."""
    import torch

    source, target = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))
    return measure_seconds(lambda: target.copy_(source))


# ---------------------------------------------------------------- what sleep loses

GARBAGE = (255, 127)
"""Byte values to fill memory with: 255 yields NaN and negative integers; 127, numbers too large for sums and indices."""


def check_state_poison(setup: BenchmarkSetup, *, family: str) -> Iterator[tuple[str, Value]]:
    """Check that answers do not change if the memory that vLLM gets back contains other code's data or garbage."""
    from dsreason.rollout.sleep_state import DROPPED

    with open_policy(replace(setup, tiny=True), build_tiny_model(setup, family), train=False) as run:
        engine = run.sampler.rollout
        before = generate_answers(run, 1)
        fill_free_memory(setup)
        yield "same answers after others have used the memory", generate_answers(run, 2) == before
        state = read_state(engine)
        for tag in DROPPED:
            size = sum(part.nbytes for part in state.memory.get(tag, []))
            yield f"{tag}: bytes that vLLM does not write back", size
        yield "tensors that dsreason does not write back either", count_unknown(state, engine.state)
        for version, byte in enumerate(GARBAGE, start=3):
            with fill_with_garbage(engine.llm, state, byte):
                yield f"same answers after memory full of {byte}", generate_answers(run, version) == before


state_poison_qwen2_5_vl = partial(check_state_poison, family="qwen2_5_vl")
state_poison_qwen3_vl = partial(check_state_poison, family="qwen3_vl")


def read_state(engine: VLLMEngine) -> SleepState:
    """Return the state that vLLM's pools hold after generation; on a CPU, which has no pools, it is empty."""
    from dsreason.rollout.sleep_state import find_pools, find_sleep_state

    (runner,) = engine.llm.collective_rpc(lambda worker: worker.model_runner)
    return find_sleep_state(runner, find_pools())


def count_unknown(state: SleepState, known: SleepState) -> int:
    places = {part.data_ptr() for memory in known.memory.values() for part in memory}
    return sum(part.data_ptr() not in places for memory in state.memory.values() for part in memory)


@contextmanager
def fill_with_garbage(llm: LLM, state: SleepState, byte: int) -> Iterator[None]:
    """Inside the block, fill a pool's memory with garbage once vLLM has mapped it again, before anything is written back."""
    wake_up = llm.wake_up

    def wake_with_garbage(tags: list[str]) -> None:
        wake_up(tags=tags)
        for tag in tags:
            for part in state.memory.get(tag, []):
                part.fill_(byte)

    with mock.patch.object(llm, "wake_up", wake_with_garbage):
        yield


def generate_answers(run: Opened, version: int) -> list[tuple[Any, ...]]:
    """Run a round of wake, sync, generate and sleep, and return its greedy completions.

    The prompt without media comes first, in a separate batch: a picture's data in the same batch would hide the garbage.
    """
    from dsreason.engine.engine import iter_full_parameters

    engine = run.sampler.rollout
    engine.wake()
    engine.sync(iter_full_parameters(run.sampler.policy), version)
    completions = [
        completion for prompt in run.prompts for completion in replace(run, prompts=[prompt]).generate(engine, version)
    ]
    engine.sleep()
    return [(completion.ids, [round(value, 3) for value in completion.logprobs]) for completion in completions]


def fill_free_memory(setup: BenchmarkSetup) -> None:
    """Fill all but one GiB of the device's free memory with NaN, and free it."""
    import torch

    if not setup.cards:
        return
    torch.cuda.empty_cache()
    count = torch.cuda.mem_get_info()[0] // 2**30 - 1
    junk = [torch.full((2**29,), torch.nan, device="cuda", dtype=torch.bfloat16) for _ in range(count)]
    sync_device()
    del junk
    torch.cuda.empty_cache()


# ---------------------------------------------------------------- media


def processor(setup: BenchmarkSetup) -> Iterator[tuple[str, Value]]:
    """Time vLLM alone as it completes a prompt with a clip. Without a cache, every completion processes the clip again."""
    import numpy as np

    llm = start_llm(setup)
    from vllm import SamplingParams

    frames, height, width = (8, 64, 64) if setup.tiny else (60, 240, 320)
    clip = np.random.default_rng(0).integers(0, 255, (frames, height, width, 3), dtype=np.uint8)
    metadata = {"fps": 1.0, "duration": float(frames), "total_num_frames": frames, "do_sample_frames": False}
    metadata |= {"frames_indices": list(range(frames)), "video_backend": "none"}
    text = "<|vision_start|><|video_pad|><|vision_end|>What moves?"
    prompt = {"prompt": text, "multi_modal_data": {"video": [(clip, metadata)]}}

    def clear_caches() -> None:
        llm.reset_mm_cache()
        llm.reset_prefix_cache()

    def time_completions(times: int, length: int = 1) -> float:
        started = time.perf_counter()
        llm.generate([prompt] * times, SamplingParams(max_tokens=length, ignore_eos=True), use_tqdm=False)
        return time.perf_counter() - started

    time_completions(1)
    for times in (1, 2) if setup.tiny else (1, 8, 64):
        clear_caches()
        yield f"{times} completions of a prompt that is new, s", time_completions(times)
        yield f"{times} completions of a prompt that is known, s", time_completions(times)
    times, length = (2, 8) if setup.tiny else (64, 128)
    yield f"{times} completions of {length} tokens: tokens/s", times * length / time_completions(times, length)


def start_llm(setup: BenchmarkSetup) -> LLM:
    """Start vLLM with a tiny model and a processor cache, which `reset_mm_cache` empties."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    if not setup.cards:
        os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    from vllm import LLM

    return LLM(
        str(build_tiny_model(setup)),
        dtype="bfloat16",
        max_model_len=4096,
        enforce_eager=True,
        mm_processor_cache_gb=4,
        gpu_memory_utilization=0.4,
    )
