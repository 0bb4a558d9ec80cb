"""Sampling settings for each answer type, question kind and attempt."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dsreason.config.schema_eval import EvalConfig
from dsreason.evaluation.ask.sampling import choose_sampling
from dsreason.rollout.protocol import Sampling
from dsreason.text import QuestionKind


def config(answer_type: str, **generation: Any) -> EvalConfig:
    return EvalConfig.model_validate(
        {
            "datasets": ["robovqa"],
            "model": {"path": "m"},
            "evaluation": {"answer_type": answer_type, "seed": 7},
            "generation": generation,
        }
    )


def test_letter_is_sampled_greedily_within_ten_tokens() -> None:
    result = choose_sampling(config("letter", temperature=0.6, max_tokens=1024), "multiple_choice")
    assert result == Sampling(temperature=0.0, top_p=1.0, top_k=1, max_completion_length=10, seed=7000)


def test_reasoning_is_sampled_like_cosmos_reason1() -> None:
    result = choose_sampling(config("reasoning"), "multiple_choice")
    assert result == Sampling(temperature=0.6, top_p=0.95, top_k=0, max_completion_length=1024, seed=7000)


def test_configured_sampling_values_are_used() -> None:
    settings = {"temperature": 1.0, "top_p": 0.5, "top_k": 20, "max_tokens": 50}
    penalties = {"repetition_penalty": 1.05, "presence_penalty": 0.5, "frequency_penalty": -0.5}
    assert choose_sampling(config("reasoning", **settings, **penalties), "open") == Sampling(
        temperature=1.0, top_p=0.5, top_k=20, max_completion_length=50, seed=7000, **penalties
    )


@pytest.mark.parametrize(
    ("kind", "given", "tokens"),
    [
        ("multiple_choice", {}, 10),
        ("yes_no", {}, 10),
        ("ordinal", {}, 10),
        ("open", {}, 256),
        ("free_text", {}, 256),
        ("free_text", {"max_tokens": 400}, 400),
        ("multiple_choice", {"max_tokens": 400}, 10),
        ("multiple_choice", {"letter_max_tokens": 400}, 400),
    ],
)
def test_free_texts_get_more_tokens_than_letters(kind: QuestionKind, given: dict[str, int], tokens: int) -> None:
    assert choose_sampling(config("letter", **given), kind).max_completion_length == tokens


@pytest.mark.parametrize(
    ("answer_type", "attempt", "temperature", "tokens"),
    [
        ("reasoning", 1, 0.65, 1280),
        ("reasoning", 3, 0.75, 1792),
        ("reasoning", 6, 0.9, 2560),
        ("reasoning", 10, 0.9, 3584),
        ("letter", 1, 0.05, 266),
        ("letter", 10, 0.5, 2570),
    ],
)
def test_each_retry_increases_length_and_temperature(
    answer_type: str, attempt: int, temperature: float, tokens: int
) -> None:
    result = choose_sampling(config(answer_type), "yes_no", attempt)
    assert result.temperature == pytest.approx(temperature)
    assert result.max_completion_length == tokens
    assert result.seed == 7000 + attempt


def test_retry_temperature_does_not_decrease() -> None:
    assert choose_sampling(config("reasoning", temperature=1.2), "open", attempt=1).temperature == 1.2


# ---------------------------------------------------------------- as cosmos-reason1's evaluator, with the parser `compat`


def compat(answer_type: str, **generation: Any) -> EvalConfig:
    value = config(answer_type, **generation)
    return value.model_copy(update={"evaluation": value.evaluation.model_copy(update={"parser": "compat"})})


PENALTIES = {"repetition_penalty": 1.05, "presence_penalty": 0.5, "frequency_penalty": -0.5}


@pytest.mark.parametrize(
    ("attempt", "temperature", "tokens"), [(0, 0.0, 10), (1, 0.65, 1024 + 256), (10, 0.9, 1024 + 2560)]
)
def test_compat_letters_ignore_penalties_on_all_attempts(attempt: int, temperature: float, tokens: int) -> None:
    result = choose_sampling(compat("letter", **PENALTIES), "multiple_choice", attempt)
    assert result.temperature == pytest.approx(temperature)
    expected = Sampling(temperature=1.0, top_k=1, max_completion_length=tokens, seed=7000 + attempt)
    assert replace(result, temperature=1.0) == expected


@pytest.mark.parametrize(
    ("given", "attempt", "temperature", "tokens"),
    [(0.6, 0, 0.6, 300), (0.6, 2, 0.7, 812), (1.2, 0, 1.2, 300), (1.2, 1, 0.9, 556)],
)
def test_compat_reasoning_caps_retry_temperature(given: float, attempt: int, temperature: float, tokens: int) -> None:
    result = choose_sampling(
        compat("reasoning", temperature=given, max_tokens=300, **PENALTIES), "multiple_choice", attempt
    )
    assert result.temperature == pytest.approx(temperature)
    expected = Sampling(temperature=1.0, top_p=0.95, max_completion_length=tokens, seed=7000 + attempt, **PENALTIES)
    assert replace(result, temperature=1.0) == expected


def test_unused_compat_letter_settings_are_reported() -> None:
    [note] = compat("letter", **PENALTIES).notes(8)
    assert note == (
        "generation.frequency_penalty (-0.5), generation.presence_penalty (0.5), generation.repetition_penalty (1.05) "
        "are used only with answer_type = reasoning: letter has no penalties with the parser compat"
    )
    assert compat("reasoning", **PENALTIES).notes(8) == config("letter", **PENALTIES).notes(8) == []
