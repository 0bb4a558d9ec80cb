"""The transformers rollout engine compared with the policy that it copies: same weights, same tokens, same log-probabilities."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

from dsreason.config.schema import SFTConfig
from dsreason.data.chat import EncodedPrompt
from dsreason.data.collate import collate
from dsreason.data.sources import open_datasets
from dsreason.data.types import EncodedSample
from dsreason.models.load import load_model
from dsreason.models.policy import Policy
from dsreason.rollout.protocol import Completion, RolloutError, Sampling, StaleWeightsError, SyncError
from dsreason.rollout.transformers_engine import TransformersEngine, TransformersSettings
from dsreason.train.common.preflight import build_encoder
from tests.integration.rows import write_mixed_rows
from tests.positions import patch_positions

pytestmark = pytest.mark.integration

GREEDY = Sampling(temperature=0, max_completion_length=12)


@dataclass
class Case:
    model: nn.Module
    engine: TransformersEngine
    prompts: list[EncodedPrompt]  # prompts with text, one image, a video and two images, each of which occurs twice


@pytest.fixture(scope="module")
def case(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Create a random model whose weights are disturbed, so that greedy texts vary and biases matter, and an engine with its
    weights."""
    rows = write_mixed_rows(tmp_path_factory.mktemp("rows"))
    config = SFTConfig.model_validate({"data": {"adapter": "jsonl", "path": str(rows), "vision": {"fps": 4.0}}})
    encoder = build_encoder(config, tiny)
    samples, _ = open_datasets(config.data)
    model = load_model(tiny, dtype=torch.float32).eval()
    noise = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=noise)
    engine = TransformersEngine(
        tiny,
        encoder.processor.tokenizer,
        TransformersSettings(batch_size=8),
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    engine.wake()
    engine.sync(iter(model.named_parameters()), version=1)
    return Case(model, engine, [encoder.encode_prompt(samples[i]) for i in range(len(samples))])


def test_greedy_completions_are_independent_of_batch(case: Case) -> None:
    together = case.engine.generate(case.prompts, GREEDY, version=1)
    alone = [case.engine.generate([prompt], GREEDY, version=1)[0] for prompt in case.prompts]
    assert [completion.ids for completion in together] == [completion.ids for completion in alone]
    assert len({completion.ids for completion in together}) > 4  # the texts actually differ
    for a, b in zip(together, alone, strict=True):
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-5)


@pytest.mark.parametrize(("batch_tokens", "num_batches"), [(0, 4), (10_000, 1)])
def test_token_budget_changes_batches_but_not_completions(case: Case, batch_tokens: int, num_batches: int) -> None:
    sampling = Sampling(max_completion_length=6, seed=2)
    expected = case.engine.generate(case.prompts, sampling, version=1)
    with (
        mock.patch.object(case.engine, "settings", TransformersSettings(batch_size=2, batch_tokens=batch_tokens)),
        mock.patch.object(case.engine, "_complete_batch", wraps=case.engine._complete_batch) as complete,
    ):
        result = case.engine.generate(case.prompts, sampling, version=1)
    assert complete.call_count == num_batches
    assert [completion.ids for completion in result] == [completion.ids for completion in expected]


def test_completions_arrive_by_batch_with_own_settings(case: Case) -> None:
    samplings = [GREEDY, Sampling(max_completion_length=3, seed=2)] * 4
    with (
        mock.patch.object(case.engine, "settings", TransformersSettings(batch_size=2)),
        mock.patch.object(case.engine, "_complete_batch", wraps=case.engine._complete_batch) as complete,
    ):
        completed = case.engine.iter_completions(case.prompts, samplings, version=1, streams=range(8))
        result = [next(completed), next(completed)]
        assert complete.call_count == 1
        result += completed
    assert [number % 2 for number, _ in result] == [0] * 4 + [1] * 4
    for i, sampling in enumerate(samplings):
        (alone,) = case.engine.generate([case.prompts[i]], sampling, version=1, streams=[i])
        assert dict(result)[i].ids == alone.ids


def test_greedy_text_matches_transformers_generate(case: Case) -> None:
    patch_positions(case.model)
    for prompt, completion in zip(case.prompts, case.engine.generate(case.prompts, GREEDY, version=1), strict=True):
        ids = prompt.encoded.input_ids[None]
        case.model.model.rope_deltas = None
        result = case.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            mm_token_type_ids=prompt.encoded.mm_token_type_ids[None],
            suppress_tokens=case.engine.banned_ids.tolist(),
            max_new_tokens=GREEDY.max_completion_length,
            do_sample=False,
            **prompt.encoded.mm_kwargs,
        )
        assert tuple(result[0, ids.shape[1] :].tolist()) == completion.ids


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_match_policy_when_nothing_is_banned(case: Case, temperature: float) -> None:
    case.engine.banned_ids, banned = case.engine.banned_ids[:0], case.engine.banned_ids
    sampling = Sampling(temperature=temperature, max_completion_length=10, seed=2)
    completions = case.engine.generate(case.prompts, sampling, version=1)
    case.engine.banned_ids = banned
    rows = [completed(prompt.encoded, c) for prompt, c in zip(case.prompts, completions, strict=True)]
    policy = Policy(load_copy(case))
    for row, completion in zip(rows, completions, strict=True):
        if {1, 2} & set(row.mm_token_type_ids[-len(completion.ids) :].tolist()):
            continue  # without the ban, a placeholder may be sampled, which no forward pass accepts
        with torch.no_grad():
            logprobs = policy(collate([row], pad_id=0), temperature)
        assert completion.logprobs == pytest.approx(logprobs.tolist(), abs=2e-5)


