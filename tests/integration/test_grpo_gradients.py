"""The same rollouts give the same policy gradient however they are cut over ranks and micro-batches."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.distributed import run_on_ranks
from tests.integration.rows import write_mixed_rows
from tests.integration.test_gradient_invariance import Gradients, worst_difference

pytestmark = pytest.mark.integration

VARIANTS: dict[str, dict[str, Any]] = {
    "grpo": {"preset": "grpo", "kl_coef": 0.0},
    "dr_grpo": {"preset": "dr_grpo"},
    "dapo": {"preset": "dapo", "correction": "sequence_mask", "correction_high": 1e9},
    "gspo": {"preset": "gspo"},
    "cispo": {"preset": "cispo", "correction": "none"},
    "kl": {"preset": "grpo", "kl_coef": 0.5, "dual_clip": 3.0},
    "kl_k2": {"preset": "dapo", "kl_coef": 0.5, "kl_estimator": "k2"},
    "kl_bias_corrected": {"preset": "dapo", "kl_coef": 0.5, "kl_estimator": "bias_corrected_k3"},
    "entropy": {"preset": "grpo", "kl_coef": 0.0, "entropy_coef": 0.5},
}
LENGTHS = (3, 7, 1, 5, 8, 2, 6, 4)


def run_config(rows: str, model: str, variant: str, train: dict[str, Any]) -> Any:
    from dsreason.config.schema_grpo import GRPOConfig

    return GRPOConfig.model_validate(
        {
            "model": {"path": model, "gradient_checkpointing": False},
            "data": {"adapter": "jsonl", "path": rows, "workers": 0, "vision": {"fps": 4.0}},
            "train": {"precision": "fp32", **train},
            "grpo": {"num_generations": 2, "prompts_per_step": 4, **VARIANTS[variant]},
            "rollout": {"max_completion_length": 8, "temperature": 0.9},
            "reward": {"functions": {"exact_match": 1.0}},
        }
    )


def made_up_rollouts(config: Any, encoder: Any, rank: int, size: int) -> list[Any]:
    """One completion for each of the eight rows, of made-up ids, log-probabilities and advantages."""
    from dsreason.data.sources import open_datasets
    from dsreason.rollout.protocol import Completion
    from dsreason.train.grpo.rollouts import Rollout

    rows, _ = open_datasets(config.data)
    random, found = np.random.default_rng(0), []
    for i, length in enumerate(LENGTHS):
        ids = tuple(random.integers(5, 60, length).tolist())
        logprobs = tuple(random.normal(-5, 1.0, length).tolist())
        completion = Completion(ids, "", logprobs, "stop", 0)
        found.append(Rollout(encoder.encode_prompt(rows[i]), completion, 0.0, {}, float(random.normal())))
    return found[rank::size]


def other_logprobs(micro_batch: Any, distance: float) -> torch.Tensor:
    """Made-up log-probabilities of another policy: they depend on the completion alone."""
    rows = [np.sin(np.asarray(rollout.completion.ids)) * distance - 4.5 for rollout in micro_batch.rollouts]
    return torch.from_numpy(np.concatenate([*rows, []]).astype(np.float32))


def policy_gradients(rows: str, model: str, cuts: list[dict[str, Any]]) -> dict[tuple[str, int], Gradients] | None:
    """By variant and number of the cut, on rank 0."""
    from dsreason.config.deepspeed import resolve_deepspeed
    from dsreason.engine.engine import set_learning_rate
    from dsreason.job.ranks import init_world
    from dsreason.rollout.protocol import media_token_ids
    from dsreason.train.common.opening import build_policy_engine
    from dsreason.train.common.preflight import build_encoder
    from dsreason.train.grpo.update import accumulate_gradients, cut
    from tests.engines import full_gradients

    world, found = init_world(), {}
    engine = None
    for variant in VARIANTS:
        for number, settings in enumerate(cuts):
            config = run_config(rows, model, variant, settings)
            encoder = build_encoder(config, Path(model))
            if engine is None:
                deepspeed = resolve_deepspeed(config.deepspeed, config, device="cpu", world_size=world.size)
                engine = build_policy_engine(config, deepspeed, Path(model))
                set_learning_rate(engine, 0.0)
            micro_batches = cut(made_up_rollouts(config, encoder, world.rank, world.size), config, encoder)
            micro_batches = [replace(one, old_logprobs=other_logprobs(one, 0.1)) for one in micro_batches]
            if variant.startswith("kl"):
                micro_batches = [replace(one, ref_logprobs=other_logprobs(one, 0.5)) for one in micro_batches]
            banned = torch.tensor(media_token_ids(encoder.processor.tokenizer, encoder.family))
            accumulate_gradients(engine, micro_batches, config, world, banned)
            found[variant, number] = {name: grad.numpy() for name, grad in full_gradients(engine).items()}
            engine.step()
    return found if world.is_main else None


@pytest.fixture(scope="module")
def gradients(tmp_path_factory: pytest.TempPathFactory, tiny_qwen3_vl: Path) -> dict[str, list[Gradients]]:
    """By variant: 1 rank with micro-batches of 8, 1 and 3, 2 ranks with 2 and 3."""
    rows = str(write_mixed_rows(tmp_path_factory.mktemp("rows")))
    cuts = {1: [8, 1, 3], 2: [2, 3]}
    found: dict[str, list[Gradients]] = {variant: [] for variant in VARIANTS}
    for ranks, sizes in cuts.items():
        settings = [{"micro_batch_size": size} for size in sizes]
        measured = run_on_ranks(policy_gradients, ranks, rows, str(tiny_qwen3_vl), settings)[0]
        for (variant, _), grads in measured.items():
            found[variant].append(grads)
    return found


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_policy_gradient_does_not_depend_on_the_cut(gradients: dict[str, list[Gradients]], variant: str) -> None:
    whole, *others = gradients[variant]
    assert len(others) == 4
    assert np.sqrt(sum(np.sum(grad**2) for grad in whole.values())) > 1e-3
    for other in others:
        assert worst_difference(other, whole) <= 1e-5


def test_variants_have_gradients_of_their_own(gradients: dict[str, list[Gradients]]) -> None:
    for one, other in itertools.combinations(VARIANTS, 2):
        assert worst_difference(gradients[one][0], gradients[other][0]) > 1e-3, (one, other)
