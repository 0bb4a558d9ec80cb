"""Rollouts give the same policy gradient however they are divided among ranks and rows, and whether the completions of a
prompt share it or each follows a separate copy."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.distributed import run_on_ranks
from tests.integration.lora import LORA, trained_adapters
from tests.integration.rows import write_mixed_rows
from tests.integration.test_gradient_invariance import Gradients, worst_difference
from tests.unit.media.videos import write_video

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
    "dapo, adapters": {"preset": "dapo"},
    "kl, adapters": {"preset": "grpo", "kl_coef": 0.5},
}
LENGTHS = ((3, 7, 1), (5, 8, 2), (6, 4, 1), (2, 2, 8), (7, 1, 2))
"""Lengths of the completions of each prompt: text only, an image, a video, two images, and a video of 20 seconds."""
UNSHARED = {"packing": False, "micro_batch_size": 8}
CUTS: dict[int, list[dict[str, Any]]] = {
    1: [UNSHARED, {}, {"micro_batch_size": 4}, {"max_tokens_per_micro_batch": 277}, {"packing": False}],
    2: [{}, {"max_tokens_per_micro_batch": 277}, {"packing": False, "micro_batch_size": 3}],
    4: [{}],
}
"""Batch splits by number of ranks. With 277 tokens per row, the three completions of the long video (269 tokens) do not fit
with its prompt."""


def run_config(rows: str, model: str, variant: str, train: dict[str, Any]) -> Any:
    from dsreason.config.schema_grpo import GRPOConfig

    return GRPOConfig.model_validate(
        {
            "model": {"path": model, "gradient_checkpointing": False},
            "data": {"adapter": "jsonl", "path": rows, "workers": 0, "vision": {"fps": 2.0}},
            "train": {"precision": "fp32", **train},
            "lora": LORA if variant.endswith("adapters") else {},
            "grpo": {"num_generations": 2, "prompts_per_step": 4, **VARIANTS[variant]},
            "rollout": {"max_completion_length": 8, "temperature": 0.9},
            "reward": {"functions": {"exact_match": 1.0}},
        }
    )


def write_rows(folder: Path) -> str:
    rows = write_mixed_rows(folder, 4)
    frames = np.zeros((80, 64, 64, 3), np.uint8)
    for i, frame in enumerate(frames):
        frame[20:40, i // 2 : i // 2 + 20] = (220, 30, 30)
    write_video(folder / "long.mp4", range(0, 20_000, 250), frames=frames)
    row = {"id": "long", "video": "long.mp4", "question": "What colour?", "answer": "red"}
    with rows.open("a") as file:
        file.write(json.dumps(row) + "\n")
    return str(rows)


def made_up_rollouts(config: Any, encoder: Any, rank: int, size: int) -> list[Any]:
    """Build completions with made-up ids, log-probabilities and advantages; a rank gets those of every `size`-th prompt."""
    from dsreason.data.sources import open_datasets
    from dsreason.rollout.protocol import make_single_turn
    from dsreason.train.grpo.rollouts import Rollout

    rows, _ = open_datasets(config.data)
    random, result = np.random.default_rng(0), []
    for number, lengths in enumerate(LENGTHS):
        prompt = encoder.encode_prompt(rows[number])
        for length in lengths:
            ids = tuple(random.integers(5, 60, length).tolist())
            logprobs = tuple(random.normal(-5, 1.0, length).tolist())
            rollout = Rollout(prompt, make_single_turn(ids, "", logprobs, "stop", 0), 0.0, {}, float(random.normal()))
            if number % size == rank:
                result.append(rollout)
    return result


def other_logprobs(micro_batch: Any, distance: float) -> torch.Tensor:
    """Return made-up log-probabilities of another policy, which depend only on the completion."""
    rows = [np.sin(np.asarray(rollout.completion.ids)) * distance - 4.5 for rollout in micro_batch.rollouts]
    return torch.from_numpy(np.concatenate([*rows, []]).astype(np.float32))


def policy_gradients(rows: str, model: str, cuts: list[dict[str, Any]]) -> dict[tuple[str, int], Gradients] | None:
    """Return the gradients by variant and index of the batch split, on rank 0."""
    from dsreason.config.deepspeed import resolve_deepspeed
    from dsreason.engine.engine import set_learning_rate
    from dsreason.job.ranks import init_world
    from dsreason.rollout.protocol import find_media_token_ids
    from dsreason.train.common.opening import build_policy_engine
    from dsreason.train.common.preflight import build_encoder
    from dsreason.train.grpo.update import accumulate_gradients, split_into_micro_batches
    from tests.engines import full_gradients

    world, result = init_world(), {}
    engines: dict[int, Any] = {}
    for variant in VARIANTS:
        for number, settings in enumerate(cuts):
            config = run_config(rows, model, variant, settings)
            encoder = build_encoder(config, Path(model))
            if config.lora.rank not in engines:
                deepspeed = resolve_deepspeed(config.deepspeed, config, device="cpu", world_size=world.size)
                with trained_adapters():
                    engines[config.lora.rank] = build_policy_engine(config, deepspeed, Path(model))
                set_learning_rate(engines[config.lora.rank], 0.0)
                rollouts = made_up_rollouts(config, encoder, world.rank, world.size)
            engine = engines[config.lora.rank]
            micro_batches = split_into_micro_batches(rollouts, config, encoder)
            micro_batches = [
                replace(micro_batch, old_logprobs=other_logprobs(micro_batch, 0.1)) for micro_batch in micro_batches
            ]
            if variant.startswith("kl"):
                micro_batches = [
                    replace(micro_batch, ref_logprobs=other_logprobs(micro_batch, 0.5)) for micro_batch in micro_batches
                ]
            banned = torch.tensor(find_media_token_ids(encoder.processor.tokenizer, encoder.family))
            accumulate_gradients(engine, micro_batches, config, world, banned)
            result[variant, number] = {name: grad.numpy() for name, grad in full_gradients(engine).items()}
            engine.step()
    return result if world.is_main else None


ByVariant = dict[str, list[Gradients]]
"""Gradients of each batch split."""


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory, tiny_qwen3_vl: Path) -> Callable[[int], ByVariant]:
    """Return a function that measures the gradients on a number of ranks, and returns them by variant."""
    rows = write_rows(tmp_path_factory.mktemp("rows"))

    @cache
    def on_ranks(ranks: int) -> ByVariant:
        result: ByVariant = {variant: [] for variant in VARIANTS}
        by_cut = run_on_ranks(policy_gradients, ranks, rows, str(tiny_qwen3_vl), CUTS[ranks])[0]
        for (variant, _), gradients in by_cut.items():
            result[variant].append(gradients)
        return result

    return on_ranks


@pytest.mark.parametrize("ranks", [1, 2, pytest.param(4, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("variant", VARIANTS)
def test_policy_gradient_does_not_depend_on_batch_split(
    measured: Callable[[int], ByVariant], variant: str, ranks: int
) -> None:
    unshared = measured(1)[variant][0]
    assert np.sqrt(sum(np.sum(grad**2) for grad in unshared.values())) > 1e-3
    differences = [worst_difference(other, unshared) for other in measured(ranks)[variant]]
    assert len(differences) == len(CUTS[ranks])
    assert max(differences) <= 1e-5, differences


def test_variants_have_different_gradients(measured: Callable[[int], ByVariant]) -> None:
    for item, other in itertools.combinations(VARIANTS, 2):
        if measured(1)[item][0].keys() != measured(1)[other][0].keys():
            continue  # one variant trains all weights, the other only adapters
        assert worst_difference(measured(1)[item][0], measured(1)[other][0]) > 1e-3, (item, other)
