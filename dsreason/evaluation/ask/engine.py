"""An answerer that uses a rollout engine in this process, with the weights from a model folder."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from dsreason.data.chat import EncodedPrompt, Encoder
from dsreason.data.loader import run_in_workers
from dsreason.errors import DataError
from dsreason.evaluation.ask.asking import Gather, QuestionRequest, Reply, wrap_in_list
from dsreason.evaluation.types import Question
from dsreason.rollout.batches import merge_groups
from dsreason.rollout.protocol import RolloutEngine, Sampling

VERSION = 0
"""Version of the weights; they never change."""
GROUP_SIZE = 16
"""Number of questions to decode between two checks of their memory use."""


@dataclass
class EngineAnswerer:
    """An `Answerer` that uses an engine. The engine must be awake and have its weights loaded."""

    engine: RolloutEngine
    encoder: Encoder
    max_length: int
    """Maximum length of prompt plus answer, in tokens. A retry that requests more tokens gets a truncated answer."""
    media_memory_gib: float
    """Maximum size, in GiB, of decoded media that wait for the engine; batches that need more are split."""
    workers: int = 2
    """Number of processes that decode media in advance; with 0, this process decodes them."""
    in_step: Gather = wrap_in_list
    """Function that gathers a value from the ranks that share the model. These ranks must call `ask` equally often."""
    prompts: dict[str, EncodedPrompt | str] = field(default_factory=dict)
    """Prompts of the last batch, by question id. If a prompt could not be encoded, a string gives the reason."""

    def batches(self, batches: Sequence[Sequence[Question]]) -> Iterator[Sequence[Question]]:
        questions = [question for batch in batches for question in batch]
        workers = self.workers if questions else 0
        # Number of questions that each worker decodes in advance while the engine samples: two groups over all workers.
        ahead = max(1, min(2 * GROUP_SIZE, max(map(len, batches))) // workers) if workers else None
        work = partial(decode, questions, self.encoder, self.engine.reads_pixels)
        encoded_batches = run_in_workers(work, range(len(questions)), workers=workers, ahead=ahead)
        for batch in batches:
            for prompts in merge_groups(
                self._iter_groups(batch, encoded_batches),
                lambda item: 0 if isinstance(item[1], str) else item[1].media_bytes,
                memory_gib=self.media_memory_gib,
                least=self.engine.max_num_seqs,
                any_rank=lambda flag: any(self.in_step(flag)),
            ):
                self.prompts = {question.id: prompt for question, prompt in prompts}
                yield [question for question, _ in prompts]

    def _iter_groups(
        self, batch: Sequence[Question], prompts: Iterator[EncodedPrompt | str]
    ) -> Iterator[list[tuple[Question, EncodedPrompt | str]]]:
        """Yield groups of questions with their prompts. Ranks that share the model get the same number of groups."""
        for i in range(0, max(self.in_step(len(batch))), GROUP_SIZE):
            yield [(question, next(prompts)) for question in batch[i : i + GROUP_SIZE]]

    def ask(self, requests: Sequence[QuestionRequest]) -> Iterator[tuple[QuestionRequest, Reply]]:
        prompts: list[tuple[QuestionRequest, EncodedPrompt]] = []
        for request in requests:
            prompt = self.prompts[request.question.id]
            if isinstance(prompt, str):
                yield request, Reply(error=prompt, sent=False)
            else:
                prompts.append((request, prompt))
        started = time.perf_counter()
        for number, completion in self.engine.iter_completions(
            [prompt for _, prompt in prompts],
            [self._limit_length(request.sampling, prompt) for request, prompt in prompts],
            version=VERSION,
            streams=[compute_random_stream(request.question.id) for request, _ in prompts],
        ):
            seconds = time.perf_counter() - started
            request, prompt = prompts[number]
            reply = Reply(completion.text, completion.finish_reason, completion.num_tokens, seconds)
            yield request, replace(reply, opening=prompt.opening)

    def _limit_length(self, sampling: Sampling, prompt: EncodedPrompt) -> Sampling:
        room = self.max_length - len(prompt.encoded)
        return replace(sampling, max_completion_length=min(sampling.max_completion_length, room))


def decode(questions: Sequence[Question], encoder: Encoder, with_pixels: bool, number: int) -> EncodedPrompt | str:
    """Encode the prompt for question `number`; if that is impossible, return the reason as a string."""
    try:
        prompt = encoder.encode_prompt(questions[number].sample)
    except DataError as error:
        return str(error)
    return prompt if with_pixels else prompt.drop_pixels()


def compute_random_stream(question_id: str) -> int:
    """Compute the question's random stream number, which does not depend on other questions or their order."""
    return int.from_bytes(hashlib.sha256(question_id.encode()).digest()[:8], "big")
