"""Log-probabilities of target tokens, computed without storing the float32 logits of an entire batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

MAX_LOGITS, MAX_LOGITS_ON_GPU = 2**27, 2**28
"""Maximum number of float32 logits in memory (512 MiB, or 1 GiB on a GPU). Divided by the vocabulary size, the maximum gives the
number of tokens in a chunk.

For every chunk, the entire weight is read, and its gradient is read and written, so small chunks are slow on a GPU. The backward
pass starts with the last chunk, whose probabilities the forward pass keeps; this saves one of the chunk's four matrix products,
and takes no more memory than any other chunk needs.
"""
PART = 32
"""Number of tokens whose entropy is computed at a time; computing it needs a second tensor as large as the tokens' logits."""


def compute_token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    chunk_size: int | None = None,
    banned_ids: Tensor | None = None,
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute log softmax(hidden @ weight.T / temperature) at `targets` and the entropy of that distribution, in float32.

    Args:
        hidden: `[N, H]`, the last hidden state before each target token.
        weight: `[V, H]`, the output embedding.
        targets: `[N]` token ids.
        chunk_size: number of tokens whose logits are in memory at the same time; by default, the result of `choose_chunk_size`.
        banned_ids: `[K]` ids of tokens that the rollout engine never samples; their probability is 0.

    Returns:
        The log-probabilities `[N]` float32, and the entropies H = -Σ p log p in nats, `[N]` float32 (`[0]` unless `with_entropy`
        is set). The backward pass uses d logp_t / d logits = onehot_t - softmax and d H / d logits = -p (log p + H). It
        recomputes the logits of each chunk except the last, and accumulates the gradient of `weight` in float32.
    """
    chunk = chunk_size or choose_chunk_size(weight)
    compute: Callable[..., tuple[Tensor, Tensor]] = _TokenLogprobs.apply
    return compute(hidden, weight, targets, temperature, chunk, banned_ids, with_entropy)


def choose_chunk_size(weight: Tensor) -> int:
    """Return the number of tokens per chunk, which depends on the vocabulary and device of the weight `[V, H]`."""
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
        for part in split_tokens(hidden.shape[0], chunk):
            probs = None  # freed before the next logits are allocated
            probs = _compute_logits(hidden[part], weight, temperature, banned_ids)
            target_logits = probs.gather(1, targets[part, None]).squeeze(1)
            largest = probs.amax(dim=1)
            # The operations work in place; a plain logsumexp would need a second buffer as large as the logits.
            total = probs.sub_(largest[:, None]).exp_().sum(dim=1)
            probs.div_(total[:, None])
            log_norm[part] = total.log().add_(largest)
            logprobs[part] = target_logits - log_norm[part]
            if with_entropy:
                entropy[part] = _compute_entropy(probs)
        ctx.last_probs = probs if any(ctx.needs_input_grad) else None
        ctx.save_for_backward(hidden, weight, targets, log_norm, entropy)
        ctx.temperature, ctx.chunk, ctx.banned_ids = temperature, chunk, banned_ids
        ctx.set_materialize_grads(False)  # an entropy that is only logged then adds no work to the backward pass
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, entropy_grad: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, log_norm, entropy = ctx.saved_tensors
        grad = torch.zeros_like(log_norm) if grad is None else grad
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        grad_weight: Tensor | None = None
        probs, ctx.last_probs = ctx.last_probs, None
        for part in reversed(split_tokens(hidden.shape[0], ctx.chunk)):
            if probs is None:
                probs = _compute_logits(hidden[part], weight, ctx.temperature, ctx.banned_ids)
                probs.sub_(log_norm[part, None]).exp_()
            logprob_grad = grad[part] / ctx.temperature
            if entropy_grad is None:
                grad_logits = probs.mul_(-logprob_grad[:, None])
            else:
                part_entropy_grad = entropy_grad[part] / ctx.temperature
                grad_logits = _add_entropy_gradient(probs, logprob_grad, part_entropy_grad, entropy[part])
            grad_logits.scatter_add_(1, targets[part, None], logprob_grad[:, None])
            scaled = grad_logits.to(weight.dtype)
            if grad_hidden is not None:
                grad_hidden[part] = scaled @ weight
            if need_weight:
                grad_weight = _add_product(grad_weight, scaled.t(), hidden[part])
            probs = grad_logits = scaled = None  # freed before the next logits are allocated
        if need_weight:
            grad_weight = torch.zeros_like(weight) if grad_weight is None else grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, *[None] * 5


def split_tokens(count: int, size: int) -> list[slice]:
    """Return slices of `size` tokens. Only the first may be shorter: the last, whose probabilities are kept, must be full."""
    ends = range(count, 0, -size)
    return [slice(max(0, end - size), end) for end in reversed(ends)]


def _add_product(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """Add a @ b to `total` in place, in float32. If `total` is None, return the product, which saves a tensor of zeros."""
    if total is None:
        return (a @ b).float()
    return total.addmm_(a, b) if a.dtype == torch.float32 else total.add_(a @ b)


def _compute_entropy(probs: Tensor) -> Tensor:
    """Compute the entropies `[n]` of the probabilities `[n, V]`."""
    entropies = probs.new_empty(probs.shape[0])
    terms = torch.empty_like(probs[:PART])  # reused by all parts
    for part_probs, part_entropies in zip(probs.split(PART), entropies.split(PART), strict=True):
        torch.sum(torch.special.entr(part_probs, out=terms[: len(part_probs)]), dim=1, out=part_entropies)
    return entropies


def _add_entropy_gradient(probs: Tensor, grad: Tensor, entropy_grad: Tensor, entropy: Tensor) -> Tensor:
    """Overwrite the probabilities `[n, V]` with -grad p - entropy_grad p (log p + H); the other arguments are `[n]`."""
    terms = torch.empty_like(probs[:PART])  # reused by all parts
    for part_probs, *factors in zip(
        *(tensor.split(PART) for tensor in (probs, grad, entropy_grad, entropy)), strict=True
    ):
        part_grad, part_entropy_grad, part_entropy = (factor[:, None] for factor in factors)
        part_terms = torch.special.entr(part_probs, out=terms[: len(part_probs)])  # -p log p
        part_probs.mul_(-(part_grad + part_entropy_grad * part_entropy)).addcmul_(part_terms, part_entropy_grad)
    return probs


def _compute_logits(hidden: Tensor, weight: Tensor, temperature: float, banned_ids: Tensor | None) -> Tensor:
    """Compute the logits `[n, V]` in float32, with -inf at banned ids. The caller may overwrite them."""
    logits = (hidden @ weight.t()).float()
    if temperature != 1.0:
        logits.div_(temperature)
    return logits if banned_ids is None else logits.index_fill_(1, banned_ids, -torch.inf)


class LogprobHead(nn.Linear):
    """Output layer of the language model that returns log-probabilities instead of logits if `targets` are passed.

    The weight belongs to this module, so ZeRO-3 gathers it for the call, as it does for any other layer.
    """

    def forward(  # type: ignore[override]  # extends the signature of Linear
        self,
        hidden: Tensor,
        targets: Tensor | None = None,
        temperature: float = 1.0,
        banned_ids: Tensor | None = None,
        with_entropy: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        if targets is None:
            return super().forward(hidden)
        logprobs, entropy = compute_token_logprobs(
            hidden, self.weight, targets, temperature=temperature, banned_ids=banned_ids, with_entropy=with_entropy
        )
        return (logprobs, entropy) if with_entropy else logprobs