def load_copy(case: Case) -> nn.Module:
    model = load_model(case.engine.path, dtype=torch.float32).eval()
    model.load_state_dict(case.model.state_dict())
    return model


def completed(prompt: EncodedSample, completion: Completion) -> EncodedSample:
    """Build the training row of a prompt and its completion; text positions continue from the largest position of the prompt."""
    ids = torch.tensor(completion.ids)
    positions = prompt.position_ids.max() + 1 + torch.arange(len(ids))
    return EncodedSample(
        id=prompt.id,
        input_ids=torch.cat([prompt.input_ids, ids]),
        loss_mask=torch.cat([torch.zeros_like(prompt.loss_mask), torch.ones(len(ids), dtype=torch.bool)]),
        position_ids=torch.cat([prompt.position_ids, positions.expand(3, -1)], dim=1),
        mm_token_type_ids=torch.cat([prompt.mm_token_type_ids, torch.zeros(len(ids), dtype=torch.int64)]),
        mm_kwargs=prompt.mm_kwargs,
    )


def test_samples_depend_only_on_seed_and_stream(case: Case) -> None:
    sampling = Sampling(max_completion_length=8, seed=5)
    same_prompt = [case.prompts[0]] * 3
    first = case.engine.generate(same_prompt, sampling, version=1)
    assert case.engine.generate(same_prompt, sampling, version=1) == first
    assert len({completion.ids for completion in first}) == 3
    other = case.engine.generate(same_prompt, Sampling(max_completion_length=8, seed=6), version=1)
    assert {completion.ids for completion in other}.isdisjoint({completion.ids for completion in first})


def test_completion_ends_at_first_stop_token(case: Case) -> None:
    stop = int(case.engine.stop_ids[0])
    # Sampling is almost uniform, and 2 of about 500 tokens end a completion.
    hot = Sampling(temperature=50.0, max_completion_length=600, seed=1)
    completions = case.engine.generate(case.prompts, hot, version=1)
    reasons = {completion.finish_reason for completion in completions}
    for completion in completions:
        stops = [i for i, token in enumerate(completion.ids) if token in case.engine.stop_ids.tolist()]
        assert stops == ([len(completion.ids) - 1] if completion.finish_reason == "stop" else [])
        assert len(completion.logprobs) == len(completion.ids) <= 600
    assert "stop" in reasons
    assert stop not in case.engine.banned_ids.tolist()


def test_media_tokens_are_never_sampled(case: Case) -> None:
    hot = Sampling(temperature=50.0, max_completion_length=300, seed=3)
    drawn = {token for c in case.engine.generate(case.prompts, hot, version=1) for token in c.ids}
    assert len(case.engine.banned_ids) == 5
    assert drawn.isdisjoint(case.engine.banned_ids.tolist())


def test_global_random_state_is_unchanged(case: Case, tiny: Path) -> None:
    before = torch.random.get_rng_state()
    case.engine.generate(case.prompts[:2], Sampling(max_completion_length=3), version=1)
    TransformersEngine(tiny, case.engine.tokenizer, dtype=torch.float32, device=torch.device("cpu")).wake()
    assert torch.equal(before, torch.random.get_rng_state())


def test_generation_requires_synced_weights_version(tiny: Path, case: Case) -> None:
    engine = TransformersEngine(tiny, case.engine.tokenizer, dtype=torch.float32, device=torch.device("cpu"))
    weights = dict(case.model.named_parameters())
    short = Sampling(temperature=0, max_completion_length=2)
    with pytest.raises(SyncError, match="sleeping"):
        engine.sync(iter(weights.items()), version=4)
    engine.wake()
    with pytest.raises(StaleWeightsError, match="holds no weights"):
        engine.generate(case.prompts[:1], short, version=4)
    engine.sync(iter(weights.items()), version=4)
    assert engine.generate(case.prompts[:1], short, version=4)[0].version == 4
    with pytest.raises(StaleWeightsError, match="version 5 were requested, but the engine holds version 4"):
        engine.generate(case.prompts[:1], short, version=5)
    del weights["model.language_model.norm.weight"]
    with pytest.raises(SyncError, match=r"model\.language_model\.norm\.weight did not arrive"):
        engine.sync(iter(weights.items()), version=5)
    with pytest.raises(StaleWeightsError, match="holds no weights"):
        engine.generate(case.prompts[:1], short, version=5)
    engine.sync(iter(case.model.named_parameters()), version=5)
    engine.sleep()
    with pytest.raises(StaleWeightsError, match="holds no weights"):
        engine.generate(case.prompts[:1], short, version=5)
    engine.wake()  # on a CPU, sleep does not discard the weights
    assert engine.generate(case.prompts[:1], short, version=5)[0].version == 5


def test_random_stream_is_independent_of_prompt_order(case: Case) -> None:
    sampling = Sampling(max_completion_length=8, seed=5)
    alone = case.engine.generate([case.prompts[1]], sampling, version=1, streams=[9])
    prompts = [case.prompts[0], case.prompts[1], case.prompts[1]]
    beside = case.engine.generate(prompts, sampling, version=1, streams=[9, 4, 9])
    assert beside[2].ids == alone[0].ids != beside[1].ids


def test_banned_media_token_is_reported_with_sample(case: Case) -> None:
    pad = int(case.engine.banned_ids[0])
    drawn = torch.tensor([pad]), torch.tensor([-1.0])
    says = rf"sample '{case.prompts[1].sample.id}': the completion contains <\|[a-z_]+\|>, but media tokens are banned"
    with (
        mock.patch("dsreason.rollout.transformers_engine.draw", lambda *_: drawn),
        pytest.raises(RolloutError, match=says),
    ):
        case.engine.generate(case.prompts[1:2], Sampling(max_completion_length=1), version=1)
