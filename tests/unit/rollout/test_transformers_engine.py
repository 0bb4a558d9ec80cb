"""The transformers engine with a stand-in for its model. Tests with real models: tests/integration/test_rollout.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsreason.data.types import EncodedSample
from dsreason.rollout.protocol import Completion, RolloutError, Sampling, StaleWeightsError, make_single_turn
from dsreason.rollout.transformers_engine import TransformersEngine, TransformersSettings

GREEDY, WARM = Sampling(temperature=0, max_completion_length=4), Sampling(max_completion_length=4)


class StandIn(TransformersEngine):
    """An engine that completes a prompt with the number of its stream, and records batches as (lengths, streams, temperature)."""

    def __init__(self) -> None:
        self.settings = TransformersSettings(batch_size=2)
        self.awake, self.version, self._stats = True, 3, {}
        self.stop_ids, self.banned_ids = torch.tensor([9]), torch.tensor([7])
        self.tokenizer: Any = SimpleNamespace(
            decode=lambda ids, skip_special_tokens: " ".join(map(str, ids)),
            convert_ids_to_tokens=lambda ids: [f"<{item}>" for item in ids],
        )
        self.batches: list[tuple[list[int], list[int], float]] = []

    def _complete_batch(
        self, rows: list[EncodedSample], streams: list[int], sampling: Sampling, version: int
    ) -> list[Completion]:
        self.batches.append(([len(row) for row in rows], streams, sampling.temperature))
        return [make_single_turn((stream,), str(stream), (-1.0,), "stop", version) for stream in streams]


def row(length: int, position: int = 0) -> EncodedSample:
    ids = torch.arange(1, length + 1)
    positions = torch.arange(length).repeat(3, 1)
    positions[2, -1] += position
    return EncodedSample("p", ids, torch.zeros(length, dtype=torch.bool), positions, torch.zeros_like(ids), {})


def prompts(*lengths: int) -> list[Any]:
    return [SimpleNamespace(encoded=row(length)) for length in lengths]


def test_prompt_stream_does_not_depend_on_batching() -> None:
    engine = StandIn()
    result = engine.generate(prompts(30, 10, 20), WARM, version=3, streams=[6, 2, 4])
    assert [item.text for item in result] == ["6", "2", "4"]
    assert engine.batches == [([10, 20], [2, 4], 1.0), ([30], [6], 1.0)]


def test_prompts_with_equal_settings_share_a_batch() -> None:
    engine = StandIn()
    completed = dict(engine.iter_completions(prompts(5, 5, 5), [GREEDY, WARM, GREEDY], version=3, streams=[0, 1, 2]))
    assert [completed[i].text for i in range(3)] == ["0", "1", "2"]
    assert engine.batches == [([5, 5], [0, 2], 0.0), ([5], [1], 1.0)]


def test_sampling_requires_weights_of_the_requested_version() -> None:
    engine = StandIn()
    with pytest.raises(StaleWeightsError, match="version 4 were requested, but the engine holds version 3"):
        engine.generate(prompts(5), WARM, version=4)
    engine.awake = False
    with pytest.raises(StaleWeightsError, match="the engine holds no weights"):
        engine.generate(prompts(5), WARM, version=3)


@pytest.mark.parametrize(
    ("drawn", "kept", "reason"),
    [([5, 9, 4], (5, 9), "stop"), ([9, 9], (9,), "stop"), ([5, 4], (5, 4), "length"), ([5, 9, 7], (5, 9), "stop")],
)
def test_completion_includes_stop_token(drawn: list[int], kept: tuple[int, ...], reason: str) -> None:
    logprobs = [-0.5 * i for i in range(len(drawn))]
    completion = StandIn()._build_completion("p", drawn, logprobs, 3)
    assert (completion.ids, completion.finish_reason, completion.version) == (kept, reason, 3)
    assert completion.logprobs == tuple(logprobs[: len(kept)])
    assert completion.text == " ".join(map(str, kept))


def test_media_token_in_completion_is_rejected() -> None:
    with pytest.raises(RolloutError, match="sample 'p': the completion contains <7>, but media tokens are banned"):
        StandIn()._build_completion("p", [5, 7, 9], [-1.0] * 3, 3)
