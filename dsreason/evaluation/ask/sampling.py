"""Sampling settings for answers and retries, following cosmos-reason1's evaluator."""

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
    """Choose the sampling settings for a question's first attempt (`attempt` 0) or its k-th retry.

    `letter` always picks the most probable token (top_k 1), so a retry may be longer, but its higher temperature does not make
    it more random. `reasoning` uses the settings in `[generation]`. The k-th retry allows 256·k more tokens and raises the
    temperature by 0.05·k, up to 0.9. Every attempt uses its own random streams.

    With the parser `compat`, sampling is the same as in cosmos-reason1: `letter` has no penalties, and its retries start
    from the length and temperature in `[generation]`. In retries, a temperature above 0.9 is reduced to 0.9.
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
    # The seed is unique per attempt, because the configuration allows fewer than 1000 attempts.
    return Sampling(
        temperature=temperature,
        top_p=1.0 if letter else generation.top_p,
        top_k=1 if letter else generation.top_k,
        max_completion_length=length + RETRY_TOKENS * attempt,
        seed=1000 * config.evaluation.seed + attempt,
        **penalties,
    )


def compute_max_tokens(config: EvalConfig, kind: QuestionKind) -> int:
    """Return the maximum length, in tokens, for the first answer to a question of this kind."""
    if config.evaluation.answer_type == "reasoning":
        return config.generation.max_tokens or REASONING_TOKENS
    if kind in TEXT_KINDS:
        return config.generation.max_tokens or TEXT_TOKENS
    return config.generation.letter_max_tokens
