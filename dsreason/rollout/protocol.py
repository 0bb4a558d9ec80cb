"""What a rollout engine does: hold a copy of the policy, complete prompts with it, and give its memory back."""

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
    """A weight sync that did not bring every tensor of the policy; the text names the tensors."""


class StaleWeightsError(RuntimeError):
    """Completions were asked of weights that the engine does not hold."""


class RolloutError(RuntimeError):
    """A completion that cannot be trained on; the text names the sample.

    The engine read another prompt than the trainer does, has no room for it, or drew a media token.
    """


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How completions are drawn. The stop tokens are those of the model's generation config.

    Example: `Sampling(temperature=0.9, top_p=0.95, max_completion_length=512, seed=7)`.
    """

    temperature: float = 1.0
    """0 takes the most probable token (greedy)."""
    top_p: float = 1.0
    """Sample from the fewest tokens whose probability reaches this; 1 keeps all."""
    top_k: int = 0
    """Sample from this many most probable tokens; 0 keeps all."""
    max_completion_length: int = 64
    """Longest completion in tokens, the stop token included."""
    seed: int = 0
    """A prompt draws from the random stream (seed, its stream's number), whatever it is batched with."""
    repetition_penalty: float = 1.0
    """Divides the positive logits of tokens that the prompt or the completion holds, and multiplies the negative ones."""
    presence_penalty: float = 0.0
    """Taken from the logits of tokens that the completion holds."""
    frequency_penalty: float = 0.0
    """Taken from the logits of tokens as often as the completion holds them."""

    def __post_init__(self) -> None:
        out_of_range = self.temperature < 0 or not 0 < self.top_p <= 1 or self.top_k < 0 or self.repetition_penalty <= 0
        if out_of_range or self.max_completion_length < 1:
            raise ValueError(f"impossible sampling settings: {self}")

    @property
    def has_penalties(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)


@dataclass(frozen=True)
class CompletionSegment:
    """Tokens of a completion that the policy sampled in one go, or that it was given: the answer of a tool, a further turn.

    Sampled tokens are trained. Given ones are only read, and may bring media.
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None
    """Of sampled tokens, under the distribution they were drawn from (temperature, top_p, top_k, penalties and the banned
    media tokens applied; greedy: temperature 1), in float32. None: the tokens were given."""
    encoded: EncodedSample | None = None
    """Given tokens as the model reads them, with positions that begin at 0; None: text."""


@dataclass(frozen=True)
class Completion:
    """One answer to a prompt, of one segment or, if tools or an environment took part, of several.

    The ids end with the stop token if there is one; `text` has no special tokens. `version` is that of the weights.
    """

    segments: tuple[CompletionSegment, ...]
    text: str
    finish_reason: Literal["stop", "length"]
    version: int

    @property
    def ids(self) -> tuple[int, ...]:
        """All tokens, sampled and given."""
        return tuple(token for segment in self.segments for token in segment.ids)

    @property
    def num_tokens(self) -> int:
        """Number of `ids`, without putting them together."""
        return sum(len(segment.ids) for segment in self.segments)

    @property
    def num_sampled(self) -> int:
        """Number of `logprobs`."""
        return sum(len(segment.logprobs or ()) for segment in self.segments)

    @property
    def logprobs(self) -> tuple[float, ...]:
        """Of the sampled tokens of all segments."""
        return tuple(logprob for segment in self.segments for logprob in segment.logprobs or ())

    @property
    def sampled(self) -> tuple[bool, ...]:
        """For each of `ids`, whether the policy sampled it."""
        return tuple(segment.logprobs is not None for segment in self.segments for _ in segment.ids)


def single_turn(
    ids: Sequence[int], text: str, logprobs: Sequence[float], finish_reason: Literal["stop", "length"], version: int
) -> Completion:
    """Make a completion that was sampled as a whole.

    Example: `single_turn((1190, 151645), "left", (-0.02, -0.0004), "stop", version=12)`.
    """
    return Completion((CompletionSegment(tuple(ids), tuple(logprobs)),), text, finish_reason, version)


class TensorFingerprints(NamedTuple):
    """What a rank's engine computes with: the fingerprint of each tensor, by its name."""

    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]


