"""The same rollouts give the same log-probabilities, losses and gradients however they are cut over ranks and rows, and whether
the completions of a prompt share it or each stands behind its own."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from tests.distributed import run_on_ranks
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
}
LOOP = {
    "preset": "dapo",
    "kl_coef": 0.5,
    "correction_high": 1e9,
    "num_generations": 4,
    "optimizer_steps_per_rollout": 2,
}
"""Dynamic sampling and the overlong filter; old and reference log-probabilities are measured before the first step."""
LENGTHS = ((3, 7, 1), (5, 8, 2, 4), (6, 4, 1, 0, 8), (2, 2, 8, 1, 3, 5), (7, 1, 2))
"""Of the completions of each prompt: text alone, an image, a video, two images, and a video of 20 seconds."""
REWARDS = ((1, 0, 0, 1), (2, 2, 2, 2), (1, 0, 2, 0), (0, 1, 0, 0), (1, 1, 0, 3))
CUT_OFF = {"0.1", "2.0", "2.1", "2.2", "2.3", "4.3"}
"""For the loop, which has four completions of each prompt: their rewards, and which of them were cut off."""
TRAINED = ({"0.0", "0.2", "0.3"}, {"3.0", "3.1", "3.2", "3.3", "4.0", "4.1", "4.2"})
"""By step. The second prompt's rewards are equal; of the others the first two make the first step."""


class Cut(NamedTuple):
    train: dict[str, Any]
    attention: str = "auto"


UNSHARED = Cut({"packing": False, "micro_batch_size": 8}, "sdpa")
SHORT = Cut({"max_tokens_per_micro_batch": 277})
"""A row does not hold the three completions of the long video, which has 269 tokens."""
CUTS: dict[int, list[Cut]] = {
    1: [UNSHARED, Cut({}, "sdpa"), Cut({}), Cut({"micro_batch_size": 4}), SHORT],
    2: [Cut({}), SHORT, Cut({"packing": False, "micro_batch_size": 3})],
    4: [Cut({}), SHORT],
}
"""By number of ranks."""


class Step(NamedTuple):
    """Of the loop, over all ranks."""

    metrics: dict[str, float]
    gradients: Gradients
    tokens: dict[str, np.ndarray]
    """Of each trained completion `[3, its tokens]`: log-probabilities of the old policy and of the reference, entropy."""


class Measured(NamedTuple):
    gradients: dict[str, Gradients]
    """By variant."""
    loop: list[Step]


