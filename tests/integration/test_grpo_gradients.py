"""The same rollouts give the same policy gradient however they are cut over ranks and micro-batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.distributed import run_on_ranks
from tests.integration.rows import write_mixed_rows
from tests.integration.test_gradient_invariance import Gradients, worst_difference

pytestmark = pytest.mark.integration

PRESETS = ("grpo", "dr_grpo", "gspo")
LENGTHS = (3, 7, 1, 5, 8, 2, 6, 4)


def run_config(rows: str, model: str, preset: str, train: dict[str, Any]) -> Any:
    from dsreason.config.schema import GRPOConfig

    return GRPOConfig.model_validate(
        {
            "model": {"path": model, "gradient_checkpointing": False},
            "data": {"adapter": "jsonl", "path": rows, "workers": 0, "vision": {"fps": 4.0}},
            "train": {"precision": "fp32", **train},
            "grpo": {"preset": preset, "num_generations": 2, "prompts_per_step": 4},
            "rollout": {"max_completion_length": 8, "temperature": 0.9},
            "reward": {"functions": {"exact_match": 1.0}},
        }
    )


def made_up_rollouts(config: Any, encoder: Any, rank: int, size: int) -> list[Any]:
    """One completion for each of the eight rows, of made-up ids, log-probabilities and advantages."""
    from dsreason.data.sources import open_datasets
    from dsreason.rollout.protocol import Completion
    from dsreason.train.rollouts import Rollout

    rows, _ = open_datasets(config.data)
    random, found = np.random.default_rng(0), []
    for i, length in enumerate(LENGTHS):
        ids = tuple(random.integers(5, 60, length).tolist())
        logprobs = tuple(random.normal(-5, 1.0, length).tolist())
        completion = Completion(ids, "", logprobs, "stop", 0)
        found.append(Rollout(encoder.encode_prompt(rows[i]), completion, 0.0, {}, float(random.normal())))
    return found[rank::size]


def policy_gradients(rows: str, model: str, cuts: list[dict[str, Any]]) -> dict[tuple[str, int], Gradients] | None:
    """By preset and number of the cut, on rank 0."""
    from dsreason.config.deepspeed import resolve_deepspeed
    from dsreason.data.micro_batches import align_micro_batches, cut_by_count
    from dsreason.rollout.protocol import media_token_ids
    from dsreason.runtime.engine import full_gradients, set_learning_rate
    from dsreason.runtime.world import gather_objects, init_world
    from dsreason.train.build import build_policy_engine
    from dsreason.train.grpo import accumulate_gradients
    from dsreason.train.preflight import build_encoder
    from dsreason.train.rollouts import training_sample

    world, found = init_world(), {}
    engine = None
    for preset in PRESETS:
        for number, cut in enumerate(cuts):
            config = run_config(rows, model, preset, cut)
            encoder = build_encoder(config, Path(model))
            if engine is None:
                deepspeed = resolve_deepspeed(config.deepspeed, config, device="cpu", world_size=world.size)
                engine = build_policy_engine(config, deepspeed, Path(model))
                set_learning_rate(engine, 0.0)
            rollouts = made_up_rollouts(config, encoder, world.rank, world.size)
            samples = [training_sample(rollout, i) for i, rollout in enumerate(rollouts)]
            batches = align_micro_batches(cut_by_count(samples, cut["micro_batch_size"]), encoder, gather_objects)
            banned = torch.tensor(media_token_ids(encoder.processor.tokenizer))
            accumulate_gradients(engine, batches, rollouts, None, config, world, banned)
            found[preset, number] = {name: grad.numpy() for name, grad in full_gradients(engine).items()}
            engine.step()
    return found if world.is_main else None


@pytest.fixture(scope="module")
def gradients(tmp_path_factory: pytest.TempPathFactory, tiny_qwen3_vl: Path) -> dict[str, list[Gradients]]:
    """By preset: 1 rank with micro-batches of 8, 1 and 3, 2 ranks with 2, 4 ranks with 2."""
    rows = str(write_mixed_rows(tmp_path_factory.mktemp("rows")))
    cuts = {1: [8, 1, 3], 2: [2], 4: [2]}
    found: dict[str, list[Gradients]] = {preset: [] for preset in PRESETS}
    for ranks, sizes in cuts.items():
        settings = [{"micro_batch_size": size} for size in sizes]
        measured = run_on_ranks(policy_gradients, ranks, rows, str(tiny_qwen3_vl), settings)[0]
        for (preset, _), grads in measured.items():
            found[preset].append(grads)
    return found


@pytest.mark.parametrize("preset", PRESETS)
def test_the_policy_gradient_does_not_depend_on_the_cut(gradients: dict[str, list[Gradients]], preset: str) -> None:
    whole, *others = gradients[preset]
    assert len(others) == 4
    assert np.sqrt(sum(np.sum(grad**2) for grad in whole.values())) > 1e-3
    for other in others:
        assert worst_difference(other, whole) <= 1e-5


def test_presets_have_gradients_of_their_own(gradients: dict[str, list[Gradients]]) -> None:
    grpo, dr_grpo, gspo = (gradients[preset][0] for preset in PRESETS)
    assert worst_difference(dr_grpo, grpo) > 1e-2
    assert worst_difference(gspo, grpo) > 1e-2
