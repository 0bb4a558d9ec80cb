"""Teachers: unusable teachers are named, and the responses of teacher servers are read or refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from dsreason.config.schema_grpo import DistillConfig, GRPOConfig
from dsreason.data.types import Sample
from dsreason.errors import ConfigError, DataError, DsReasonError
from dsreason.job.ranks import World
from dsreason.models.tiny import build_tiny
from dsreason.rollout.protocol import Completion, CompletionSegment, make_single_turn
from dsreason.train.common.preflight import build_encoder
from dsreason.train.grpo import teacher_server
from dsreason.train.grpo.preflight import check_distillation
from dsreason.train.grpo.teacher import check_teacher, check_vocabularies
from dsreason.train.grpo.teacher_server import Client, TeacherServer, check_no_media, check_server
from tests.unit.evaluation.stand_in import StandIn, serving

WORLD = World(0, 0, 1, torch.device("cpu"))


def config(folder: Path, **distill: Any) -> GRPOConfig:
    return GRPOConfig.model_validate(
        {"model": {"path": str(folder)}, "train": {"precision": "fp32"}, "distill": distill}
    )


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ({}, "reward.functions is empty; add at least one reward with its weight, or set distill.teacher"),
        ({"distill": {"coef": 0.5}}, "coef can be set only if teacher is set; remove it"),
        ({"distill": {"teacher": "t", "retries": 2}}, "retries can be set only if teacher is the URL of a server"),
        (
            {"distill": {"teacher": "http://t/v1", "server_model": "m", "offload": False}},
            "offload can be set only if teacher is a model folder",
        ),
        ({"distill": {"teacher": "http://t/v1"}}, "server_model is not set; set it to the name of the model"),
        (
            {"distill": {"teacher": "t"}, "grpo": {"num_generations": 1}, "reward": {"functions": {"format": 1.0}}},
            r"grpo.num_generations \(1\) is too small, because rewards are compared within a group",
        ),
        (
            {"distill": {"teacher": "t"}, "checkpoint": {"best_metric": "val/reward/mean"}},
            "requires rewards, but reward.functions is empty",
        ),
    ],
)
def test_contradictory_teacher_settings_are_rejected(document: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        GRPOConfig.model_validate(document)


@pytest.mark.parametrize(
    ("grpo", "said"),
    [
        ({"dynamic_sampling": True}, "^grpo.dynamic_sampling replaces"),
        ({"preset": "dapo"}, '^grpo.preset = "dapo" rep'),
    ],
)
def test_dynamic_sampling_is_rejected_with_a_teacher(grpo: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_distillation(GRPOConfig.model_validate({"distill": {"teacher": "t"}, "grpo": grpo}))
    check_distillation(GRPOConfig.model_validate({"distill": {"teacher": "t"}}))


@pytest.mark.parametrize(
    ("teacher", "said"),
    [
        ({"a": 0, "b": 2}, "the teacher has 'b' as 2, but the student has 'b' as 1 (differing entries: 2)"),
        ({"a": 0}, "the teacher has no 'b', but the student has 'b' as 1 (differing entries: 1)"),
        ({"a": 0, "b": 1, "c": 2}, "the teacher has 'c' as 2, but the student has no 'c' (differing entries: 1)"),
    ],
)
def test_different_vocabulary_is_rejected_with_example(teacher: dict[str, int], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_vocabularies("distill.teacher (t)", teacher, {"a": 0, "b": 1})
    assert said in str(error.value)
    check_vocabularies("distill.teacher (t)", {"b": 1, "a": 0}, {"a": 0, "b": 1})


def test_teacher_with_different_inputs_is_rejected_early(tiny_qwen2_5_vl: Path, tmp_path: Path) -> None:
    settings = config(tiny_qwen2_5_vl, teacher=str(tiny_qwen2_5_vl))
    encoder = build_encoder(settings, tiny_qwen2_5_vl)
    check_teacher(settings, encoder, tiny_qwen2_5_vl)
    other = build_tiny("qwen3_vl", tmp_path / "other")
    (other / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"is a qwen3_vl, but model.path \(.*\) is a qwen2_5_vl, which reads prompts"):
        check_teacher(config(tiny_qwen2_5_vl, teacher=str(other)), encoder, tiny_qwen2_5_vl)
    normalised = build_tiny("qwen2_5_vl", tmp_path / "normalised")
    for file in normalised.glob("*processor*.json"):
        file.write_text(file.read_text().replace("0.48145466", "0.5"))
    with pytest.raises(ConfigError, match=r"its \w+_processor has image_mean"):
        check_teacher(config(tiny_qwen2_5_vl, teacher=str(normalised)), encoder, tiny_qwen2_5_vl)


# ---------------------------------------------------------------- a server


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    monkeypatch.setattr(teacher_server, "FIRST_PAUSE", 0.01)
    with serving() as result:
        yield result


def said(ids: list[int], *, decoded: Any = None, **changes: Any) -> tuple[int, Any]:
    """Build a response like vLLM's.

    The first token has no entry; every other token has its log-probability, here minus a tenth of its id.
    """
    entries = [
        None,
        *({str(item): {"logprob": -item / 10, "decoded_token": decoded and decoded(item)}} for item in ids[1:]),
    ]
    return 200, {"choices": [{"prompt_logprobs": entries, "text": "x"} | changes]}


def client(server: StandIn, **changes: Any) -> Client:
    value = {"teacher": f"{server.url}/v1/", "server_model": "big", "retries": 2, "time_limit": 5.0} | changes
    return Client(DistillConfig.model_validate(value))


def rollout(prompt: list[int], completion: tuple[int, ...]) -> Any:
    return SimpleNamespace(
        prompt=SimpleNamespace(prompt_ids=prompt, sample=SimpleNamespace(id="7")),
        completion=make_single_turn(completion, "", (0.0,) * len(completion), "stop", 0),
    )


def test_server_gets_prompt_followed_by_completion(server: StandIn) -> None:
    server.respond = lambda path, body: said(body["prompt"])
    assert client(server).request_logprobs(rollout([5, 6], (20, 30, 40))) == [-2.0, -3.0, -4.0]
    requested = {"model": "big", "prompt": [5, 6, 20, 30, 40], "max_tokens": 1, "prompt_logprobs": 0}
    assert server.requests == [requested]


def test_inserted_tokens_are_sent_but_not_scored(server: StandIn) -> None:
    server.respond = lambda path, body: said(body["prompt"])
    segments = (CompletionSegment((20,), (-1.0,)), CompletionSegment((30, 40), None), CompletionSegment((50,), (-1.0,)))
    requested = rollout([5, 6], ())
    requested.completion = Completion(segments, "", "stop", 0)
    assert client(server).request_logprobs(requested) == [-2.0, -5.0]
    assert server.requests[0]["prompt"] == [5, 6, 20, 30, 40, 50]


def test_micro_batches_get_their_logprobs_in_order(server: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    from contextlib import nullcontext

    monkeypatch.setattr(teacher_server, "share_errors", nullcontext)
    monkeypatch.setattr(teacher_server, "gather_in_group", lambda own, world: [own])
    server.respond = lambda path, body: said(body["prompt"])
    teacher = TeacherServer(client(server).config, WORLD)
    batches: Any = [
        SimpleNamespace(rollouts=[rollout([1], (10, 20)), rollout([2], (30,))]),
        SimpleNamespace(rollouts=[]),
        SimpleNamespace(rollouts=[rollout([3], (40,))]),
    ]
    assert [logprob.tolist() for logprob in teacher.compute_logprobs(batches)] == [[-1.0, -2.0, -3.0], [], [-4.0]]


def test_busy_server_is_retried_and_then_named(server: StandIn) -> None:
    answers = iter([(503, {}), (429, {})])
    server.respond = lambda path, body: next(answers, said(body["prompt"]))
    assert client(server).request_logprobs(rollout([5], (20,))) == [-2.0]
    server.respond = lambda path, body: (503, {})
    with pytest.raises(
        DsReasonError, match=r"distill.teacher \(http.*/v1/completions\), sample '7': status 503 .*3 att"
    ):
        client(server).request_logprobs(rollout([5], (20,)))
    assert len(server.requests) == 6


@pytest.mark.parametrize(
    ("response", "problem"),
    [
        ((200, "<html>"), "invalid JSON"),
        ((200, {"choices": []}), "choices"),
        ((200, {"choices": [{"text": "x"}]}), "prompt_logprobs"),
        (said([5, 20, 30]), "entries for 3 tokens, but the request has 2"),
        (said([5, 21]), r"token 1 \(id 20\) has no entry"),
        (
            (200, {"choices": [{"prompt_logprobs": [None, {"20": {"logprob": 0.5}}]}]}),
            "token 1 has log-probability 0.5; it must be",
        ),
        ((200, '{"choices": [{"prompt_logprobs": [null, {"20": {"logprob": NaN}}]}]}'), "token 1|finite|NaN"),
        ((302, {}, {"location": "http://127.0.0.1:9/"}), "redirects are not followed"),
        ((401, {}), "set TEACHER_API_KEY"),
    ],
)
def test_invalid_response_is_reported_with_sample(server: StandIn, response: tuple[Any, ...], problem: str) -> None:
    server.respond = lambda path, body: response
    with pytest.raises(DsReasonError, match=f"sample '7': .*({problem})"):
        client(server).request_logprobs(rollout([5], (20,)))
    assert len(server.requests) == 1


def test_api_key_from_environment_is_hidden(server: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEACHER_API_KEY", "very-secret")
    server.respond = lambda path, body: (400, "no such model for very-secret")
    with pytest.raises(DsReasonError) as error:
        client(server).request_logprobs(rollout([5], (20,)))
    assert "no such model for ***" in str(error.value)
    assert server.headers[0]["authorization"] == "Bearer very-secret"


def tokenizer(words: dict[str, int]) -> Any:
    texts = {number: word for word, number in words.items()}
    return SimpleNamespace(
        get_vocab=lambda: words, all_special_ids=[0], decode=lambda ids: "".join(texts[item] for item in ids)
    )


def test_server_with_other_vocabulary_is_rejected(server: StandIn) -> None:
    words = {"<end>": 0, "a": 1, "b": 2, "\N{REPLACEMENT CHARACTER}": 3, "d": 4}
    settings = client(server).config
    server.respond = lambda path, body: said(body["prompt"], decoded=lambda one: {2: "b", 3: "?", 4: "d"}[one])
    check_server(settings, tokenizer(words))
    assert server.requests[0]["prompt"] == [1, 2, 3, 4]
    server.respond = lambda path, body: said(body["prompt"], decoded=lambda one: "b")
    with pytest.raises(ConfigError, match="token 4 is 'b' on the server, but 'd' in model.path"):
        check_server(settings, tokenizer(words))
    server.respond = lambda path, body: (404, "no model big")
    with pytest.raises(ConfigError, match="status 404"):
        check_server(settings, tokenizer(words))


def test_rows_with_media_are_rejected_for_server() -> None:
    check_no_media(Sample("1", [{"role": "user", "content": "Why?"}]))
    displayed = Sample("1", [{"role": "user", "content": [{"type": "video", "video": "drive.mp4"}]}])
    with pytest.raises(DataError, match=r"sample '1': contains drive.mp4, but distill.teacher is a server"):
        check_no_media(displayed)
