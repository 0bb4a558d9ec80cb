"""Held-out rows: their teacher-forced loss, and how many of the generated answers are right."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
from deepspeed import DeepSpeedEngine
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from dsreason.config.schema import RunConfig
from dsreason.data.chat import EncodedPrompt, Encoder, Medium, SampleTooLong
from dsreason.data.loader import BadRow, Encoding, next_item, unchanged
from dsreason.data.micro_batches import align_micro_batches
from dsreason.data.sources import SampleDataset
from dsreason.data.types import EncodedSample
from dsreason.errors import DataError
from dsreason.rollout.protocol import Completion, RolloutEngine, Sampling
from dsreason.runtime.engine import full_parameters
from dsreason.runtime.progress import Advance, Progress
from dsreason.runtime.world import World, agree, all_sum, gather_objects
from dsreason.train.answers import (
    Answer,
    ValidationResult,
    accuracies,
    describe,
    is_correct,
    media_paths,
    modality_of,
    question_of,
    reference_of,
)
from dsreason.train.contact_sheet import contact_sheet

log = logging.getLogger(__name__)

T = TypeVar("T")

GREY = 128


def validate(
    policy_engine: DeepSpeedEngine,
    dataset: SampleDataset,
    encoder: Encoder,
    config: RunConfig,
    world: World,
    rollout: RolloutEngine,
    *,
    version: int,
    progress: Progress,
    blank_media: bool = False,
) -> ValidationResult:
    """Measure the policy on `dataset`. Collective: every rank calls it and runs the same forwards and gathers.

    `version` is stamped on the weights that the rollout engine gets (the step). `blank_media` makes all pixels grey, to
    see what the answers owe to the media. The metrics are `val/loss`, the mean negative log-likelihood of the trained
    tokens, and with `validation.generate` the share of right answers: `val/accuracy`, and `val/accuracy/<name>` of each
    modality and each `meta["kind"]`. Raises DataError for a bad row, unless the config says to skip it.
    """
    held_out = HeldOut(dataset, encoder, config, world, blank_media)
    with progress.phase("validation: loss", held_out.num_rows, "samples") as advance:
        metrics = {"val/loss": held_out_loss(policy_engine, held_out, advance)}
    if not config.validation.generate:
        return ValidationResult(metrics, [], {})
    rollout.wake()
    rollout.sync(full_parameters(policy_engine), version)
    with progress.phase("validation: answers", held_out.num_rows, "samples") as advance:
        answers, sheets = generate_answers(rollout, version, held_out, advance)
    rollout.sleep()
    by_rank = gather_objects((answers, sheets))
    if not any(part for part, _ in by_rank):
        raise DataError(
            f"validation: none of the {held_out.num_rows} held-out rows has a reference answer; give Sample.answer, "
            "or set validation.generate = false"
        )
    answers = sorted((answer for part, _ in by_rank for answer in part), key=lambda answer: answer.row)
    sheets = {row: sheet for _, part in by_rank for row, sheet in part.items()}
    return ValidationResult(metrics | accuracies(answers), answers, sheets)


@dataclass(frozen=True)
class HeldOut:
    """The rows to measure, and how they are read."""

    dataset: SampleDataset
    encoder: Encoder
    config: RunConfig
    world: World
    blank_media: bool

    @property
    def num_rows(self) -> int:
        return min(len(self.dataset), self.config.validation.max_samples or len(self.dataset))

    @property
    def shown(self) -> set[int]:
        """The rows whose answers are shown, evenly spaced."""
        rows = self.rows
        count = min(self.config.validation.show, len(rows))
        return {rows[i * len(rows) // count] for i in range(count)}

    @property
    def rows(self) -> list[int]:
        """Of all ranks; where `validation.max_samples` leaves some out, evenly spaced."""
        return [i * len(self.dataset) // self.num_rows for i in range(self.num_rows)]

    def groups(self) -> list[list[int]]:
        """This rank's rows, cut for one forward or generate call each; as many groups on every rank, some empty."""
        size = self.config.validation.micro_batch_size
        rows = self.rows[self.world.rank :: self.world.size]
        num_groups = -(-self.num_rows // (size * self.world.size))
        return [rows[i * size : (i + 1) * size] for i in range(num_groups)]

    def read(self, work: Dataset[list[T | BadRow]]) -> Iterator[list[T]]:
        """Each group's usable items, made in worker processes. Raises on all ranks when one has a bad row."""
        groups = self.groups()
        loader = DataLoader(
            work,
            batch_size=None,
            sampler=groups,
            num_workers=min(self.config.data.workers, len(groups)),
            collate_fn=unchanged,
            generator=torch.Generator(),  # otherwise it draws from the trainer's
        )
        found = iter(loader)
        for _ in groups:
            items = next_item(found)
            bad = [item for item in items if isinstance(item, BadRow)]
            refused = [row.reason for row in bad if self._action(row) == "error"]
            agree(DataError(refused[0]) if refused else None)
            for row in bad:
                log.warning("validation: left out: %s", row.reason)
            yield [item for item in items if not isinstance(item, BadRow)]

    def _action(self, bad: BadRow) -> str:
        return self.config.model.on_too_long if bad.too_long else self.config.data.on_bad_row


@torch.no_grad()
def held_out_loss(policy_engine: DeepSpeedEngine, held_out: HeldOut, advance: Advance) -> float:
    """Mean negative log-likelihood of the trained tokens over all ranks' rows, however they are grouped."""
    encoder, processor = held_out.encoder, held_out.encoder.processor
    was_training = policy_engine.training
    policy_engine.eval()
    total, num_tokens = 0.0, 0
    for samples in held_out.read(Encoding(held_out.dataset, encoder)):
        if held_out.blank_media:
            samples = [blank_sample(sample, processor) for sample in samples]
        for batch in align_micro_batches([samples] if samples else [], encoder, gather_objects):
            logprobs = policy_engine(batch.to(policy_engine.device))
            total -= float(logprobs.double().sum())
            num_tokens += logprobs.shape[0]
        advance(len(samples) * held_out.world.size)
    policy_engine.train(was_training)
    policy_engine.empty_partition_cache()
    num_tokens = int(all_sum(num_tokens))
    if num_tokens == 0:
        raise DataError(f"validation: none of the {held_out.num_rows} held-out rows can be used; see the log for why")
    return all_sum(total) / num_tokens


def generate_answers(
    rollout: RolloutEngine, version: int, held_out: HeldOut, advance: Advance
) -> tuple[list[Answer], dict[int, Image.Image]]:
    """This rank's greedy answers, and the contact sheets of those that are shown, by row."""
    tokenizer, processor = held_out.encoder.processor.tokenizer, held_out.encoder.processor
    sampling = Sampling(temperature=0, max_completion_length=held_out.config.validation.max_completion_length)
    answers: list[Answer] = []
    sheets: dict[int, Image.Image] = {}
    for found in held_out.read(Prompting(held_out.dataset, held_out.encoder)):
        asked = [(row, blank_prompt(prompt, processor) if held_out.blank_media else prompt) for row, prompt in found]
        completions = rollout.generate([prompt for _, prompt in asked], sampling, version=version)
        for (row, prompt), completion in zip(asked, completions, strict=True):
            answers.append(to_answer(row, prompt, completion, tokenizer))
            if row in held_out.shown:
                text = describe(question_of(prompt.sample), completion.text, answers[-1].reference)
                sheets[row] = contact_sheet(prompt.media, text)
        advance(len(found) * held_out.world.size)
    return answers, sheets


class Prompting(Dataset[list[tuple[int, EncodedPrompt] | BadRow]]):
    """Row numbers → (row, prompt), of the rows that have a reference answer."""

    def __init__(self, dataset: SampleDataset, encoder: Encoder) -> None:
        self.dataset, self.encoder = dataset, encoder

    def __getitem__(self, rows: list[int]) -> list[tuple[int, EncodedPrompt] | BadRow]:
        found = [self._prompt(row) for row in rows]
        return [item for item in found if item is not None]

    def _prompt(self, row: int) -> tuple[int, EncodedPrompt] | BadRow | None:
        try:
            sample = self.dataset[row]
        except DataError as error:
            return BadRow(str(error), too_long=False)
        if reference_of(sample) is None:
            return None
        try:
            return row, self.encoder.encode_prompt(sample)
        except DataError as error:
            too_long = isinstance(error, SampleTooLong)
            return BadRow(f"{self.dataset.location(row)}: {error}", too_long=too_long)


def to_answer(row: int, prompt: EncodedPrompt, completion: Completion, tokenizer: Any) -> Answer:
    sample = prompt.sample
    reference = reference_of(sample) or ""
    kind = sample.meta.get("kind")
    return Answer(
        row=row,
        id=sample.id,
        modality=modality_of(sample),
        kind=None if kind is None else str(kind),
        prompt=tokenizer.decode(prompt.prompt_ids),
        completion=completion.text,
        reference=reference,
        correct=is_correct(completion.text, reference),
        finish_reason=completion.finish_reason,
        media=media_paths(sample),
    )


def blank_prompt(prompt: EncodedPrompt, processor: Any) -> EncodedPrompt:
    media = [blank_medium(medium) for medium in prompt.media]
    return replace(prompt, encoded=blank_sample(prompt.encoded, processor), media=media)


def blank_medium(medium: Medium) -> Medium:
    if isinstance(medium, Image.Image):
        return Image.new("RGB", medium.size, (GREY, GREY, GREY))
    frames, metadata = medium
    return np.full_like(frames, GREY), metadata


def blank_sample(sample: EncodedSample, processor: Any) -> EncodedSample:
    """The same tokens and sizes with grey in place of every picture.

    A row of pixels is one patch, channel by channel, normalised: grey is one number per channel.
    """
    mm_kwargs = dict(sample.mm_kwargs)
    of_key = {"pixel_values": processor.image_processor, "pixel_values_videos": processor.video_processor}
    for key, part in of_key.items():
        if key in mm_kwargs:
            grey = (GREY / 255 - torch.tensor(part.image_mean)) / torch.tensor(part.image_std)  # [C]
            pixels = mm_kwargs[key]  # [patches, C * frames * height * width]
            mm_kwargs[key] = grey.repeat_interleave(pixels.shape[1] // len(grey)).expand_as(pixels).contiguous()
    return replace(sample, mm_kwargs=mm_kwargs)
