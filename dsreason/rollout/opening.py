"""The one place where rollout engines are built: vLLM's or plain transformers', for training and for answering."""

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
    """The engine that the settings are of, for a model folder. All ranks open it together, after `init_world`.

    Asleep and without weights, or with a `loaded_version` awake with those of the folder.
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
    from dsreason.rollout.vllm_engine import VLLMEngine  # only where it is used: it imports vLLM

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
