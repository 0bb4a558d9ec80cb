"""The protocol of rollout engines, which hold a copy of the policy, complete prompts with it, and release its memory."""

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
    """A weight sync did not deliver every tensor of the policy; the message names the tensors."""


class StaleWeightsError(RuntimeError):
    """Completions were requested for weights that the engine does not hold."""


class RolloutError(RuntimeError):
    """A completion cannot be trained on; the message names the sample.

    The engine read a different prompt than the trainer, has no room for it, or sampled a media token.
    """


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Settings for sampling completions. The stop tokens are those of the model's generation config.

    Example: `Sampling(temperature=0.9, top_p=0.95, max_completion_length=512, seed=7)`.
    """

    temperature: float = 1.0
    """0 takes the most probable token (greedy)."""
    top_p: float = 1.0
    """Sample from the fewest tokens whose probability reaches this; 1 keeps all."""
    top_k: int = 0
    """Sample from this number of most probable tokens; 0 keeps all."""
    max_completion_length: int = 64
    """Longest completion in tokens, the stop token included."""
    seed: int = 0
    """Seed of the random streams: a prompt draws from (seed, number of its stream), whatever it is batched with."""
    repetition_penalty: float = 1.0
    """Divisor of positive logits, and factor of negative ones, for tokens that the prompt or completion already contains."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens that the completion already contains."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit once for each time that the completion already contains the token."""

    def __post_init__(self) -> None:
        out_of_range = self.temperature < 0 or not 0 < self.top_p <= 1 or self.top_k < 0 or self.repetition_penalty <= 0
        if out_of_range or self.max_completion_length < 1:
            raise ValueError(f"impossible sampling settings: {self}")

    @property
    def has_penalties(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)


@dataclass(frozen=True)
class CompletionSegment:
    """Consecutive tokens of a completion that were all sampled, or all inserted: the result of a tool, another turn.

    Sampled tokens are trained on. Inserted ones are only read, and may come with media.
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None
    """Float32 log-probabilities of sampled tokens; None for inserted ones. They refer to the sampling distribution, with
    temperature, top_p, top_k, penalties and the ban on media tokens applied (greedy: temperature 1)."""
    encoded: EncodedSample | None = None
    """Inserted tokens as the model reads them, with positions that begin at 0; None if they are plain text."""


@dataclass(frozen=True)
class Completion:
    """An answer to a prompt: one segment, or several if tools or an environment took part.

    The ids end with the stop token if there is one; `text` has no special tokens. `version` is that of the weights.
    """

    segments: tuple[CompletionSegment, ...]
    text: str
    finish_reason: Literal["stop", "length"]
    version: int

    @property
    def ids(self) -> tuple[int, ...]:
        """All tokens, sampled and inserted."""
        return tuple(token for segment in self.segments for token in segment.ids)

    @property
    def num_tokens(self) -> int:
        """Number of `ids`, computed without concatenating them."""
        return sum(len(segment.ids) for segment in self.segments)

    @property
    def num_sampled(self) -> int:
        """Number of `logprobs`."""
        return sum(len(segment.logprobs or ()) for segment in self.segments)

    @property
    def logprobs(self) -> tuple[float, ...]:
        """Log-probabilities of the sampled tokens of all segments."""
        return tuple(logprob for segment in self.segments for logprob in segment.logprobs or ())

    @property
    def sampled(self) -> tuple[bool, ...]:
        """Flags for `ids`: True if the policy sampled the token."""
        return tuple(segment.logprobs is not None for segment in self.segments for _ in segment.ids)


def make_single_turn(
    ids: Sequence[int], text: str, logprobs: Sequence[float], finish_reason: Literal["stop", "length"], version: int
) -> Completion:
    """Make a completion whose tokens were all sampled.

    Example: `make_single_turn((1190, 151645), "left", (-0.02, -0.0004), "stop", version=12)`.
    """
    return Completion((CompletionSegment(tuple(ids), tuple(logprobs)),), text, finish_reason, version)


class TensorFingerprints(NamedTuple):
    """Fingerprints of the tensors that a rank's engine computes with, by name."""

    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]


