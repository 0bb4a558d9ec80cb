"""Ranks whose micro-batches contain different kinds of media: ZeRO-3 gathers layers collectively, so all ranks must run the
same layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.distributed import run_on_ranks
from tests.integration.rows import write_mixed_rows
from tests.integration.test_grpo_gradients import made_up_rollouts, run_config

pytestmark = pytest.mark.integration


def grpo_gradient_norm(rows: str, model: str, with_remedy: bool) -> float:
    """Return the gradient norm of one step: rank 0 has only text, rank 1 an image and a video.

    Each rank has one micro-batch.
    """
    import torch

    from dsreason.config.deepspeed import resolve_deepspeed
    from dsreason.data.collate import collate
    from dsreason.data.micro_batches import cut_by_count
    from dsreason.job.ranks import init_world
    from dsreason.rollout.protocol import find_media_token_ids
    from dsreason.train.common.opening import build_policy_engine
    from dsreason.train.common.preflight import build_encoder
    from dsreason.train.grpo.rollouts import RolloutMicroBatch, build_training_sample
    from dsreason.train.grpo.update import accumulate_gradients, split_into_micro_batches
    from tests.engines import full_gradients

    world = init_world()
    config = run_config(rows, model, "grpo", {"micro_batch_size": 2})
    encoder = build_encoder(config, Path(model))
    deepspeed = resolve_deepspeed(config.deepspeed, config, device="cpu", world_size=world.size)
    engine = build_policy_engine(config, deepspeed, Path(model))
    custom = (0, 4) if world.rank == 0 else (1, 2)
    everyone = made_up_rollouts(config, encoder, 0, 1)
    rollouts = [everyone[3 * number] for number in custom]  # keeps only the first of the three rollouts of each prompt
    if with_remedy:
        micro_batches = split_into_micro_batches(rollouts, config, encoder)
    else:
        groups = cut_by_count([build_training_sample(rollout) for rollout in rollouts], 2)
        micro_batches = [
            RolloutMicroBatch(collate(group, pad_id=encoder.pad_id), [sample.rollout for sample in group])
            for group in groups
        ]
    banned = torch.tensor(find_media_token_ids(encoder.processor.tokenizer, encoder.family))
    accumulate_gradients(engine, micro_batches, config, world, banned)
    return float(np.sqrt(sum(float(grad.square().sum()) for grad in full_gradients(engine).values())))


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_mixed_rows(tmp_path_factory.mktemp("rows")))


def test_ranks_with_different_media_complete_step(rows: str, tiny_qwen3_vl: Path) -> None:
    first, second = run_on_ranks(grpo_gradient_norm, 2, rows, str(tiny_qwen3_vl), True)
    assert first == second > 1e-3


def test_missing_dummy_media_prevent_step(rows: str, tiny_qwen3_vl: Path) -> None:
    arguments: Any = (rows, str(tiny_qwen3_vl), False)
    with pytest.raises(AssertionError, match=r"rank \d of 2 failed|gave no result within|died without a word"):
        run_on_ranks(grpo_gradient_norm, 2, *arguments, timeout=60)