class RolloutEngine(Protocol):
    """The order of calls is wake, retained, sync, generate (any number of times), sleep, on every rank alike."""

    dtype: torch.dtype
    """Of the weights."""
    max_num_seqs: int
    """Prompts that it completes at the same time: a call with fewer leaves it idle in part."""
    reads_pixels: bool
    """Whether it reads `mm_kwargs` of prompts; one that processes the media itself does not."""

    @property
    def keeps_weights(self) -> bool:
        """Whether the weights outlive `sleep`, so that their version can be generated from after `wake`."""

    def wake(self) -> None:
        """Takes the memory that generation needs. Raises `SyncError` where a buffer did not outlive the sleep."""

    def retained(self, names: Collection[str]) -> set[str]:
        """Those of `names` (frozen parameters) whose values, last sent, are still there: `sync` can do without them.

        Collective, between `wake` and `sync`; the same answer on every rank. Logs once what has to be sent again.
        """

    def sync(self, weights: Iterator[tuple[str, Tensor]], version: int, retained: Collection[str] = ()) -> None:
        """Replaces every weight by the policy's, but for those `retained`, which `weights` leaves out.

        Collective: every rank iterates the same gathered (full) tensors, to the end. Names are those that
        `named_parameters()` of the Hugging Face model gives in memory. Raises `SyncError` when a tensor is missing,
        unknown, of another shape or not retained after all; the engine then holds no version.
        """

    def fingerprints(self) -> TensorFingerprints:
        """Fingerprints of this rank's tensors, while awake."""

    def generate(
        self,
        prompts: Sequence[EncodedPrompt],
        sampling: Sampling,
        *,
        version: int,
        streams: Sequence[int] | None = None,
    ) -> list[Completion]:
        """Completes this rank's own prompts with the weights of `version`, in the order of the prompts.

        `streams` numbers the prompts' random streams, 0, 1, … by default: with numbers that are unique over all ranks,
        a prompt's completion does not depend on the rank that draws it. Raises `StaleWeightsError` when the engine
        holds other weights than `version`, or none.
        """
        streams = range(len(prompts)) if streams is None else streams
        completions = dict(self.as_completed(prompts, [sampling] * len(prompts), version=version, streams=streams))
        return [completions[i] for i in range(len(prompts))]

    def as_completed(
        self, prompts: Sequence[EncodedPrompt], samplings: Sequence[Sampling], *, version: int, streams: Sequence[int]
    ) -> Iterator[tuple[int, Completion]]:
        """`generate` with a setting for each prompt, giving each completion with the number of its prompt once it is there.

        Where ranks hold the weights together, all of them go through it to the end.
        """

    def sleep(self) -> None:
        """Gives the memory back. The weights count as lost, unless the engine `keeps_weights`."""


def media_token_ids(tokenizer: PreTrainedTokenizerBase, family: Family) -> list[int]:
    """Ids of the family's media tokens, which are never sampled; those that the vocabulary has."""
    vocabulary = tokenizer.get_vocab()
    return sorted(vocabulary[token] for token in family.tokens.media if token in vocabulary)


def check_no_media_tokens(
    sample_id: str, ids: Sequence[int], banned_ids: Collection[int], tokenizer: PreTrainedTokenizerBase
) -> None:
    """Raise RolloutError if a completion holds a media token in spite of its ban."""
    if media := set(ids) & set(banned_ids):
        names = ", ".join(tokenizer.convert_ids_to_tokens(sorted(media)))
        raise RolloutError(f"sample {sample_id!r}: the completion holds {names}, which is banned")


def check_version(asked: int, current: int | None) -> None:
    """Raise StaleWeightsError if completions of one version are asked of another, or of none."""
    if asked != current:
        raise StaleWeightsError(
            f"completions of weights version {asked} were asked for, the engine holds "
            f"{'no weights' if current is None else f'version {current}'}: sync before generate"
        )


def random_streams(sampling: Sampling, streams: Sequence[int]) -> NDArray[np.float64]:
    """`[len(streams), max_completion_length]` uniform numbers in [0, 1), one row a stream; no global RNG involved."""
    shape = sampling.max_completion_length
    return np.stack([np.random.default_rng((sampling.seed, stream)).random(shape) for stream in streams])
