"""Gradients of a GRPO step, tested with hand-made rollouts and an engine whose log-probabilities are leaf tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dsreason.config.schema_grpo import GRPOConfig
from dsreason.data.chat import EncodedPrompt
from dsreason.data.collate import collate
from dsreason.data.types import EncodedSample, Sample
from dsreason.job.ranks import World
from dsreason.rollout.protocol import make_single_turn
from dsreason.train.grpo import update
from dsreason.train.grpo.rollouts import Rollout, RolloutMicroBatch, build_training_sample

BANNED = torch.zeros(0, dtype=torch.int64)
PROMPT = EncodedPrompt(
    Sample("p", []),
    EncodedSample(
        id="p",
        input_ids=torch.tensor([1, 2]),
        loss_mask=torch.zeros(2, dtype=torch.bool),
        position_ids=torch.arange(2).expand(3, -1),
        mm_token_type_ids=torch.zeros(2, dtype=torch.int64),
        mm_kwargs={},
    ),
    [1, 2],
    [],
)


class Engine:
    """An engine that returns the log-probabilities of each micro-batch in turn, and an entropy of 2 per token."""

    device = torch.device("cpu")
    module = SimpleNamespace(router_output=None, router_loss_weight=0.0, top_k=0)

    def __init__(self, *logprobs: list[float]) -> None:
        self.logprobs = [torch.tensor(values, requires_grad=True) for values in logprobs]
        self.temperatures: list[float] = []
        self.boundaries: list[bool] = []
        self.calls = 0

    def __call__(self, batch: Any, temperature: float, banned_ids: Tensor, with_entropy: bool = False) -> Any:
        logprobs = self.logprobs[self.calls % len(self.logprobs)]
        self.calls += 1
        self.temperatures.append(temperature)
        return (logprobs, torch.full_like(logprobs, 2.0)) if with_entropy else logprobs

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        self.boundaries.append(is_boundary)

    def backward(self, loss: Tensor, *, scale_wrt_gas: bool) -> None:
        assert not scale_wrt_gas
        loss.backward()

    def step(self) -> None:
        assert not self.boundaries[-1], "the caller steps after the last micro-batch"


def micro_batch(*rollouts: tuple[tuple[float, ...], float], **fixed: Tensor) -> RolloutMicroBatch:
    """Build a micro-batch from rollouts given as (the rollout engine's log-probabilities, advantage)."""
    made = [
        Rollout(PROMPT, make_single_turn(tuple(range(5, 5 + len(value))), "", value, "stop", 0), 0.0, {}, advantage)
        for value, advantage in rollouts
    ]
    return RolloutMicroBatch(collate([build_training_sample(item) for item in made], pad_id=0), made, **fixed)


def config(**algorithm: Any) -> GRPOConfig:
    return GRPOConfig.model_validate(
        {
            "reward": {"functions": {"format": 1.0}},
            "rollout": {"temperature": 0.7, "max_completion_length": 4},
            "grpo": {"preset": "dapo", "correction": "none", **algorithm},
        }
    )


def with_other_rank(monkeypatch: pytest.MonkeyPatch, *answers: Any) -> None:
    """Simulate a second rank that contributes `answers`, in this order."""
    following = iter(answers)
    monkeypatch.setattr(update, "gather_objects", lambda own: [own, next(following)])


NOTHING_ELSE: Any = ({"train/loss": 0.0, "policy/entropy": 0.0, "policy/clip_fraction": 0.0, "policy/kl": 0.0}, [])


def test_loss_is_normalized_by_global_token_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # 3 tokens here and 5 on the other rank. At a ratio of 1 the gradient of a token is -A / 8; DeepSpeed divides by 2 ranks.
    with_other_rank(monkeypatch, 5, 1, ({**NOTHING_ELSE[0], "train/loss": 0.25, "policy/entropy": 4.0}, []))
    engine = Engine([-1.0, -2.0], [-3.0])
    batches = [micro_batch(((-1.0, -2.0), 1.0)), micro_batch(((-3.0,), -0.5))]
    metrics, _ = update.accumulate_gradients(engine, batches, config(), World(0, 0, 2, torch.device("cpu")), BANNED)  # type: ignore[arg-type]  # all that is used of an engine
    assert [logprob.grad.tolist() for logprob in engine.logprobs if logprob.grad is not None] == [
        [-2 / 8] * 2,
        [0.5 * 2 / 8],
    ]
    assert metrics["train/loss"] == pytest.approx(-(1 + 1 - 0.5) / 8 + 0.25)
    assert metrics["policy/entropy"] == pytest.approx((3 * 2 + 4) / 8)
    assert engine.boundaries == [False, True]
    assert engine.temperatures == [0.7, 0.7]


def test_sequences_are_counted_over_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    # GRPO: 1 sequence here and 3 on the other rank, so the gradient of each of the 2 tokens here is -A / (2 * 4).
    with_other_rank(monkeypatch, 9, 3, NOTHING_ELSE)
    engine = Engine([-1.0, -2.0])
    settings = config(preset="grpo", kl_coef=0.0)
    update.accumulate_gradients(
        engine, [micro_batch(((-1.0, -2.0), 1.0))], settings, World(0, 0, 1, torch.device("cpu")), BANNED
    )  # type: ignore[arg-type]
    assert engine.logprobs[0].grad is not None
    assert engine.logprobs[0].grad.tolist() == [-1 / 8, -1 / 8]


def test_correction_weighs_old_policy_against_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    # π_old / π_rollout = e^-0.5 = 0.60653 and e^0.1 = 1.10517; the gradient is -w A / 2 tokens.
    monkeypatch.setattr(update, "gather_objects", lambda own: [own])
    engine = Engine([-1.5, -2.0])
    update.accumulate_gradients(
        engine,  # type: ignore[arg-type]
        [micro_batch(((-1.0, -2.1), 1.0))],
        config(correction="token_truncate"),
        World(0, 0, 1, torch.device("cpu")),
        BANNED,
    )
    assert engine.logprobs[0].grad is not None
    assert engine.logprobs[0].grad.tolist() == pytest.approx([-0.60653 / 2, -1.10517 / 2], abs=1e-5)


def test_ratio_and_kl_use_fixed_logprobs(monkeypatch: pytest.MonkeyPatch) -> None:
    # Ratios e^0.1 and e^0.5, the latter clipped at 1.28; k3 with d = 0.5 is 0.148721, with d = 0 it is 0.
    monkeypatch.setattr(update, "gather_objects", lambda own: [own])
    engine = Engine([-1.0, -2.0])
    fixed = {"old_logprobs": torch.tensor([-1.1, -2.5]), "ref_logprobs": torch.tensor([-0.5, -2.0])}
    metrics, _ = update.accumulate_gradients(
        engine,  # type: ignore[arg-type]
        [micro_batch(((-1.0, -2.0), 1.0), **fixed)],
        config(kl_coef=0.0),
        World(0, 0, 1, torch.device("cpu")),
        BANNED,
    )
    assert metrics["policy/kl"] == pytest.approx(0.148721 / 2, abs=1e-6)
    assert metrics["policy/clip_fraction"] == 0.5
    assert metrics["train/loss"] == pytest.approx(-(1.105171 + 1.28) / 2, abs=1e-6)


def test_fixed_logprobs_are_measured_only_when_needed() -> None:
    engine, inside = Engine([-1.0]), []

    class Reference:
        @contextmanager
        def in_place(self) -> Iterator[None]:
            engine.logprobs = [torch.tensor([-9.0])]
            inside.append(engine.calls)
            yield
            inside.append(engine.calls)

    item = micro_batch(((-1.0,), 1.0))
    ((alone,),) = update.add_fixed_logprobs([[item]], engine, None, None, config(), BANNED)  # type: ignore[arg-type]
    assert (alone.old_logprobs, alone.ref_logprobs, engine.calls) == (None, None, 0)
    steps = update.add_fixed_logprobs([[item], [item]], engine, Reference(), None, config(), BANNED)  # type: ignore[arg-type]
    result = [(batch.old_logprobs, batch.ref_logprobs) for step in steps for batch in step]
    assert [(old.tolist(), ref.tolist()) for old, ref in result if old is not None and ref is not None] == [
        ([-1.0], [-9.0])
    ] * 2
    assert inside == [2, 4]
