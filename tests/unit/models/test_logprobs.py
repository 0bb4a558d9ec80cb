"""Chunked log-probabilities compared with the plain formula."""

import math

import pytest
import torch
from torch._subclasses import FakeTensorMode

from dsreason.models import logprobs
from dsreason.models.logprobs import LogprobHead, compute_token_logprobs


def test_token_logprob_matches_hand_computation():
    # logits (2, 0, 0), target 0: -log(e^2 / (e^2 + 2)) = 0.239545
    hidden, weight = torch.tensor([[1.0]]), torch.tensor([[2.0], [0.0], [0.0]])
    logprobs, _ = compute_token_logprobs(hidden, weight, torch.tensor([0]))
    assert logprobs.item() == pytest.approx(-0.239545, abs=1e-6)


@pytest.mark.parametrize("chunk_size", [1, 3, 7, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_values_and_gradients_equal_the_plain_formula(chunk_size, temperature):
    torch.manual_seed(0)
    hidden = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(11, 5, dtype=torch.float64, requires_grad=True)
    targets, coefficients = torch.randint(11, (7,)), torch.randn(7)

    plain = (hidden @ weight.t() / temperature).log_softmax(-1)[torch.arange(7), targets]
    expected = torch.autograd.grad((plain.float() * coefficients).sum(), (hidden, weight))
    dsreason_result, _ = compute_token_logprobs(hidden, weight, targets, temperature=temperature, chunk_size=chunk_size)
    got = torch.autograd.grad((dsreason_result * coefficients).sum(), (hidden, weight))

    torch.testing.assert_close(dsreason_result, plain.float(), atol=1e-5, rtol=1e-5)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("chunk_size", [2, 100])
def test_banned_tokens_have_no_probability_or_gradient(chunk_size):
    torch.manual_seed(0)
    hidden = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(11, 5, dtype=torch.float64, requires_grad=True)
    banned, targets, coefficients = torch.tensor([3, 8]), torch.tensor([0, 1, 2, 4, 5, 10, 9]), torch.randn(7)

    logits = (hidden @ weight.t() / 0.7).index_fill(1, banned, -torch.inf)
    plain = logits.log_softmax(-1)[torch.arange(7), targets]
    expected = torch.autograd.grad((plain.float() * coefficients).sum(), (hidden, weight))
    dsreason_result, _ = compute_token_logprobs(
        hidden, weight, targets, temperature=0.7, chunk_size=chunk_size, banned_ids=banned
    )
    got = torch.autograd.grad((dsreason_result * coefficients).sum(), (hidden, weight))

    torch.testing.assert_close(dsreason_result, plain.float(), atol=1e-5, rtol=1e-5)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    assert torch.equal(got[1][banned], torch.zeros(2, 5, dtype=torch.float64))


@pytest.mark.parametrize("chunk_size", [2, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_entropy_matches_the_plain_formula(chunk_size, temperature):
    torch.manual_seed(0)
    hidden = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(11, 5, dtype=torch.float64, requires_grad=True)
    banned, targets = torch.tensor([3, 8]), torch.tensor([0, 1, 2, 4, 5, 10, 9])
    of_logprobs, of_entropy = torch.randn(7), torch.randn(7)

    logits = (hidden @ weight.t() / temperature).index_fill(1, banned, -1e30)
    logs = logits.log_softmax(-1)
    plain, entropy = logs[torch.arange(7), targets], -(logs.exp() * logs).sum(-1)
    expected = torch.autograd.grad((plain * of_logprobs + entropy * of_entropy).sum(), (hidden, weight))
    settings = {"temperature": temperature, "chunk_size": chunk_size, "banned_ids": banned}
    dsreason_result, our_entropy = compute_token_logprobs(hidden, weight, targets, **settings, with_entropy=True)
    got = torch.autograd.grad((dsreason_result * of_logprobs + our_entropy * of_entropy).sum(), (hidden, weight))

    torch.testing.assert_close(our_entropy, entropy.float(), atol=1e-5, rtol=1e-5)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    alone, no_entropy = compute_token_logprobs(hidden, weight, targets, **settings)
    assert torch.equal(dsreason_result, alone)
    assert no_entropy.shape == (0,)
    dsreason_result, _ = compute_token_logprobs(hidden, weight, targets, **settings, with_entropy=True)
    for a, b in zip(
        torch.autograd.grad(dsreason_result.sum(), (hidden, weight)),
        torch.autograd.grad(alone.sum(), (hidden, weight)),
        strict=True,
    ):
        assert torch.equal(a, b)


def test_entropy_of_equal_logits_is_log_count():
    _, entropy = compute_token_logprobs(torch.zeros(1, 3), torch.randn(8, 3), torch.tensor([0]), with_entropy=True)
    assert entropy.item() == pytest.approx(2.0794415, abs=1e-6)  # log 8


def test_extreme_logits_do_not_overflow():
    hidden, weight = torch.tensor([[1.0]]), torch.tensor([[1e4], [0.0]])
    assert compute_token_logprobs(hidden, weight, torch.tensor([1]))[0].item() == -1e4


def test_empty_targets_give_zero_gradients():
    head = LogprobHead(4, 6, bias=False)
    logprobs = head(torch.randn(1, 4), torch.tensor([2]))[:0]
    logprobs.sum().backward()
    assert logprobs.shape == (0,)
    assert torch.equal(head.weight.grad, torch.zeros(6, 4))


def test_head_without_targets_returns_logits():
    head = LogprobHead(4, 6, bias=False)
    hidden = torch.randn(2, 3, 4)
    torch.testing.assert_close(head(hidden), hidden @ head.weight.t())


def test_uniform_logits_give_log_of_vocabulary_size():
    logprobs, _ = compute_token_logprobs(torch.zeros(1, 3), torch.randn(10, 3), torch.tensor([4]))
    assert logprobs.item() == pytest.approx(-math.log(10))


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        ("cpu", [234, 883, 883]),  # 2**27 / 151936
        ("cuda", [234, 1766]),
    ],
)
@pytest.mark.parametrize("with_entropy", [False, True])
def test_chunks_are_larger_on_a_gpu(with_entropy, device, expected, monkeypatch):
    sizes, logits = [], logprobs._compute_logits
    monkeypatch.setattr(
        logprobs, "_compute_logits", lambda hidden, *rest: sizes.append(len(hidden)) or logits(hidden, *rest)
    )
    with FakeTensorMode():
        hidden, weight = torch.empty(2000, 8, device=device), torch.empty(151936, 8, device=device)
        targets = torch.zeros(2000, dtype=torch.int64, device=device)
        compute_token_logprobs(hidden, weight, targets, with_entropy=with_entropy)
    assert sizes == expected


def test_backward_reuses_only_last_chunk(monkeypatch):
    sizes, logits = [], logprobs._compute_logits
    monkeypatch.setattr(
        logprobs, "_compute_logits", lambda hidden, *rest: sizes.append(len(hidden)) or logits(hidden, *rest)
    )
    hidden, weight = torch.randn(7, 5, requires_grad=True), torch.randn(11, 5, requires_grad=True)
    result, _ = compute_token_logprobs(hidden, weight, torch.arange(7), chunk_size=3)
    assert sizes == [1, 3, 3]
    first = torch.autograd.grad(result.sum(), (hidden, weight), retain_graph=True)
    assert sizes[3:] == [3, 1]
    grad = torch.autograd.grad(result.sum(), (hidden, weight))  # recomputes all chunks
    assert sizes[5:] == [3, 3, 1]
    for a, b in zip(first, grad, strict=True):
        torch.testing.assert_close(a, b)
