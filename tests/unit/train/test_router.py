"""The router loss of a step, and its metrics, for hand-made routing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsreason.job.ranks import World
from dsreason.losses.router import Routing
from dsreason.train.common import router
from dsreason.train.common.router import RouterTerm

ALONE = World(0, 0, 1, torch.device("cpu"))


def policy(weight: float, top_k: int = 2) -> Any:
    return SimpleNamespace(routing=None, top_k=top_k, router_loss_weight=weight)


def batch(num_targets: int) -> Any:
    return SimpleNamespace(targets=torch.zeros(num_targets, dtype=torch.long))


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router, "gather_objects", lambda value: [value])


def test_micro_batches_count_by_their_trained_tokens() -> None:
    model = policy(0.5)
    term, totals = RouterTerm(model, num_tokens=8), []
    for loss, loads, count in ((3.0, [2.0, 0.0], 6), (4.0, [0.0, 6.0], 2), (99.0, [9.0, 9.0], 0)):
        model.routing = Routing(torch.tensor(loss, requires_grad=True), torch.tensor([loads]))
        total = term.add_to(torch.tensor(1.0), batch(count))
        assert total.requires_grad  # otherwise, the ranks would run different modules backward
        totals.append(float(total))
    assert totals == [1 + 0.5 * 3 * 6 / 8, 1 + 0.5 * 4 * 2 / 8, 1]  # the last batch contains only padding
    assert term.compute_metrics(ALONE) == {"router/balance_loss": 3 * 6 / 8 + 4 * 2 / 8, "router/max_load": 6 / 4}


def test_weight_of_zero_leaves_loss_unchanged() -> None:
    model = policy(0.0)
    model.routing = Routing(torch.tensor(3.0), torch.tensor([[1.0, 1.0]]))
    loss, term = torch.tensor(1.0), RouterTerm(model, num_tokens=2)
    assert term.add_to(loss, batch(2)) is loss
    assert term.compute_metrics(ALONE) == {"router/balance_loss": 3.0, "router/max_load": 1.0}


def test_dense_model_has_no_router_metrics() -> None:
    loss, term = torch.tensor(1.0), RouterTerm(policy(0.0, top_k=0), num_tokens=2)
    assert term.add_to(loss, batch(2)) is loss
    assert term.compute_metrics(ALONE) == {}


def test_step_without_trained_tokens_has_no_metrics() -> None:
    assert RouterTerm(policy(0.5), num_tokens=0).compute_metrics(ALONE) == {}
