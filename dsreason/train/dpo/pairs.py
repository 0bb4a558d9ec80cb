"""Encoding of preference pairs (a better and a worse answer to the same prompt), and their division into micro-batches."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from PIL import Image

from dsreason.config.schema_dpo import DPOConfig
from dsreason.data.chat import EncodedPrompt, Encoder
from dsreason.data.collate import join_parent
from dsreason.data.messages import list_media_parts
from dsreason.data.micro_batches import fit_first
from dsreason.data.types import EncodedSample, Message, Sample
from dsreason.errors import DataError

GIVEN = ("ref_chosen_logprob", "ref_rejected_logprob")
"""Row fields that contain the reference log-probabilities; data adapters copy them to `sample.meta`."""
LOWEST_LOGPROB = -1e12
"""Lower bound for an answer's log-probability: that of a million tokens, each far less probable than models can represent."""
ROUNDING = 1e-3
"""Amount by which rounding errors may raise a sum of log-probabilities above 0."""
LOGPROB = f"the log-probability of an answer, a number from {LOWEST_LOGPROB:g} to 0"


@dataclass(frozen=True)
class Pair:
    """A chosen and a rejected answer, each with the prompt as its parent."""

    id: str
    chosen: EncodedSample
    rejected: EncodedSample
    fingerprint: str
    """Hash of the prompt's tokens and media and of both answers."""
    ref_logprobs: tuple[float, float] | None = None
    """Log-probabilities of both answers under the reference, as read from the row; None if the row has none."""

    @property
    def lengths(self) -> tuple[int, int]:
        """Number of tokens with a loss in the chosen answer, and in the rejected answer."""
        return int(self.chosen.loss_mask.sum()), int(self.rejected.loss_mask.sum())

    def samples(self, *, share_prompt: bool) -> list[EncodedSample]:
        """Return both answers as training samples that share the prompt as their parent or each start with a copy of it."""
        both = [self.chosen, self.rejected]
        return both if share_prompt else [join_parent(sample) for sample in both]

    def size(self, config: DPOConfig) -> int:
        """Count the tokens, including padding, in a forward pass over only this pair."""
        lengths = [len(self.chosen), len(self.rejected)]
        prompt = len(self.chosen.parent or ())
        if not config.train.packing:
            return 2 * (prompt + max(lengths))
        return sum(lengths) + (prompt if config.shares_prompts else 2 * prompt)


class PairEncoder(Encoder):
    """An encoder for preference rows. The length of a row is the total length of its prompt and both answers."""

    def measure(self, sample: Sample) -> int:
        """Count a row's tokens, reading only the headers of its media; the result may exceed `max_length`."""
        prompt, better, worse = split_conversations(sample)
        _, segments = self._render_prompt(prompt)
        prompt_ids = [token for segment in segments for token in segment.ids]
        answers = [self._render_answer(prompt_ids, conversation)[0] for conversation in (better, worse)]
        check_answers_differ(sample, *answers)
        return self._count(prompt, segments) + sum(map(len, answers))

    def encode_pair(self, sample: Sample) -> Pair:
        """Encode a preference row.

        Raises:
            DataError: the row is unusable.
            SampleTooLong: the row has more than `max_length` tokens.
        """
        prompt, better, worse = split_conversations(sample)
        reference_logprobs = read_reference_logprobs(sample)
        encoded = self.encode_prompt(prompt)
        better_answer, worse_answer = self.encode_answer(encoded, better), self.encode_answer(encoded, worse)
        check_answers_differ(sample, better_answer.input_ids.tolist(), worse_answer.input_ids.tolist())
        self.check_length(sample, len(encoded.encoded) + len(better_answer) + len(worse_answer))
        digest = compute_fingerprint(encoded, better_answer, worse_answer)
        return Pair(sample.id, better_answer, worse_answer, digest, reference_logprobs)


def build_pair_encoder(encoder: Encoder) -> PairEncoder:
    return PairEncoder(**vars(encoder))


