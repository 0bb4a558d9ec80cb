"""Advantages of the student's tokens under a teacher, computed by hand, and the gradient that they produce."""

from __future__ import annotations

import pytest
import torch

from dsreason.losses.distillation import compute_distillation_advantages

STUDENT = [[1.0, 2.0, 0.5, -1.0], [0.0, 0.0, 3.0, 1.0]]
TEACHER = [[2.0, 1.0, 0.0, -1.0], [0.0, 1.0, 2.0, 1.0]]
"""Logits of two positions."""


def test_advantage_is_the_log_ratio_to_teacher() -> None:
    places, tokens = torch.arange(2), torch.tensor([1, 2])
    student, teacher = (torch.tensor(logits).log_softmax(-1)[places, tokens] for logits in (STUDENT, TEACHER))
    torch.testing.assert_close(student, torch.tensor([-0.4951819, -0.2109976]))
    torch.testing.assert_close(teacher, torch.tensor([-1.4401897, -0.6265234]))
    result = compute_distillation_advantages(teacher, student, torch.zeros(2, dtype=torch.int64))
    torch.testing.assert_close(result, torch.tensor([-0.9450078, -0.4155258]))


@pytest.mark.parametrize(
    ("discount", "expected"),
    [(0.0, [1.0, -2.0, 4.0, 3.0, 0.5]), (0.5, [1.0, 0.0, 4.0, 3.25, 0.5]), (1.0, [3.0, 2.0, 4.0, 3.5, 0.5])],
)
def test_discount_adds_later_advantages_of_the_sequence(discount: float, expected: list[float]) -> None:
    teacher, student = torch.tensor([0.0, -3.0, 3.0, 1.0, -1.0]), torch.tensor([-1.0, -1.0, -1.0, -2.0, -1.5])
    sequence = torch.tensor([0, 0, 0, 1, 1])  # of 1, -2, 4 and of 3, 0.5
    result = compute_distillation_advantages(teacher, student, sequence, discount=discount)
    assert result.tolist() == expected


def test_advantages_are_detached_and_may_be_empty() -> None:
    student = torch.tensor([-1.0], requires_grad=True)
    assert not compute_distillation_advantages(torch.tensor([-2.0]), student, torch.tensor([0])).requires_grad
    empty = torch.empty(0)
    assert compute_distillation_advantages(empty, empty, torch.empty(0, dtype=torch.int64), discount=0.5).shape == (0,)


@pytest.mark.parametrize("place", [0, 1])
def test_expected_policy_gradient_equals_reverse_kl_gradient(place: int) -> None:
    logits = torch.tensor(STUDENT[place], dtype=torch.float64, requires_grad=True)
    student, teacher = logits.log_softmax(-1), torch.tensor(TEACHER[place], dtype=torch.float64).log_softmax(-1)
    kl = (student.exp() * (student - teacher)).sum()
    torch.testing.assert_close(kl.item(), [0.3982545, 0.1849854][place], rtol=0, atol=1e-7)
    (of_kl,) = torch.autograd.grad(kl, logits, retain_graph=True)
    advantages = compute_distillation_advantages(
        teacher, student, torch.arange(4)
    )  # every token once, weighted by its probability
    loss = -(student.detach().exp() * advantages * student).sum()
    (of_loss,) = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(of_loss, of_kl, rtol=0, atol=1e-12)