class RolloutEngine(Protocol):
    """A rollout engine. Every rank calls wake, retained, sync, generate (any number of times) and sleep, in this order."""

    dtype: torch.dtype
    """Data type of the weights."""
    max_num_seqs: int
    """Number of prompts completed at the same time; calls with fewer prompts leave the engine partly idle."""
    reads_pixels: bool
    """True if the engine reads `mm_kwargs` of prompts, False if it processes the media itself."""

    @property
    def keeps_weights(self) -> bool:
        """True if the weights survive `sleep`, so that their version can generate after `wake`."""

    def wake(self) -> None:
        """Allocate the memory that generation needs.

        Raises:
            SyncError: a buffer did not survive the sleep.
        """

    def find_retained(self, names: Collection[str]) -> set[str]:
        """Return those of `names` (frozen parameters) whose values the engine still holds, so that `sync` can skip them.

        Collective, between `wake` and `sync`; the result is the same on every rank. Log once which must be sent again.
        """

    def sync(self, weights: Iterator[tuple[str, Tensor]], version: int, retained: Collection[str] = ()) -> None:
        """Replace every weight by the policy's, except the `find_retained` ones, which `weights` leaves out.

        Collective: every rank iterates the same gathered (full) tensors, to the end. Names are those of
        `named_parameters()` of the Hugging Face model in memory.

        Raises:
            SyncError: a tensor is missing, unknown, of another shape, or was not retained after all; the engine then holds
                no version.
        """

    def fingerprints(self) -> TensorFingerprints:
        """Return the fingerprints of this rank's tensors, while awake."""

    def generate(
        self,
        prompts: Sequence[EncodedPrompt],
        sampling: Sampling,
        *,
        version: int,
        streams: Sequence[int] | None = None,
    ) -> list[Completion]:
        """Complete this rank's prompts with the weights of `version`, in the order of the prompts.

        Args:
            streams: numbers of the prompts' random streams, 0, 1, … by default. If they are unique over all ranks, a
                prompt's completion does not depend on the rank that samples it.

        Raises:
            StaleWeightsError: the engine holds other weights than `version`, or none.
        """
        streams = range(len(prompts)) if streams is None else streams
        completions = dict(self.iter_completions(prompts, [sampling] * len(prompts), version=version, streams=streams))
        return [completions[i] for i in range(len(prompts))]

    def iter_completions(
        self, prompts: Sequence[EncodedPrompt], samplings: Sequence[Sampling], *, version: int, streams: Sequence[int]
    ) -> Iterator[tuple[int, Completion]]:
        """Yield each completion with the index of its prompt as soon as it is finished; settings are per prompt.

        If several ranks hold the weights together, all of them must exhaust the iterator.
        """

    def sleep(self) -> None:
        """Release the memory. The weights count as lost, unless the engine `keeps_weights`."""


def find_media_token_ids(tokenizer: PreTrainedTokenizerBase, family: Family) -> list[int]:
    """Return the ids of the family's media tokens in the vocabulary; they are never sampled."""
    vocabulary = tokenizer.get_vocab()
    return sorted(vocabulary[token] for token in family.tokens.media if token in vocabulary)


def check_no_media_tokens(
    sample_id: str, ids: Sequence[int], banned_ids: Collection[int], tokenizer: PreTrainedTokenizerBase
) -> None:
    """Raise RolloutError if a completion contains a media token despite the ban."""
    if media := set(ids) & set(banned_ids):
        names = ", ".join(tokenizer.convert_ids_to_tokens(sorted(media)))
        raise RolloutError(f"sample {sample_id!r}: the completion holds {names}, which is banned")


def check_version(requested: int, current: int | None) -> None:
    """Raise StaleWeightsError if the engine does not hold the requested version of the weights."""
    if requested != current:
        raise StaleWeightsError(
            f"completions of weights version {requested} were requested, but the engine holds "
            f"{'no weights' if current is None else f'version {current}'}; call sync before generate"
        )


def draw_random_streams(sampling: Sampling, streams: Sequence[int]) -> NDArray[np.float64]:
    """Draw uniform numbers in [0, 1), `[len(streams), max_completion_length]`, one row per stream, without global RNGs."""
    shape = sampling.max_completion_length
    return np.stack([np.random.default_rng((sampling.seed, stream)).random(shape) for stream in streams])
