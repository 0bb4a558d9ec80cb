"""The optimizer steps of a rollout do not depend on how it is divided among ranks and rows, or on whether completions share
prompts: each step has the same completions, the same log-probabilities under the policy and the reference, and the same
gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dsreason.models.tiny import build_tiny
from tests.distributed import run_on_ranks
from tests.integration.test_gradient_invariance import Gradients, worst_difference
from tests.integration.test_grpo_gradients import UNSHARED, made_up_rollouts, run_config, write_rows

pytestmark = pytest.mark.integration

CUTS: dict[int, list[dict[str, Any]]] = {
    1: [UNSHARED, {}, {"max_tokens_per_micro_batch": 277}],
    2: [{}, {"packing": False, "micro_batch_size": 3}],
}
SETTINGS = {"optimizer_steps_per_rollout": 2, "overlong_filter": True}
GROUPS = (0, 1, 2, None, 3)
"""Group of each prompt; dynamic sampling has dropped the prompt with two images."""
Key = tuple[str, tuple[int, ...]]
"""Identity of a completion: the name of its prompt, and its tokens."""
Step = tuple[dict[Key, np.ndarray], Gradients]
"""`[2, tokens]` log-probabilities under the policy and the reference."""


def trained_rollouts(config: Any, encoder: Any, rank: int, size: int) -> list[Any]:
    """Return this rank's made-up rollouts, grouped over all ranks; rollouts of the maximum length count as truncated."""
    everyone = made_up_rollouts(config, encoder, 0, 1)
    numbers = {name: i for i, name in enumerate(dict.fromkeys(item.prompt.sample.id for item in everyone))}
    result = []
    for item in everyone:
        number = numbers[item.prompt.sample.id]
        reason = "length" if len(item.completion.ids) == config.rollout.max_completion_length else "stop"
        if number % size == rank:
            completion = replace(item.completion, finish_reason=reason)
            result.append(replace(item, completion=completion, group=GROUPS[number]))
    return result


def steps_of_a_rollout(rows: str, model: str, other: str, cuts: list[dict[str, Any]]) -> list[list[Step]]:
    """Return the steps by batch split and step index, on rank 0."""
    from dsreason.config.deepspeed import resolve_deepspeed
    from dsreason.engine.engine import set_learning_rate
    from dsreason.engine.reference import ReferencePolicy
    from dsreason.job.ranks import gather_objects, init_world
    from dsreason.losses.objective import build_objective
    from dsreason.rollout.protocol import find_media_token_ids
    from dsreason.train.common.opening import build_policy_engine
    from dsreason.train.common.preflight import build_encoder
    from dsreason.train.grpo.loop import cut_into_steps
    from dsreason.train.grpo.update import accumulate_gradients, add_fixed_logprobs
    from tests.engines import full_gradients

    world, engine, result = init_world(), None, []
    for settings in cuts:
        config = run_config(rows, model, "kl", settings)
        config = config.model_copy(update={"grpo": config.grpo.model_copy(update=SETTINGS)})
        encoder = build_encoder(config, Path(model))
        if engine is None:
            deepspeed = resolve_deepspeed(config.deepspeed, config, device="cpu", world_size=world.size)
            engine = build_policy_engine(config, deepspeed, Path(model))
            set_learning_rate(engine, 0.0)
            reference = ReferencePolicy(engine)
            reference.load(Path(other))
        banned_ids = torch.tensor(find_media_token_ids(encoder.processor.tokenizer, encoder.family))
        rollouts = trained_rollouts(config, encoder, world.rank, world.size)
        cut_steps = cut_into_steps(rollouts, build_objective(config.grpo), config, encoder, world)
        steps: list[Step] = []
        for micro_batches in add_fixed_logprobs(cut_steps, engine, reference, None, config, banned_ids):
            local: dict[Key, np.ndarray] = {}
            for micro_batch in micro_batches:
                fixed = torch.stack([micro_batch.old_logprobs, micro_batch.ref_logprobs])
                lengths = [len(rollout.completion.ids) for rollout in micro_batch.rollouts]
                for rollout, values in zip(micro_batch.rollouts, fixed.split(lengths, dim=1), strict=True):
                    local[rollout.prompt.sample.id, rollout.completion.ids] = values.numpy()
            accumulate_gradients(engine, micro_batches, config, world, banned_ids)
            gradients = {name: gradient.numpy() for name, gradient in full_gradients(engine).items()}
            everyone = {key: value for part in gather_objects(local) for key, value in part.items()}
            steps.append((everyone, gradients))
            engine.step()
        result.append(steps)
    return result


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory, tiny_qwen3_vl: Path) -> Callable[[int], list[list[Step]]]:
    """Return a function that measures the steps on a number of ranks, and returns them by batch split and step index."""
    folder = tmp_path_factory.mktemp("rows")
    other = build_tiny("qwen3_vl", folder / "other", seed=1)
    rows = write_rows(folder)
    return cache(
        lambda ranks: run_on_ranks(steps_of_a_rollout, ranks, rows, str(tiny_qwen3_vl), str(other), CUTS[ranks])[0]
    )


@pytest.mark.parametrize("ranks", CUTS)
def test_steps_contain_complete_groups(measured: Callable[[int], list[list[Step]]], ranks: int) -> None:
    for steps in measured(ranks):
        lengths = [sorted(len(ids) for _, ids in logprobs) for logprobs, _ in steps]
        assert lengths == [[1, 2, 3, 5, 7], [1, 1, 2, 4, 6, 7]]


@pytest.mark.parametrize("ranks", CUTS)
def test_logprobs_and_gradients_ignore_batch_split(measured: Callable[[int], list[list[Step]]], ranks: int) -> None:
    unshared = measured(1)[0]
    for steps in measured(ranks):
        for (logprobs, gradients), (expected, expected_gradients) in zip(steps, unshared, strict=True):
            assert logprobs.keys() == expected.keys()
            for key, values in logprobs.items():
                np.testing.assert_allclose(values, expected[key], rtol=0, atol=1e-5, err_msg=str(key))
                # The reference is a different model, so its log-probabilities differ.
                assert abs(values[0] - values[1]).max() > 1e-3
            assert worst_difference(gradients, expected_gradients) <= 1e-5
