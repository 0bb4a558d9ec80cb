"""Sampling of answers: the settings of cosmos-reason1's evaluator, and its rule for retries."""

from __future__ import annotations

from dsreason.config.schema_eval import PENALTIES, EvalConfig
from dsreason.rollout.protocol import Sampling
from dsreason.text import QuestionKind

RETRY_TOKENS = 256
RETRY_TEMPERATURE = 0.05
MAX_RETRY_TEMPERATURE = 0.9
REASONING_TOKENS = 1024
TEXT_TOKENS = 256
TEXT_KINDS = ("open", "free_text")


def choose_sampling(config: EvalConfig, kind: QuestionKind, attempt: int = 0) -> Sampling:
    """Choose the sampling of a question that is asked for the first time (`attempt` 0), or for the k-th time again.

    `letter` takes the most probable token (top_k 1, even if a retry is hotter: it is longer, not different),
    `reasoning` what `[generation]` says. A retry has 256·k tokens more and a temperature 0.05·k higher, up to 0.9. Every
    attempt draws from separate streams.

    With the parser `compat` all is as in cosmos-reason1: `letter` knows no penalties, and its retries begin at the length
    and temperature of `[generation]`; a temperature above 0.9 is 0.9 in a retry.
    """
    generation, length = config.generation, compute_max_tokens(config, kind)
    letter, compat = config.evaluation.answer_type == "letter", config.evaluation.parser == "compat"
    temperature = 0.0 if letter else generation.temperature
    if attempt and compat:
        temperature = min(generation.temperature + RETRY_TEMPERATURE * attempt, MAX_RETRY_TEMPERATURE)
        length = generation.max_tokens or REASONING_TOKENS
    elif attempt:
        temperature = max(temperature, min(temperature + RETRY_TEMPERATURE * attempt, MAX_RETRY_TEMPERATURE))
    penalties = {} if letter and compat else generation.model_dump(include=set(PENALTIES))
    return Sampling(
        temperature=temperature,
        top_p=1.0 if letter else generation.top_p,
        top_k=1 if letter else generation.top_k,
        max_completion_length=length + RETRY_TOKENS * attempt,
        seed=1000 * config.evaluation.seed + attempt,  # more attempts than 1000 the configuration does not allow
        **penalties,
    )


def compute_max_tokens(config: EvalConfig, kind: QuestionKind) -> int:
    """Longest first answer to a question of this kind, in tokens."""
    if config.evaluation.answer_type == "reasoning":
        return config.generation.max_tokens or REASONING_TOKENS
    if kind in TEXT_KINDS:
        return config.generation.max_tokens or TEXT_TOKENS
    return config.generation.letter_max_tokens