def run_config(rows: str, model: str, variant: str, train: dict[str, Any], attention: str = "auto") -> Any:
    from dsreason.config.schema_grpo import GRPOConfig

    algorithm = {"num_generations": 2, "prompts_per_step": 4} | {**VARIANTS, "loop": LOOP}[variant]
    return GRPOConfig.model_validate(
        {
            "model": {"path": model, "gradient_checkpointing": False, "attention": attention},
            "data": {"adapter": "jsonl", "path": rows, "workers": 0, "vision": {"fps": 2.0}},
            "train": {"precision": "fp32", **train},
            "grpo": algorithm,
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


def made_up_groups(config: Any, encoder: Any, rank: int = 0, size: int = 1) -> list[list[Any]]:
    """Completions of made-up ids, log-probabilities and advantages; a rank has every `size`-th prompt's.

    The text of the second completion of the first prompt is "0.1".
    """
    from dsreason.data.sources import open_datasets
    from dsreason.rollout.protocol import Completion
    from dsreason.train.grpo.rollouts import Rollout

    rows, _ = open_datasets(config.data)
    random, found = np.random.default_rng(0), []
    for number, lengths in enumerate(LENGTHS):
        group = []
        prompt = encoder.encode_prompt(rows[number]) if number % size == rank else None
        for i, length in enumerate(lengths):
            ids = tuple(random.integers(5, 60, length).tolist())
            logprobs = tuple(random.normal(-5, 1.0, length).tolist())
            completion, advantage = Completion(ids, f"{number}.{i}", logprobs, "stop", 0), float(random.normal())
            group.append(Rollout(prompt, completion, 0.0, {}, advantage, place=(0, number)))
        if prompt is not None:
            found.append(group)
    return found


def groups_of_four(groups: list[list[Any]]) -> list[list[Any]]:
    """The same, each of four completions: the first ones, over again where there are fewer; with rewards, some cut off."""

    def changed(one: Any, i: int) -> Any:
        number = one.place[1]
        text = f"{number}.{i}"
        completion = replace(one.completion, text=text, finish_reason="length" if text in CUT_OFF else "stop")
        return replace(one, reward=float(REWARDS[number][i]), completion=completion)

    return [[changed(one, i) for i, one in enumerate(itertools.islice(itertools.cycle(group), 4))] for group in groups]


def other_logprobs(micro_batch: Any, distance: float) -> torch.Tensor:
    """Made-up log-probabilities of another policy: they depend on the completion alone."""
    rows = [np.sin(np.asarray(rollout.completion.ids)) * distance - 4.5 for rollout in micro_batch.rollouts]
    return torch.from_numpy(np.concatenate([*rows, []]).astype(np.float32))


def measure(rows: str, models: tuple[str, str], cuts: list[Cut]) -> list[Measured] | None:
    """Of each cut, on rank 0. The second model is the reference of the loop."""
    from dsreason.config.deepspeed import resolve_deepspeed
    from dsreason.engine.engine import set_learning_rate
    from dsreason.engine.reference import ReferencePolicy
    from dsreason.job.ranks import init_world
    from dsreason.rollout.protocol import media_token_ids
    from dsreason.train.common.opening import build_policy_engine
    from dsreason.train.common.preflight import build_encoder

    world, found = init_world(), []
    for attention, of_attention in itertools.groupby(cuts, key=lambda cut: cut.attention):
        config = run_config(rows, models[0], "loop", {}, attention)
        deepspeed = resolve_deepspeed(config.deepspeed, config, device="cpu", world_size=world.size)
        engine, encoder = (
            build_policy_engine(config, deepspeed, Path(models[0])),
            build_encoder(config, Path(models[0])),
        )
        set_learning_rate(engine, 0.0)
        reference = ReferencePolicy(engine)
        reference.load(Path(models[1]))
        groups = made_up_groups(config, encoder, world.rank, world.size)
        run = SimpleNamespace(
            encoder=encoder,
            engine=engine,
            reference=reference,
            world=world,
            banned_ids=torch.tensor(media_token_ids(encoder.processor.tokenizer, encoder.family)),
            state=SimpleNamespace(step=0),
            total_steps=len(TRAINED),
            num_untrained=0,
        )
        for cut in of_attention:
            gradients = {}
            for variant in VARIANTS:
                run.config = run_config(rows, models[0], variant, cut.train, attention)
                gradients[variant] = policy_gradient(run, [one for group in groups for one in group], variant)
            run.config = run_config(rows, models[0], "loop", cut.train, attention)
            found.append(Measured(gradients, loop_steps(run, groups_of_four(groups))))
        engine.destroy()
    return found if world.is_main else None


def policy_gradient(run: Any, rollouts: list[Any], variant: str) -> Gradients:
    from dsreason.train.grpo.update import cut

    micro_batches = cut(rollouts, run.config, run.encoder)
    micro_batches = [replace(one, old_logprobs=other_logprobs(one, 0.1)) for one in micro_batches]
    if variant.startswith("kl"):
        micro_batches = [replace(one, ref_logprobs=other_logprobs(one, 0.5)) for one in micro_batches]
    return update(run, micro_batches)[1]


def update(run: Any, micro_batches: list[Any]) -> tuple[dict[str, float], Gradients]:
    """Metrics and gradients."""
    from dsreason.train.grpo.update import accumulate_gradients
    from tests.engines import full_gradients

    metrics, _ = accumulate_gradients(run.engine, micro_batches, run.config, run.world, run.banned_ids)
    gradients = {name: grad.numpy() for name, grad in full_gradients(run.engine).items()}
    run.engine.step()
    return metrics, gradients


def loop_steps(run: Any, groups: list[list[Any]]) -> list[Step]:
    """The steps of a rollout, from its rewards on, as the loop makes them."""
    from dsreason.job.ranks import gather_objects
    from dsreason.losses.objective import objective_of
    from dsreason.train.grpo.loop import optimizer_steps
    from dsreason.train.grpo.rollouts import informative, with_advantages

    config, run.objective = run.config.grpo, objective_of(run.config.grpo)
    usable = [informative(group, config.dynamic_tolerance) for group in groups]
    rollouts = with_advantages(groups, usable, len(groups), run.objective.advantages, gather_objects)
    found = []
    for micro_batches in optimizer_steps(run, rollouts):
        tokens = {}
        for one in micro_batches:
            with torch.no_grad():
                _, entropy = run.engine(one.batch, run.config.rollout.temperature, run.banned_ids, True)
            values = torch.stack([one.old_logprobs, one.ref_logprobs, entropy]).numpy()
            ends = np.cumsum([len(rollout.completion.ids) for rollout in one.rollouts])
            parts = np.split(values, ends, axis=1)[:-1]
            tokens |= {rollout.completion.text: part for rollout, part in zip(one.rollouts, parts, strict=True)}
        everywhere = {name: part for of_rank in gather_objects(tokens) for name, part in of_rank.items()}
        found.append(Step(*update(run, micro_batches), everywhere))
    return found


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory, tiny_qwen3_vl: Path) -> Callable[[int], list[Measured]]:
    """Of the cuts on a number of ranks."""
    from dsreason.models.tiny import build_tiny

    folder = tmp_path_factory.mktemp("rows")
    models = str(tiny_qwen3_vl), str(build_tiny("qwen3_vl", folder / "reference", seed=1))
    rows = write_rows(folder)

    @cache
    def on_ranks(ranks: int) -> list[Measured]:
        found: list[Measured] = run_on_ranks(measure, ranks, rows, models, CUTS[ranks])[0]
        return found

    return on_ranks


RANKS = [1, 2, pytest.param(4, marks=pytest.mark.long)]


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_policy_gradient_does_not_depend_on_the_cut(
    measured: Callable[[int], list[Measured]], variant: str, ranks: int
) -> None:
    unshared = measured(1)[0].gradients[variant]
    assert np.sqrt(sum(np.sum(grad**2) for grad in unshared.values())) > 1e-3
    differences = [worst_difference(one.gradients[variant], unshared) for one in measured(ranks)]
    assert len(differences) == len(CUTS[ranks])
    assert max(differences) <= 1e-5, differences


def test_variants_have_gradients_of_their_own(measured: Callable[[int], list[Measured]]) -> None:
    gradients = measured(1)[0].gradients
    for one, other in itertools.combinations(VARIANTS, 2):
        assert worst_difference(gradients[one], gradients[other]) > 1e-3, (one, other)


@pytest.mark.parametrize("ranks", RANKS)
def test_the_steps_of_a_rollout_do_not_depend_on_the_cut(measured: Callable[[int], list[Measured]], ranks: int) -> None:
    unshared = measured(1)[0].loop
    assert [step.tokens.keys() for step in unshared] == list(TRAINED)
    assert all(step.metrics["policy/kl"] > 1e-3 for step in unshared)
    for one in measured(ranks):
        for step, expected in zip(one.loop, unshared, strict=True):
            assert step.tokens.keys() == expected.tokens.keys()
            assert max(np.abs(step.tokens[name] - expected.tokens[name]).max() for name in step.tokens) <= 1e-5
            assert step.metrics == pytest.approx(expected.metrics, rel=1e-5, abs=1e-6)
            assert worst_difference(step.gradients, expected.gradients) <= 1e-5
