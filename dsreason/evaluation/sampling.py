"""How answers are drawn: the settings of cosmos-reason1's evaluator, and its rule for asking again."""

from __future__ import annotations

from dsreason.config.schema_eval import EvalConfig
from dsreason.evaluation.types import Kind
from dsreason.rollout.protocol import Sampling

RETRY_TOKENS = 256
RETRY_TEMPERATURE = 0.05
MAX_RETRY_TEMPERATURE = 0.9
REASONING_TOKENS = 1024
TEXT_TOKENS = 256
TEXT_KINDS = ("open", "free_text")


def sampling(config: EvalConfig, kind: Kind, attempt: int = 0) -> Sampling:
    """Of a question that is asked for the first time (`attempt` 0), or for the k-th time again.

    `letter` takes the most probable token (top_k 1, also where a retry is hotter: it is longer, not different),
    `reasoning` what `[generation]` says. A retry has 256·k tokens more and a temperature 0.05·k higher, up to 0.9. Every
    attempt draws from streams of its own.
    """
    given = config.generation
    letter = config.evaluation.answer_type == "letter"
    temperature = 0.0 if letter else given.temperature
    if attempt:
        temperature = max(temperature, min(temperature + RETRY_TEMPERATURE * attempt, MAX_RETRY_TEMPERATURE))
    return Sampling(
        temperature=temperature,
        top_p=1.0 if letter else given.top_p,
        top_k=1 if letter else given.top_k,
        max_completion_length=max_tokens(config, kind) + RETRY_TOKENS * attempt,
        seed=1000 * config.evaluation.seed + attempt,  # more attempts than 1000 the configuration does not allow
        repetition_penalty=given.repetition_penalty,
        presence_penalty=given.presence_penalty,
        frequency_penalty=given.frequency_penalty,
    )


def max_tokens(config: EvalConfig, kind: Kind) -> int:
    """Longest first answer to a question of this kind, in tokens."""
    if config.evaluation.answer_type == "reasoning":
        return config.generation.max_tokens or REASONING_TOKENS
    if kind in TEXT_KINDS:
        return config.generation.max_tokens or TEXT_TOKENS
    return config.generation.letter_max_tokens
