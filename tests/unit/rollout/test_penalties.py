"""Penalties for tokens that were already used, compared with hand-computed values."""

from types import SimpleNamespace

import pytest
import torch

from dsreason.rollout.protocol import Sampling
from dsreason.rollout.transformers_engine import Penalties

LOGITS = [2.0, -2.0, 1.0, 4.0]


def penalised(drawn: list[int], **settings: float) -> list[float]:
    """Return the penalised logits when token 1 is in the prompt and `drawn` have been sampled."""
    row = SimpleNamespace(input_ids=torch.tensor([1, 1]))
    penalties = Penalties(Sampling(**settings), [row], len(LOGITS), torch.device("cpu"))
    for token in drawn:
        penalties.count(torch.tensor([token]))
    return penalties.apply(torch.tensor([LOGITS]))[0].tolist()


@pytest.mark.parametrize(
    ("drawn", "settings", "expected"),
    [
        ([], {"repetition_penalty": 2.0}, [2.0, -4.0, 1.0, 4.0]),
        ([3, 3], {"repetition_penalty": 2.0}, [2.0, -4.0, 1.0, 2.0]),
        ([3, 3], {"presence_penalty": 0.5}, [2.0, -2.0, 1.0, 3.5]),
        ([3, 3, 0], {"frequency_penalty": 0.5}, [1.5, -2.0, 1.0, 3.0]),
        ([3], {"repetition_penalty": 2.0, "presence_penalty": 0.5, "frequency_penalty": 0.25}, [2.0, -4.0, 1.0, 1.25]),
    ],
)
def test_used_tokens_are_penalized(drawn: list[int], settings: dict[str, float], expected: list[float]) -> None:
    assert penalised(drawn, **settings) == expected


@pytest.mark.parametrize("settings", [{"repetition_penalty": 1.1}, {"presence_penalty": -1}, {"frequency_penalty": 1}])
def test_each_penalty_setting_enables_penalties(settings: dict[str, float]) -> None:
    assert Sampling(**settings).has_penalties
    assert not Sampling(temperature=0.5, top_k=3).has_penalties
