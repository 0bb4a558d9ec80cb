"""Protocol of rollout engines, which hold a copy of the policy, complete prompts with it, and can release their memory."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from dsreason.data.chat import EncodedPrompt
    from dsreason.data.types import EncodedSample
    from dsreason.families import Family


class SyncError(RuntimeError):
    """Error for a weight sync that does not deliver every tensor of the policy; the message names the tensors."""


class StaleWeightsError(RuntimeError):
    """Error for a request of completions with a version of the weights that the engine does not hold."""


class RolloutError(RuntimeError):
    """Error for a completion that cannot be used for training; the message names the sample.

    Possible causes: the engine read a different prompt than the trainer; prompt and completion together are too long for the
    engine; the completion ended abnormally or contains a media token.
    """


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling settings for completions. The stop tokens are not included, because the model's generation config defines them.

    Example: `Sampling(temperature=0.9, top_p=0.95, max_completion_length=512, seed=7)`.
    """

    temperature: float = 1.0
    """Sampling temperature; 0 always picks the most probable token (greedy)."""
    top_p: float = 1.0
    """Probability mass for nucleus sampling: only the smallest set of tokens with at least this mass is kept; 1 keeps all."""
    top_k: int = 0
    """Number of most probable tokens from which to sample; 0 keeps all tokens."""
    max_completion_length: int = 64
    """Maximum length of a completion in tokens, including the stop token."""
    seed: int = 0
    """Seed of the random streams. A prompt's stream depends only on the seed and the stream number, not on the batch."""
    repetition_penalty: float = 1.0
    """Number that divides positive logits and multiplies negative logits of tokens already in prompt or completion; 1: none."""
    presence_penalty: float = 0.0
    """Amount subtracted from the logits of tokens that the completion already contains; 0: no penalty."""
    frequency_penalty: float = 0.0
    """Amount subtracted from a token's logit for each earlier occurrence in the completion; 0: no penalty."""

    def __post_init__(self) -> None:
        out_of_range = self.temperature < 0 or not 0 < self.top_p <= 1 or self.top_k < 0 or self.repetition_penalty <= 0
        if out_of_range or self.max_completion_length < 1:
            raise ValueError(f"invalid sampling settings: {self}")

    @property
    def has_penalties(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)


@dataclass(frozen=True)
class CompletionSegment:
    """Consecutive tokens of a completion that were either all sampled or all inserted, such as a tool's result or another turn.

    The policy is trained on sampled tokens. Inserted tokens serve only as context and may include media.
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None
    """Float32 log-probabilities of sampled tokens; None for inserted tokens. The values refer to the sampling distribution: they
    include temperature, top_p, top_k, penalties and the ban on media tokens (greedy decoding counts as temperature 1)."""
    encoded: EncodedSample | None = None
    """Encoding of inserted tokens, with positions that start at 0; None for sampled tokens and for plain text."""


@dataclass(frozen=True)
class Completion:
    """Completion of a prompt: one segment, or several segments if tools or an environment took part.

    If a stop token was sampled, the ids end with it; `text` omits special tokens. `version` is the version of the weights with
    which the completion was sampled.
    """

    segments: tuple[CompletionSegment, ...]
    text: str
    finish_reason: Literal["stop", "length"]
    version: int

    @property
    def ids(self) -> tuple[int, ...]:
        """Ids of all tokens, sampled and inserted."""
        return tuple(token for segment in self.segments for token in segment.ids)

    @property
    def num_tokens(self) -> int:
        """Number of tokens, sampled and inserted, computed without building `ids`."""
        return sum(len(segment.ids) for segment in self.segments)

    @property
    def num_sampled(self) -> int:
        """Number of sampled tokens, which is the length of `logprobs`."""
        return sum(len(segment.logprobs or ()) for segment in self.segments)

    @property
    def logprobs(self) -> tuple[float, ...]:
        """Log-probabilities of the sampled tokens of all segments."""
        return tuple(logprob for segment in self.segments for logprob in segment.logprobs or ())

    @property
    def sampled(self) -> tuple[bool, ...]:
        """Flag for each token in `ids`: True if the policy sampled the token."""
        return tuple(segment.logprobs is not None for segment in self.segments for _ in segment.ids)


def make_single_turn(
    ids: Sequence[int], text: str, logprobs: Sequence[float], finish_reason: Literal["stop", "length"], version: int
) -> Completion:
    """Build a completion whose tokens were all sampled.

    Example: `make_single_turn((1190, 151645), "left", (-0.02, -0.0004), "stop", version=12)`.
    """
    return Completion((CompletionSegment(tuple(ids), tuple(logprobs)),), text, finish_reason, version)


class TensorFingerprints(NamedTuple):
    """Fingerprints of the tensors that a rank's engine uses: tensor name → fingerprint."""

    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]


