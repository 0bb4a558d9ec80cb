"""Completions from a run's initial policy for a few rows, for `dsreason reward try`."""

from __future__ import annotations

from collections.abc import Sequence

from dsreason.checkpoints.shards import DTYPES
from dsreason.config.schema_grpo import GRPOConfig
from dsreason.data.types import Sample
from dsreason.job.gpu import choose_device
from dsreason.rollout.protocol import Completion
from dsreason.rollout.transformers_engine import TransformersEngine, TransformersSettings
from dsreason.train.common.answers import add_facts
from dsreason.train.common.preflight import check_model, find_model
from dsreason.train.grpo.preflight import build_prompt_encoder
from dsreason.train.grpo.sampling import build_sampling

VERSION = 0
"""Version of the weights, which do not change."""


def sample_completions(
    config: GRPOConfig, samples: Sequence[Sample], count: int
) -> list[list[tuple[Sample, Completion]]]:
    """Sample `count` completions per sample with `config.rollout`'s settings, in this process and with transformers.

    Each completion comes with its sample, to which `add_facts` has added what the rewards need.

    Raises:
        DsReasonError: the model cannot be loaded, or a prompt is too long for it.
    """
    encoder = build_prompt_encoder(config, check_model(config))
    prompts = [encoder.encode_prompt(sample) for sample in samples for _ in range(count)]
    engine = TransformersEngine(
        find_model(config),
        encoder.processor.tokenizer,
        TransformersSettings(attention=config.model.attention, batch_size=config.rollout.batch_size),
        dtype=DTYPES[config.train.precision],
        device=choose_device(0),
        trust_remote_code=config.model.trust_remote_code,
    )
    engine.load(VERSION)
    sampling = build_sampling(config.rollout, config.train.seed)
    completions = engine.generate(prompts, sampling, version=VERSION)
    pairs = [
        (add_facts(prompt, completion, sampling), completion)
        for prompt, completion in zip(prompts, completions, strict=True)
    ]
    return [pairs[i : i + count] for i in range(0, len(pairs), count)]