def split_conversations(sample: Sample) -> tuple[Sample, Sample, Sample]:
    """Return a row's prompt, its better conversation and its worse conversation.

    The prompt consists of the leading messages that both conversations share; each conversation continues it with an answer.

    Raises:
        DataError: the row has only one conversation, or its conversations do not diverge where the assistant answers the user.
    """
    better, worse = sample.messages, sample.rejected
    if worse is None:
        raise DataError(
            f"sample {sample.id!r}: field 'rejected' is missing; a preference row needs a chosen and a rejected answer"
        )
    if better == worse:
        raise build_same_answer_error(sample)
    start = count_common_messages(better, worse)
    for field, messages in (("chosen", better), ("rejected", worse)):
        location = f"sample {sample.id!r}: field {field!r}"
        if start == len(messages):
            raise DataError(f"{location} is only the beginning of the other conversation; add a different answer")
        if start == 0 or [message["role"] for message in messages[start - 1 : start + 1]] != ["user", "assistant"]:
            raise DataError(
                f"{location}, message {start}: chosen and rejected diverge here, but not at an assistant answer to a user "
                "message; both must answer the same prompt"
            )
        if list_media_parts(messages[start:]):
            raise DataError(
                f"{location}: images and videos must come before the diverging answers; move them to the prompt"
            )
    prompt = replace(sample, messages=better[:start], rejected=None)
    return prompt, replace(prompt, messages=better), replace(prompt, messages=worse)


def count_common_messages(better: Sequence[Message], worse: Sequence[Message]) -> int:
    """Return the number of leading messages that both conversations share."""
    pairs = zip(better, worse, strict=False)
    return next((i for i, (message, other) in enumerate(pairs) if message != other), min(len(better), len(worse)))


def check_answers_differ(sample: Sample, chosen: list[int], rejected: list[int]) -> None:
    """Raise DataError if both answers consist of the same tokens.

    Different texts may yield the same tokens, for example because the chat template strips trailing spaces.
    """
    if chosen == rejected:
        raise build_same_answer_error(sample)


def build_same_answer_error(sample: Sample) -> DataError:
    return DataError(
        f"sample {sample.id!r}: fields 'chosen' and 'rejected' contain the same answer; correct one of them"
    )


def read_reference_logprobs(sample: Sample) -> tuple[float, float] | None:
    """Read both answers' reference log-probabilities from a row; return None if the row has none."""
    logprobs = {name: sample.meta[name] for name in GIVEN if sample.meta.get(name) is not None}
    if not logprobs:
        return None
    for name in GIVEN:
        if not is_logprob(logprobs.get(name)):
            raise DataError(
                f"sample {sample.id!r}: field {name!r} is {logprobs.get(name)!r:.100}; it must be {LOGPROB}"
            )
    return float(logprobs[GIVEN[0]]), float(logprobs[GIVEN[1]])


def is_logprob(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and LOWEST_LOGPROB <= value <= ROUNDING


def compute_fingerprint(prompt: EncodedPrompt, chosen: EncodedSample, rejected: EncodedSample) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for sample in (prompt.encoded, chosen, rejected):
        digest.update(b"%d " % len(sample) + sample.input_ids.numpy().tobytes())
    for media_item in prompt.media:
        digest.update(media_item.tobytes() if isinstance(media_item, Image.Image) else media_item[0].tobytes())
    return digest.hexdigest()


def cut_pairs(pairs: Sequence[Pair], config: DPOConfig) -> list[list[Pair]]:
    """Divide pairs into micro-batches by number of tokens if the config sets a token budget, otherwise by number of pairs.

    Raises:
        DataError: a single pair exceeds the token budget.
    """
    budget, key = config.token_budget
    ordered = sorted(pairs, key=lambda pair: pair.size(config), reverse=True)
    if budget is None:
        size = config.train.micro_batch_size or 1
        return [ordered[i : i + size] for i in range(0, len(ordered), size)]
    for pair in ordered:
        if pair.size(config) > budget:
            raise DataError(
                f"sample {pair.id!r}: its pair has {pair.size(config)} tokens, but both answers share one forward pass, whose "
                f"maximum is {key} ({budget}); raise {key}, or lower model.max_length and set model.on_too_long"
            )
    if config.train.packing:
        return fit_first([(pair.size(config), [pair]) for pair in ordered], budget)
    groups: list[list[Pair]] = []
    for pair in ordered:
        if not groups or (len(groups[-1]) + 1) * groups[-1][0].size(config) > budget:
            groups.append([])
        groups[-1].append(pair)
    return groups