class RolloutEngine(Protocol):
    """Rollout engine. Every rank calls wake, find_retained, sync, generate (any number of times) and sleep, in this order."""

    dtype: torch.dtype
    """Data type of the weights."""
    max_num_seqs: int
    """Number of prompts that the engine completes at the same time; with fewer prompts, the engine is partly idle."""
    reads_pixels: bool
    """Whether the engine uses the `mm_kwargs` of prompts; if False, it processes the media itself."""

    @property
    def keeps_weights(self) -> bool:
        """Whether the weights survive `sleep`, so that `generate` works after `wake` without a sync."""

    def wake(self) -> None:
        """Allocate the memory that generation needs.

        Raises:
            SyncError: a buffer did not survive the sleep.
        """

    def find_retained(self, names: Collection[str]) -> set[str]:
        """Return the subset of `names` (frozen parameters) whose values the engine still holds, so that `sync` can skip them.

        All ranks must call this method together, between `wake` and `sync`. The result is the same on every rank. Frozen
        parameters that must be sent again are logged, but only once.
        """

    def sync(self, weights: Iterator[tuple[str, Tensor]], version: int, retained: Collection[str] = ()) -> None:
        """Replace the engine's weights with the policy's.

        All ranks must call this method together, and each exhausts an iterator over the same gathered (full) tensors.

        Args:
            weights: parameter names (as in `named_parameters()` of the Hugging Face model) and tensors.
            version: version of the weights.
            retained: names that `find_retained` returned, which `weights` omits.

        Raises:
            SyncError: a tensor is missing or unknown, has a different shape, or was not actually retained; the engine then holds
                no usable weights.
        """

    def fingerprints(self) -> TensorFingerprints:
        """Return the fingerprints of this rank's tensors; the engine must be awake."""

    def generate(
        self,
        prompts: Sequence[EncodedPrompt],
        sampling: Sampling,
        *,
        version: int,
        streams: Sequence[int] | None = None,
    ) -> list[Completion]:
        """Complete this rank's prompts with the weights of `version`; return the completions in the order of the prompts.

        Args:
            streams: random-stream number of each prompt; by default, 0, 1, …. If the numbers are unique across ranks, a
                prompt's completion does not depend on the rank that samples it.

        Raises:
            StaleWeightsError: the engine holds a different version of the weights, or no weights.
        """
        streams = range(len(prompts)) if streams is None else streams
        completions = dict(self.iter_completions(prompts, [sampling] * len(prompts), version=version, streams=streams))
        return [completions[i] for i in range(len(prompts))]

    def iter_completions(
        self, prompts: Sequence[EncodedPrompt], samplings: Sequence[Sampling], *, version: int, streams: Sequence[int]
    ) -> Iterator[tuple[int, Completion]]:
        """Yield the index and the completion of each prompt as soon as the completion is finished.

        Each prompt has its own sampling settings. If several ranks share the weights, all of them must exhaust the iterator.
        """

    def sleep(self) -> None:
        """Release the engine's memory. The weights are considered lost unless the engine `keeps_weights`."""


def find_media_token_ids(tokenizer: PreTrainedTokenizerBase, family: Family) -> list[int]:
    """Return the ids of the family's media tokens that the vocabulary contains; these tokens are never sampled."""
    vocabulary = tokenizer.get_vocab()
    return sorted(vocabulary[token] for token in family.tokens.media if token in vocabulary)


def check_no_media_tokens(
    sample_id: str, ids: Sequence[int], banned_ids: Collection[int], tokenizer: PreTrainedTokenizerBase
) -> None:
    """Raise RolloutError if a completion contains a media token, although the engine must not sample these tokens."""
    if media := set(ids) & set(banned_ids):
        names = ", ".join(tokenizer.convert_ids_to_tokens(sorted(media)))
        raise RolloutError(f"sample {sample_id!r}: the completion contains {names}, but media tokens are banned")


def check_version(requested: int, current: int | None) -> None:
    """Raise StaleWeightsError if the engine's weights have another version (`current`) than the requested one."""
    if requested != current:
        raise StaleWeightsError(
            f"completions with weights version {requested} were requested, but the engine holds "
            f"{'no weights' if current is None else f'version {current}'}; call sync before generate"
        )


def draw_random_streams(sampling: Sampling, streams: Sequence[int]) -> NDArray[np.float64]:
    """Draw uniform random numbers in [0, 1), `[len(streams), max_completion_length]`, without using a global generator."""
    shape = sampling.max_completion_length
    return np.stack([np.random.default_rng((sampling.seed, stream)).random(shape) for stream in streams])
