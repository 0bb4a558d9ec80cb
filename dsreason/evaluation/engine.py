"""Questions answered by a rollout engine in this process, which holds the weights of a model folder."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from dsreason.data.chat import EncodedPrompt, Encoder
from dsreason.data.loader import in_workers
from dsreason.errors import DataError
from dsreason.evaluation.asking import Reply, Request
from dsreason.evaluation.types import Question
from dsreason.models.families import family_of
from dsreason.models.load import check_depth, empty_model, model_config
from dsreason.models.load import check_weights as check_tensors
from dsreason.models.weights import find_weights
from dsreason.rollout.protocol import RolloutEngine, Sampling
from dsreason.runtime.world import gather_objects

VERSION = 0
"""Of the weights: they do not change."""


@dataclass
class EngineAnswerer:
    """An `Answerer` over an engine that is awake and has its weights."""

    engine: RolloutEngine
    encoder: Encoder
    max_length: int
    """Of prompt and answer together: what a retry asks for beyond that is cut off."""
    workers: int = 2
    """Processes that decode media, a batch ahead."""
    with_pixels: bool = True
    """Whether the engine reads `mm_kwargs`; one that processes the media itself does not."""
    together: bool = False
    """Whether several ranks hold the model together, so that all must generate as often."""
    prompts: dict[str, EncodedPrompt | str] = field(default_factory=dict)
    """Of the last batch, by question id; a text says why there is none."""

    def batches(self, batches: Sequence[Sequence[Question]]) -> Iterator[Sequence[Question]]:
        questions = [question for batch in batches for question in batch]
        workers = self.workers if questions else 0
        ahead = self._ahead(batches) if workers else None
        decoding = Decoding(questions, self.encoder, self.with_pixels)
        found = in_workers(decoding, range(len(questions)), workers=workers, ahead=ahead)
        for batch in batches:
            self.prompts = {question.id: next(found) for question in batch}
            yield batch

    def _ahead(self, batches: Sequence[Sequence[Question]]) -> int:
        """Questions a worker decodes beyond those that are asked for: together one batch."""
        return max(1, max(map(len, batches)) // self.workers)

    def ask(self, requests: Sequence[Request]) -> Iterator[tuple[Request, Reply]]:
        asked: dict[Sampling, list[tuple[Request, EncodedPrompt]]] = {}
        for request in requests:
            prompt = self.prompts[request.question.id]
            if isinstance(prompt, str):
                yield request, Reply(error=prompt, sent=False)
            else:
                asked.setdefault(self._fitting(request.sampling, prompt), []).append((request, prompt))
        for sampling in self._together(list(asked)):
            share = asked.get(sampling, [])
            started = time.perf_counter()
            completions = self.engine.generate(
                [prompt for _, prompt in share],
                sampling,
                version=VERSION,
                streams=[stream_of(request.question.id) for request, _ in share],
            )
            seconds = time.perf_counter() - started
            for (request, _), completion in zip(share, completions, strict=True):
                yield request, Reply(completion.text, completion.finish_reason, len(completion.ids), seconds)

    def _fitting(self, sampling: Sampling, prompt: EncodedPrompt) -> Sampling:
        room = self.max_length - len(prompt.encoded)
        return replace(sampling, max_completion_length=min(sampling.max_completion_length, room))

    def _together(self, own: list[Sampling]) -> list[Sampling]:
        """One generate call for each; ranks that hold a model together make the same calls."""
        if not self.together:
            return own
        return list(dict.fromkeys(sampling for part in gather_objects(own) for sampling in part))

    def close(self) -> None:
        self.prompts = {}


class Decoding(Dataset[EncodedPrompt | str]):
    """Question numbers → prompts, or why there is none."""

    def __init__(self, questions: Sequence[Question], encoder: Encoder, with_pixels: bool) -> None:
        self.questions, self.encoder, self.with_pixels = questions, encoder, with_pixels

    def __getitem__(self, number: int) -> EncodedPrompt | str:
        try:
            prompt = self.encoder.encode_prompt(self.questions[number].sample)
        except DataError as error:
            return str(error)
        if self.with_pixels:
            return prompt
        return replace(prompt, encoded=replace(prompt.encoded, mm_kwargs={}))


def stream_of(question_id: str) -> int:
    """Numbers the question's random stream: the same whatever else is asked, in whichever order."""
    return int.from_bytes(hashlib.sha256(question_id.encode()).digest()[:8], "big")


def check_weights(model_path: Path, *, attention: str = "auto", trust_remote_code: bool = False) -> None:
    """CheckpointError unless a model of the folder's config.json can be built, and its weights are all there and fit."""
    config = model_config(model_path, trust_remote_code=trust_remote_code)
    weights = find_weights(model_path, family_of(config.model_type).rename)
    check_depth(config, weights)
    check_tensors(empty_model(config, torch.float32, attention, trust_remote_code), weights)


def load_weights(engine: RolloutEngine, model_path: Path, *, trust_remote_code: bool = False) -> None:
    """Wake the engine and give it the weights of a Hugging Face folder; every one is checked to arrive. Collective."""
    config = model_config(model_path, trust_remote_code=trust_remote_code)
    engine.wake()
    engine.sync(folder_weights(model_path, config), VERSION)


def folder_weights(model_path: Path, config: Any) -> Iterator[tuple[str, Tensor]]:
    """Each tensor of the folder by its name in memory; an output matrix stored beside the embeddings it is tied to is
    left out."""
    weights = find_weights(model_path, family_of(config.model_type).rename)
    for name in weights.places:
        if config.tie_word_embeddings and name == "lm_head.weight":
            continue
        found: dict[str, Tensor] = {}
        weights.read([name], found.__setitem__)
        yield name, found[name]
