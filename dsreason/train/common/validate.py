"""Validation on held-out rows: the teacher-forced loss, and the accuracy and rewards of generated answers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Generic, TypeVar

import torch
from deepspeed import DeepSpeedEngine
from PIL import Image

from dsreason.answers.correct import get_reference, is_correct
from dsreason.config.schema import RunConfig
from dsreason.data.chat import EncodedPrompt, Encoder
from dsreason.data.loader import find_fatal_error, read_rows, run_in_workers
from dsreason.data.messages import list_media_paths
from dsreason.data.micro_batches import align_micro_batches
from dsreason.data.order import pick_evenly
from dsreason.data.sources import SampleDataset
from dsreason.data.types import Sample
from dsreason.engine.zero3 import release_gathered
from dsreason.errors import DataError
from dsreason.job.ranks import World, gather_objects, reduce_sum, share_errors
from dsreason.monitor.progress import Advance, Progress
from dsreason.rewards.scoring import Scorer, to_optional
from dsreason.rollout.batches import merge_groups
from dsreason.rollout.protocol import Completion, RolloutEngine, Sampling
from dsreason.train.common.answers import (
    GeneratedAnswer,
    ValidationResult,
    compute_accuracies,
    compute_mean_rewards,
    describe,
    get_data_source,
    get_modality,
    get_question,
    score_completions,
)
from dsreason.train.common.contact_sheet import draw_contact_sheet
from dsreason.train.common.sampler import Sampler

log = logging.getLogger(__name__)

C = TypeVar("C", bound=RunConfig)
T = TypeVar("T")


def validate(
    sampler: Sampler, held_out: HeldOut[Any], *, version: int, progress: Progress, scorer: Scorer | None = None
) -> ValidationResult | None:
    """Measure the policy on the held-out rows; return None if the data set has no rows.

    Collective: every rank runs the same number of forward passes and gathers. The metrics are as follows; those to which no
    row contributes are omitted:

    - `val/loss`: mean negative log-likelihood of the tokens that have a loss;
    - `val/accuracy`, if `validation.generate` is set: share of correct answers; also `val/accuracy/<name>` for each
      modality and each `meta["kind"]`;
    - `val/reward/mean` and `val/reward/<function>/mean`, if there is a `scorer` as well; these include rows without a
      reference answer.

    Args:
        version: version of the weights in the rollout engine, which is the step number.

    Raises:
        DataError: a row is bad, and the configuration does not skip bad rows.
    """
    if len(held_out.dataset) == 0:
        return None
    with progress.track_phase("validation: loss", len(held_out.rows), "samples") as advance:
        loss = compute_held_out_loss(sampler.policy, held_out, advance)
    metrics = {} if loss is None else {"val/loss": loss}
    if not held_out.config.validation.generate:
        return ValidationResult(metrics, [], {})
    answers = answer_rows(sampler, held_out, version=version, progress=progress, scorer=scorer)
    return replace(answers, metrics=metrics | answers.metrics)


def answer_rows(
    sampler: Sampler, held_out: HeldOut[Any], *, version: int, progress: Progress, scorer: Scorer | None = None
) -> ValidationResult:
    """Generate and score answers to the held-out prompts; this is the second part of `validate`. Collective."""
    with (
        sampler.awake(version) as engine,
        progress.track_phase("validation: answers", len(held_out.rows), "samples") as advance,
    ):
        answers, sheets = generate_answers(engine, version, held_out, advance, scorer)
    by_rank = gather_objects((answers, sheets))
    if not any(part for part, _ in by_rank):
        raise DataError(
            f"validation: none of the {len(held_out.rows)} held-out rows has a reference answer; set Sample.answer, "
            "or set validation.generate = false"
        )
    answers = sorted((answer for part, _ in by_rank for answer in part), key=lambda answer: answer.row)
    sheets = {row: sheet for _, part in by_rank for row, sheet in part.items()}
    return ValidationResult(compute_accuracies(answers) | compute_mean_rewards(answers), answers, sheets)


@dataclass(frozen=True)
class HeldOut(Generic[C]):
    """A run's held-out rows, with everything needed to read them."""

    dataset: SampleDataset
    encoder: Encoder
    config: C
    world: World

    @cached_property
    def shown(self) -> set[int]:
        """Row numbers of the answers to display, evenly spaced."""
        return {self.rows[i] for i in pick_evenly(len(self.rows), self.config.validation.show)}

    @cached_property
    def rows(self) -> list[int]:
        """Row numbers to validate, over all ranks; evenly spaced if `validation.max_samples` is less than the number of rows."""
        return pick_evenly(len(self.dataset), self.config.validation.max_samples)

    def build_groups(self) -> list[list[int]]:
        """Split this rank's rows into one group per forward pass. All ranks have the same number of groups; some may be empty."""
        size = self.config.validation.micro_batch_size
        rows = self.rows[self.world.rank :: self.world.size]
        num_groups = -(-len(self.rows) // (size * self.world.size))
        return [rows[i * size : (i + 1) * size] for i in range(num_groups)]

    def read(self, use: Callable[[Sample], T]) -> Iterator[list[tuple[int, T]]]:
        """Yield a list per group, with (row number, `use(sample)`) for each usable row. `use` is called in worker processes.

        Raises:
            DataError: a row is bad, and the configuration does not skip bad rows; raised on all ranks.
        """
        groups = self.build_groups()
        read = partial(read_rows, self.dataset, use)
        groups_read = run_in_workers(read, groups, workers=min(self.config.data.workers, len(groups)))
        for rows in groups:
            with share_errors():
                items = next(groups_read)
                bad = [item for item in items if isinstance(item, DataError)]
                if message := find_fatal_error(bad, self.config):
                    raise DataError(message)
            for error in bad:
                log.warning("validation: skipped a row: %s", error)
            yield [(row, item) for row, item in zip(rows, items, strict=True) if not isinstance(item, DataError)]


@torch.no_grad()
def compute_held_out_loss(policy_engine: DeepSpeedEngine, held_out: HeldOut[Any], advance: Advance) -> float | None:
    """Compute the mean negative log-likelihood, over all ranks, of the tokens that have a loss.

    The result does not depend on how the rows are grouped. It is None if no token has a loss, because all rows consist only
    of prompts.
    """
    encoder = held_out.encoder
    was_training = policy_engine.training
    policy_engine.eval()
    total, num_tokens, num_rows = 0.0, 0, 0
    for encoded_rows in held_out.read(encoder.encode):
        samples = [sample for _, sample in encoded_rows]
        for batch in align_micro_batches(
            [samples] if samples else [], encoder, gather_objects, packing=held_out.config.train.packing
        ):
            logprobs = policy_engine(batch.to(policy_engine.device))
            total -= float(logprobs.double().sum())
            num_tokens += logprobs.shape[0]
        num_rows += len(samples)
        advance(len(samples) * held_out.world.size)
    policy_engine.train(was_training)
    release_gathered(policy_engine)
    num_tokens, num_rows = int(reduce_sum(num_tokens)), int(reduce_sum(num_rows))
    if num_rows == 0:
        raise DataError(
            f"validation: none of the {len(held_out.rows)} held-out rows can be used; see the log for the reasons"
        )
    total = reduce_sum(total)
    return total / num_tokens if num_tokens else None


def generate_answers(
    rollout: RolloutEngine, version: int, held_out: HeldOut[Any], advance: Advance, scorer: Scorer | None = None
) -> tuple[list[GeneratedAnswer], dict[int, Image.Image]]:
    """Generate this rank's answers, and score them if there is a scorer.

    Returns:
        The answers, and the contact sheets for the displayed answers, keyed by row number.
    """
    tokenizer = held_out.encoder.processor.tokenizer
    settings = held_out.config.validation
    sampling = Sampling(
        temperature=settings.temperature,
        top_p=settings.top_p,
        max_completion_length=settings.max_completion_length,
        seed=held_out.config.train.seed,
    )
    answers: list[GeneratedAnswer] = []
    sheets: dict[int, Image.Image] = {}
    for questions in merge_groups(
        read_prompts(held_out, advance, with_pixels=rollout.reads_pixels, need_reference=scorer is None),
        lambda item: item[1].media_bytes,
        memory_gib=settings.media_memory_gib,
        least=rollout.max_num_seqs,
        any_rank=lambda flag: any(gather_objects(flag)),
    ):
        rows, prompts = [row for row, _ in questions], [prompt for _, prompt in questions]
        completions = rollout.generate(prompts, sampling, version=version, streams=rows)
        with share_errors():
            rewards = score(prompts, completions, sampling, scorer)
        for row, prompt, completion, reward in zip(rows, prompts, completions, rewards, strict=True):
            answers.append(to_answer(row, prompt, completion, tokenizer, reward))
            if row in held_out.shown:
                last = answers[-1]
                text = describe(get_question(prompt.sample), completion.text, last.reference, last.correct)
                sheets[row] = draw_contact_sheet(prompt.media, text)
        advance(len(questions) * held_out.world.size)
    return answers, sheets


def read_prompts(
    held_out: HeldOut[Any], advance: Advance, *, with_pixels: bool, need_reference: bool
) -> Iterator[list[tuple[int, EncodedPrompt]]]:
    """Yield each group's encoded prompts with their row numbers. With `need_reference`, skip rows without a reference answer."""
    encoder = held_out.encoder
    for encoded_rows in held_out.read(
        encoder.encode_prompt if with_pixels else partial(encode_without_pixels, encoder)
    ):
        questions = [item for item in encoded_rows if not need_reference or get_reference(item[1].sample) is not None]
        advance((len(encoded_rows) - len(questions)) * held_out.world.size)
        yield questions


def encode_without_pixels(encoder: Encoder, sample: Sample) -> EncodedPrompt:
    return encoder.encode_prompt(sample).drop_pixels()


def score(
    prompts: Sequence[EncodedPrompt], completions: Sequence[Completion], sampling: Sampling, scorer: Scorer | None
) -> list[dict[str, float | None]]:
    """Return each completion's rewards by function name, with the weighted sum under ""; the dicts are empty without a scorer."""
    if scorer is None:
        return [{} for _ in completions]
    scores = score_completions(scorer, prompts, completions, sampling)
    scores_by_name = {"": scores.total, **scores.by_function}
    return [{name: to_optional(values[i]) for name, values in scores_by_name.items()} for i in range(len(completions))]


def to_answer(
    row: int, prompt: EncodedPrompt, completion: Completion, tokenizer: Any, rewards: dict[str, float | None]
) -> GeneratedAnswer:
    sample = prompt.sample
    reference = get_reference(sample)
    kind = sample.meta.get("kind")
    return GeneratedAnswer(
        row=row,
        id=sample.id,
        modality=get_modality(sample),
        kind=None if kind is None else str(kind),
        prompt=tokenizer.decode(prompt.prompt_ids),
        completion=completion.text,
        reference=reference,
        correct=None if reference is None else is_correct(completion.text, sample),
        finish_reason=completion.finish_reason,
        media=list_media_paths(sample.messages),
        rewards=rewards,
        data_source=get_data_source(sample),
    )
