"""The router loss of a step, and its metrics, for hand-made routing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsreason.engine import router
from dsreason.engine.router import RouterTerm
from dsreason.job.ranks import World
from dsreason.models.policy import RouterOutput

ALONE = World(0, 0, 1, torch.device("cpu"))


def policy(weight: float, top_k: int = 2) -> Any:
    return SimpleNamespace(router_output=None, top_k=top_k, router_loss_weight=weight)


def output(probs: list[list[float]]) -> RouterOutput:
    logits = torch.tensor(probs, requires_grad=True).log()
    return RouterOutput([logits], torch.ones(len(probs), dtype=torch.bool), torch.tensor(len(probs)), None)


def batch(num_targets: int) -> Any:
    return SimpleNamespace(targets=torch.zeros(num_targets, dtype=torch.long))


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router, "gather_objects", lambda value: [value])


def test_micro_batches_count_by_their_trained_tokens() -> None:
    model = policy(0.5, top_k=1)
    term, totals = RouterTerm(model, num_tokens=8), []
    for probs, count in (([[0.9, 0.1], [0.7, 0.3]], 6), ([[0.4, 0.6]], 2), ([[0.9, 0.1]], 0)):
        model.router_output = output(probs)
        total = term.add_to(torch.tensor(1.0), batch(count))
        assert total.requires_grad  # otherwise, the ranks would run different modules backward
        totals.append(total.item())
    shares = 2 * 0.8 * 6 / 8, 2 * 0.6 * 2 / 8, 0.0  # the last batch contains only padding
    assert totals == pytest.approx([1 + 0.5 * share for share in shares])
    metrics = term.compute_metrics(ALONE)
    assert metrics == pytest.approx({"router/balance_loss": sum(shares), "router/max_load": 2 / 1.5})


def test_weight_of_zero_leaves_loss_unchanged() -> None:
    model = policy(0.0, top_k=1)
    model.router_output = output([[0.9, 0.1], [0.2, 0.8]])
    loss, term = torch.tensor(1.0), RouterTerm(model, num_tokens=2)
    assert term.add_to(loss, batch(2)) is loss
    metrics = term.compute_metrics(ALONE)
    assert metrics == pytest.approx({"router/balance_loss": 2 * (0.55 / 2 + 0.45 / 2), "router/max_load": 1.0})


def test_dense_model_has_no_router_metrics() -> None:
    loss, term = torch.tensor(1.0), RouterTerm(policy(0.0, top_k=0), num_tokens=2)
    assert term.add_to(loss, batch(2)) is loss
    assert term.compute_metrics(ALONE) == {}


def test_step_without_trained_tokens_has_no_metrics() -> None:
    assert RouterTerm(policy(0.5), num_tokens=0).compute_metrics(ALONE) == {}
