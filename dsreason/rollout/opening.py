"""Function that opens a rollout engine for training or evaluation, based on vLLM or on plain transformers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from dsreason.job.ranks import World
from dsreason.rollout.protocol import RolloutEngine
from dsreason.rollout.transformers_engine import TransformersEngine, TransformersSettings
from dsreason.rollout.vllm_arguments import VLLMSettings

EngineSettings = VLLMSettings | TransformersSettings


@contextmanager
def open_rollout_engine(
    path: Path,
    tokenizer: PreTrainedTokenizerBase,
    world: World,
    settings: EngineSettings,
    *,
    dtype: torch.dtype,
    loaded_version: int | None = None,
    trust_remote_code: bool = False,
) -> Iterator[RolloutEngine]:
    """Open a rollout engine for the model folder `path`. All ranks must call this function together, after `init_world`.

    Args:
        settings: settings of the engine; their type selects vLLM or transformers.
        loaded_version: version number of the weights in the folder, with which the engine starts awake. If None, the engine
            starts asleep and without weights.
    """
    if isinstance(settings, TransformersSettings):
        device = world.device
        engine = TransformersEngine(
            path, tokenizer, settings, dtype=dtype, device=device, trust_remote_code=trust_remote_code
        )
        if loaded_version is not None:
            engine.load(loaded_version)
        yield engine
        return
    from dsreason.rollout.vllm_engine import VLLMEngine  # imported on demand, because this imports vLLM

    vllm = VLLMEngine(
        path,
        tokenizer,
        world,
        settings,
        dtype=dtype,
        loaded_version=loaded_version,
        trust_remote_code=trust_remote_code,
    )
    try:
        yield vllm
    finally:
        vllm.shutdown()
