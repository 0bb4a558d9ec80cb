"""Log-probabilities of chosen tokens, without ever holding the float32 logits of the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

MAX_LOGITS, MAX_LOGITS_ON_GPU = 2**27, 2**28
"""Float32 logits held at once (512 MiB, 1 GiB): the chunk of tokens is this over the vocabulary size.

Each chunk reads the whole weight, and reads and writes its gradient: on a GPU that is what small chunks would wait for. The
last chunk's probabilities stay for the backward pass, which begins with them: one product in four is spared for that chunk,
and nothing more is held than each chunk takes anyway.
"""
PART = 32
"""Tokens whose entropy is computed together, which takes further tensors of their logits' size."""


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    chunk_size: int | None = None,
    banned_ids: Tensor | None = None,
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor]:
    """log softmax(hidden @ weight.T / temperature) at `targets`, and the entropy of that distribution, in float32.

    Args:
        hidden: `[N, H]`, the last hidden state before each target token.
        weight: `[V, H]`, the output embedding.
        targets: `[N]` token ids.
        chunk_size: tokens whose logits exist at the same time; by default `default_chunk` of them.
        banned_ids: `[K]` token ids of probability 0, which the rollout engine never draws.

    Returns:
        `[N]` float32, and H = -Σ p log p (nats) `[N]` float32, or `[0]` where it is not asked for. The backward pass
        computes the logits of each chunk but one again (d logp_t / d logits = onehot_t - softmax, d H / d logits =
        -p (log p + H)) and accumulates the gradient of `weight` in float32.
    """
    chunk = chunk_size or default_chunk(weight)
    compute: Callable[..., tuple[Tensor, Tensor]] = _TokenLogprobs.apply
    return compute(hidden, weight, targets, temperature, chunk, banned_ids, with_entropy)


def default_chunk(weight: Tensor) -> int:
    """Tokens whose logits are to exist at the same time, where the weight `[V, H]` lies."""
    return max(1, (MAX_LOGITS_ON_GPU if weight.is_cuda else MAX_LOGITS) // weight.shape[0])


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        chunk: int,
        banned_ids: Tensor | None,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        logprobs = torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device)
        log_norm = torch.empty_like(logprobs)
        entropy = torch.empty_like(logprobs) if with_entropy else logprobs.new_empty(0)
        probs = None
        for part in chunks(hidden.shape[0], chunk):
            probs = None  # freed before there are further logits
            probs = _logits(hidden[part], weight, temperature, banned_ids)
            target_logits = probs.gather(1, targets[part, None]).squeeze(1)
            largest = probs.amax(dim=1)
            # In place: a plain logsumexp would hold a second buffer of this size.
            total = probs.sub_(largest[:, None]).exp_().sum(dim=1)
            probs.div_(total[:, None])
            log_norm[part] = total.log().add_(largest)
            logprobs[part] = target_logits - log_norm[part]
            if with_entropy:
                entropy[part] = _entropy(probs)
        ctx.last_probs = probs if any(ctx.needs_input_grad) else None
        ctx.save_for_backward(hidden, weight, targets, log_norm, entropy)
        ctx.temperature, ctx.chunk, ctx.banned_ids = temperature, chunk, banned_ids
        ctx.set_materialize_grads(False)  # an entropy that is only logged costs nothing here
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, entropy_grad: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, log_norm, entropy = ctx.saved_tensors
        grad = torch.zeros_like(log_norm) if grad is None else grad
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        grad_weight: Tensor | None = None
        probs, ctx.last_probs = ctx.last_probs, None
        for part in reversed(chunks(hidden.shape[0], ctx.chunk)):
            if probs is None:
                probs = _logits(hidden[part], weight, ctx.temperature, ctx.banned_ids)
                probs.sub_(log_norm[part, None]).exp_()
            own_grad = grad[part] / ctx.temperature
            if entropy_grad is None:
                grad_logits = probs.mul_(-own_grad[:, None])
            else:
                of_entropy = entropy_grad[part] / ctx.temperature
                grad_logits = _with_entropy_gradient(probs, own_grad, of_entropy, entropy[part])
            grad_logits.scatter_add_(1, targets[part, None], own_grad[:, None])
            scaled = grad_logits.to(weight.dtype)
            if grad_hidden is not None:
                grad_hidden[part] = scaled @ weight
            if need_weight:
                grad_weight = _add_product(grad_weight, scaled.t(), hidden[part])
            probs = grad_logits = scaled = None  # freed before there are further logits
        if need_weight:
            grad_weight = torch.zeros_like(weight) if grad_weight is None else grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, *[None] * 5


def chunks(count: int, size: int) -> list[slice]:
    """Slices of `size` tokens, of which the first may be shorter: the last one's probabilities are what is kept."""
    ends = range(count, 0, -size)
    return [slice(max(0, end - size), end) for end in reversed(ends)]


def _add_product(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """total + a b in float32, in place; the product alone if there is no total yet, as zeros of its size take time."""
    if total is None:
        return (a @ b).float()
    return total.addmm_(a, b) if a.dtype == torch.float32 else total.add_(a @ b)


def _entropy(probs: Tensor) -> Tensor:
    """`[n, V]` to `[n]`."""
    entropies = probs.new_empty(probs.shape[0])
    terms = torch.empty_like(probs[:PART])  # the same for all parts
    for part_probs, part_entropies in zip(probs.split(PART), entropies.split(PART), strict=True):
        torch.sum(torch.special.entr(part_probs, out=terms[: len(part_probs)]), dim=1, out=part_entropies)
    return entropies


def _with_entropy_gradient(probs: Tensor, grad: Tensor, entropy_grad: Tensor, entropy: Tensor) -> Tensor:
    """-grad p - entropy_grad p (log p + H) in place of the probabilities `[n, V]`; the others are `[n]`."""
    terms = torch.empty_like(probs[:PART])  # the same for all parts
    for part_probs, *factors in zip(
        *(tensor.split(PART) for tensor in (probs, grad, entropy_grad, entropy)), strict=True
    ):
        own_grad, own_entropy_grad, own_entropy = (factor[:, None] for factor in factors)
        own_terms = torch.special.entr(part_probs, out=terms[: len(part_probs)])  # -p log p
        part_probs.mul_(-(own_grad + own_entropy_grad * own_entropy)).addcmul_(own_terms, own_entropy_grad)
    return probs


def _logits(hidden: Tensor, weight: Tensor, temperature: float, banned_ids: Tensor | None) -> Tensor:
    """`[n, V]` float32, freshly allocated so that the caller may overwrite it; -inf where banned."""
    logits = (hidden @ weight.t()).float()
    if temperature != 1.0:
        logits.div_(temperature)
    return logits if banned_ids is None else logits.index_fill_(1, banned_ids, -torch.inf)


class LogprobHead(nn.Linear):
    """The language model's output layer, extended: with `targets` it returns log-probabilities instead of logits.

    It stays the module that owns the weight, so ZeRO-3 gathers the weight around this call as around any layer's.
    """

    def forward(  # type: ignore[override]  # a Linear that can do more
        self,
        hidden: Tensor,
        targets: Tensor | None = None,
        temperature: float = 1.0,
        banned_ids: Tensor | None = None,
        with_entropy: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        if targets is None:
            return super().forward(hidden)
        logprobs, entropy = token_logprobs(
            hidden, self.weight, targets, temperature=temperature, banned_ids=banned_ids, with_entropy=with_entropy
        )
        return (logprobs, entropy) if with_entropy else logprobs
