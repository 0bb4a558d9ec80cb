"""A better and a worse answer to one prompt, as the model reads them, and cut into micro-batches."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from PIL import Image

from dsreason.config.schema_dpo import DPOConfig
from dsreason.data.chat import EncodedPrompt, Encoder
from dsreason.data.collate import joined
from dsreason.data.messages import media_parts
from dsreason.data.micro_batches import first_fit
from dsreason.data.types import EncodedSample, Message, Sample
from dsreason.errors import DataError

GIVEN = ("ref_chosen_logprob", "ref_rejected_logprob")
"""Fields of a row, which adapters keep in `sample.meta`."""
LOWEST_LOGPROB = -1e12
"""Of an answer: a million tokens, each far less probable than any that a model can tell from impossible."""
ROUNDING = 1e-3
"""By which sums of others may exceed 0."""
LOGPROB = f"the log-probability of an answer, a number from {LOWEST_LOGPROB:g} to 0"


@dataclass(frozen=True)
class Pair:
    """Both answers, which have the prompt as their parent."""

    id: str
    chosen: EncodedSample
    rejected: EncodedSample
    fingerprint: str
    """Of the prompt's tokens and media, and of both answers."""
    given: tuple[float, float] | None = None
    """Log-probabilities of both under the reference, where the row has them."""

    @property
    def lengths(self) -> tuple[int, int]:
        """Trained tokens of both."""
        return int(self.chosen.loss_mask.sum()), int(self.rejected.loss_mask.sum())

    def samples(self, *, share_prompt: bool) -> list[EncodedSample]:
        """As they are packed: with their prompt as parent, or each behind its own copy."""
        both = [self.chosen, self.rejected]
        return both if share_prompt else [joined(sample) for sample in both]

    def size(self, config: DPOConfig) -> int:
        """Tokens of a forward of it alone, padding included."""
        own_lengths = [len(self.chosen), len(self.rejected)]
        prompt = len(self.chosen.parent or ())
        if not config.train.packing:
            return 2 * (prompt + max(own_lengths))
        return sum(own_lengths) + (prompt if config.shares_prompts else 2 * prompt)


class PairEncoder(Encoder):
    """For rows of preferences: a row is as long as its prompt and both answers together."""

    def measure(self, sample: Sample) -> int:
        """From media headers, without decoding; may exceed `max_length`."""
        prompt, better, worse = conversations(sample)
        _, segments = self._prompt(prompt)
        prompt_ids = [token for segment in segments for token in segment.ids]
        answers = [self._answer(prompt_ids, conversation)[0] for conversation in (better, worse)]
        check_differ(sample, *answers)
        return self._count(prompt, segments) + sum(map(len, answers))

    def encode_pair(self, sample: Sample) -> Pair:
        """DataError names the sample; SampleTooLong where it has more than `max_length` tokens."""
        prompt, better, worse = conversations(sample)
        reference_logprobs = given_logprobs(sample)
        encoded = self.encode_prompt(prompt)
        chosen, rejected = self.encode_answer(encoded, better), self.encode_answer(encoded, worse)
        check_differ(sample, chosen.input_ids.tolist(), rejected.input_ids.tolist())
        self.check_length(sample, len(encoded.encoded) + len(chosen) + len(rejected))
        return Pair(sample.id, chosen, rejected, fingerprint(encoded, chosen, rejected), reference_logprobs)


def pair_encoder(encoder: Encoder) -> PairEncoder:
    return PairEncoder(**vars(encoder))


def conversations(sample: Sample) -> tuple[Sample, Sample, Sample]:
    """The prompt, and with it the better and the worse conversation. All that follows their common beginning is an answer.

    Raises:
        DataError: there is only one conversation, or they do not part at an answer of the assistant.
    """
    better, worse = sample.messages, sample.rejected
    if worse is None:
        raise DataError(
            f"sample {sample.id!r}: field 'rejected' is missing: a preference has a better and a worse answer"
        )
    if better == worse:
        raise same_answer(sample)
    start = common_beginning(better, worse)
    for field, messages in (("chosen", better), ("rejected", worse)):
        where = f"sample {sample.id!r}: field {field!r}"
        if start == len(messages):
            raise DataError(
                f"{where} has nothing that the other of chosen and rejected does not have; give another answer"
            )
        if start == 0 or [message["role"] for message in messages[start - 1 : start + 1]] != ["user", "assistant"]:
            raise DataError(
                f"{where}, message {start}: here chosen and rejected begin to differ, and it is no answer of the assistant's to "
                "the user; both must answer one prompt"
            )
        if media_parts(messages[start:]):
            raise DataError(f"{where}: images and videos must stand before the answers that differ")
    prompt = replace(sample, messages=better[:start], rejected=None)
    return prompt, replace(prompt, messages=better), replace(prompt, messages=worse)


def common_beginning(better: Sequence[Message], worse: Sequence[Message]) -> int:
    """Return how many messages both begin with."""
    pairs = zip(better, worse, strict=False)
    return next((i for i, (better_id, other) in enumerate(pairs) if better_id != other), min(len(better), len(worse)))


def check_differ(sample: Sample, chosen: list[int], rejected: list[int]) -> None:
    """Answers may differ in what the chat template takes off only, such as spaces at the end."""
    if chosen == rejected:
        raise same_answer(sample)


def same_answer(sample: Sample) -> DataError:
    return DataError(f"sample {sample.id!r}: fields 'chosen' and 'rejected' are the same answer; correct one of them")


def given_logprobs(sample: Sample) -> tuple[float, float] | None:
    """Return what the row says the reference gives both answers; None if it says nothing."""
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


def fingerprint(prompt: EncodedPrompt, chosen: EncodedSample, rejected: EncodedSample) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for sample in (prompt.encoded, chosen, rejected):
        digest.update(b"%d " % len(sample) + sample.input_ids.numpy().tobytes())
    for medium in prompt.media:
        digest.update(medium.tobytes() if isinstance(medium, Image.Image) else medium[0].tobytes())
    return digest.hexdigest()


def cut_pairs(pairs: Sequence[Pair], config: DPOConfig) -> list[list[Pair]]:
    """The pairs of each micro-batch: by tokens where the configuration gives a budget of them, else by number.

    Raises:
        DataError: a pair that does not fit a micro-batch of its own.
    """
    budget, key = config.token_budget
    ordered = sorted(pairs, key=lambda pair: pair.size(config), reverse=True)
    if budget is None:
        size = config.train.micro_batch_size or 1
        return [ordered[i : i + size] for i in range(0, len(ordered), size)]
    for pair in ordered:
        if pair.size(config) > budget:
            raise DataError(
                f"sample {pair.id!r}: its pair has {pair.size(config)} tokens, more than {key} ({budget}), and both answers go "
                "through one forward; raise that, or lower model.max_length and set model.on_too_long"
            )
    if config.train.packing:
        return first_fit([(pair.size(config), [pair]) for pair in ordered], budget)
    groups: list[list[Pair]] = []
    for pair in ordered:
        if not groups or (len(groups[-1]) + 1) * groups[-1][0].size(config) > budget:
            groups.append([])
        groups[-1].append(pair)
    return groups
