"""The one place where rollout engines are built: vLLM's or plain transformers', for training and for answering."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dsreason.families import family_of
from dsreason.job.ranks import World
from dsreason.models.load import model_config
from dsreason.models.weights import find_weights
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
            load_weights(engine, path, loaded_version, trust_remote_code=trust_remote_code)
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


def load_weights(engine: RolloutEngine, model_path: Path, version: int, *, trust_remote_code: bool = False) -> None:
    """Wake the engine and give it the weights of a Hugging Face folder; every one is checked to arrive. Collective."""
    config = model_config(model_path, trust_remote_code=trust_remote_code)
    engine.wake()
    engine.sync(folder_weights(model_path, config), version)


def folder_weights(model_path: Path, config: Any) -> Iterator[tuple[str, Tensor]]:
    """Each tensor of the folder by its name in memory; an output matrix stored beside the embeddings it is tied to is
    left out."""
    family = family_of(config.model_type)
    weights = find_weights(model_path, family.rename)
    for name in weights.places:
        if config.tie_word_embeddings and name == f"{family.modules.head}.weight":
            continue
        found: dict[str, Tensor] = {}
        weights.read([name], found.__setitem__)
        yield name, found[name]
