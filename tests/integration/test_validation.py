"""Validation on real ranks under ZeRO-3: the results do not depend on how the rows are divided."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from dsreason.config.schema import SFTConfig
from dsreason.data.chat import EncodedPrompt
from dsreason.data.collate import collate
from dsreason.data.sources import open_datasets
from dsreason.models.load import load_model
from dsreason.rollout.protocol import Completion
from dsreason.train.common.answers import compute_accuracies
from dsreason.train.common.preflight import build_encoder
from tests.distributed import run_on_ranks
from tests.integration.rows import write_mixed_rows

pytestmark = pytest.mark.integration


def run_config(rows: str, model: str, **validation: Any) -> SFTConfig:
    return SFTConfig.model_validate(
        {
            "model": {"path": model, "gradient_checkpointing": False},
            "data": {"adapter": "jsonl", "path": rows, "workers": 0, "vision": {"fps": 4.0}},
            "train": {"precision": "fp32", "global_batch_size": 4},
            "validation": {"max_completion_length": 4, "show": 2, **validation},
        }
    )


def validate_on_rank(rows: str, model: str, validation: dict[str, Any], data: dict[str, Any]) -> dict[str, Any]:
    from dsreason.config.deepspeed import resolve_deepspeed
    from dsreason.data.loader import StepLoader
    from dsreason.engine.offload import StateOffload
    from dsreason.job.ranks import gather_objects, init_world
    from dsreason.monitor.memory import MemoryLedger
    from dsreason.monitor.progress import Progress
    from dsreason.rollout.transformers_engine import TransformersEngine, TransformersSettings
    from dsreason.train.common.global_batches import build_step_order
    from dsreason.train.common.opening import build_policy_engine
    from dsreason.train.common.sampler import Sampler
    from dsreason.train.common.validate import HeldOut, validate
    from dsreason.train.sft.loop import run_sft_step

    calls: list[int] = []
    """Number of prompts in each call of the engine."""

    def counted(prompts: Sequence[EncodedPrompt], *args: Any, **kwargs: Any) -> list[Completion]:
        calls.append(len(prompts))
        return generate(prompts, *args, **kwargs)

    world = init_world()
    config = run_config(rows, model, **validation)
    config = config.model_copy(update={"data": config.data.model_copy(update=data)})
    dataset, _ = open_datasets(config.data)
    encoder = build_encoder(config, Path(model))
    deepspeed = resolve_deepspeed(config.deepspeed, config, device="cpu", world_size=world.size)
    engine = build_policy_engine(config, deepspeed, Path(model))
    rollout = TransformersEngine(
        Path(model),
        encoder.processor.tokenizer,
        TransformersSettings(batch_size=config.validation.micro_batch_size),
        dtype=torch.float32,
        device=world.device,
    )
    generate, rollout.generate = rollout.generate, counted
    sampler = Sampler(rollout, engine, StateOffload(engine), MemoryLedger(world.device))
    order = build_step_order(dataset, config)
    loader = StepLoader(
        dataset, encoder, order, config, exchange=gather_objects, rank=world.rank, world_size=world.size
    )

    def measure(version: int, **changes: Any) -> Any:
        changed = config.model_copy(update={"validation": config.validation.model_copy(update=changes)})
        held_out = HeldOut(dataset, encoder, changed, world)
        return validate(sampler, held_out, version=version, progress=Progress())

    results = []
    for version, batches in enumerate(loader):  # validation runs between steps, as in training
        state = torch.random.get_rng_state()
        results.append(measure(version))
        assert torch.equal(state, torch.random.get_rng_state())
        run_sft_step(engine, batches, lr=1e-2, world=world)
    full, in_parts = (measure(len(results), media_memory_gib=gib) for gib in (4.0, 1e-6))
    assert full.answers == in_parts.answers
    loss_only = measure(len(results), generate=False)
    return {
        "loss_only": loss_only.metrics,
        "metrics": [result.metrics for result in results],
        "calls": calls,
        "answers": [[asdict(answer) for answer in result.answers] for result in results],
        "sheets": sorted(results[0].sheets),
        "training": engine.training,
    }


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_mixed_rows(tmp_path_factory.mktemp("rows"), count=9))


@pytest.fixture(scope="module")
def one_rank(rows: str, tiny: Path) -> dict[str, Any]:
    return run_on_ranks(validate_on_rank, 1, rows, str(tiny), {"micro_batch_size": 9}, {})[0]


def test_validation_loss_is_mean_over_tokens(rows: str, tiny: Path, one_rank: dict[str, Any]) -> None:
    config = run_config(rows, str(tiny))
    encoder, (samples, _) = build_encoder(config, tiny), open_datasets(config.data)
    model = load_model(tiny, dtype=torch.float32).eval()
    losses = []
    for i in range(len(samples)):
        sample = encoder.encode(samples[i])
        batch, labels = collate([sample], pad_id=0), sample.input_ids.masked_fill(~sample.loss_mask, -100)[1:]
        with torch.no_grad():
            logits = model(
                input_ids=batch.input_ids,
                position_ids=batch.position_ids,
                mm_token_type_ids=batch.mm_token_type_ids,
                **batch.mm_kwargs,
            ).logits[0, :-1]
        losses.append(torch.nn.functional.cross_entropy(logits, labels, reduction="none")[labels >= 0])
    assert one_rank["metrics"][0]["val/loss"] == pytest.approx(torch.cat(losses).mean().item(), abs=1e-5)


@pytest.fixture(scope="module")
def two_ranks(rows: str, tiny: Path) -> list[dict[str, Any]]:
    return run_on_ranks(validate_on_rank, 2, rows, str(tiny), {"micro_batch_size": 2}, {})


def test_two_ranks_match_single_rank_validation(two_ranks: list[dict[str, Any]], one_rank: dict[str, Any]) -> None:
    """Use 9 mixed rows, which do not divide evenly, so that the ranks' micro-batches contain different media."""
    result = [{name: value for name, value in rank.items() if name != "calls"} for rank in two_ranks]
    assert result[0] == result[1]
    assert result[0]["answers"] == one_rank["answers"]
    assert result[0]["sheets"] == one_rank["sheets"] == [0, 4]
    assert result[0]["training"]
    for metrics, expected in zip(result[0]["metrics"], one_rank["metrics"], strict=True):
        assert metrics == pytest.approx(expected, abs=1e-5)
    first, second = (metrics["val/loss"] for metrics in one_rank["metrics"])
    assert second < first - 0.2  # the optimizer step in between was taken


def test_requests_are_batched_by_engine_capacity(
    two_ranks: list[dict[str, Any]],
) -> None:
    """Check the calls for 9 rows in three validations with enough memory for all media, and in one with too little.

    Every rank makes the same number of calls.
    """
    assert [two_rank["calls"] for two_rank in two_ranks] == [[5, 5, 5, 2, 2, 1], [4, 4, 4, 2, 2, 0]]


def test_unusable_row_stops_ranks_or_is_skipped(rows: str, tiny_qwen3_vl: Path) -> None:
    broken = Path(rows).with_name("broken.jsonl")
    lines = Path(rows).read_text().splitlines()
    broken.write_text("\n".join([*lines, lines[0].replace('"id": "0"', '"id": "bad", "video": "none.mp4"')]) + "\n")
    with pytest.raises(AssertionError, match=r"DataError.*broken\.jsonl, row \d+.*none\.mp4"):
        run_on_ranks(validate_on_rank, 2, str(broken), str(tiny_qwen3_vl), {}, {})
    results = run_on_ranks(validate_on_rank, 2, str(broken), str(tiny_qwen3_vl), {}, {"on_bad_row": "skip"})
    assert len(results[0]["answers"][0]) == 9


def test_only_loss_is_reported_without_generation(one_rank: dict[str, Any]) -> None:
    assert set(one_rank["loss_only"]) == {"val/loss"}


def test_accuracies_are_computed_from_answers(one_rank: dict[str, Any]) -> None:
    from dsreason.train.common.answers import GeneratedAnswer

    for metrics, answers in zip(one_rank["metrics"], one_rank["answers"], strict=True):
        expected = compute_accuracies([GeneratedAnswer(**answer) for answer in answers])
        assert {name: value for name, value in metrics.items() if name != "val/loss"} == expected
        assert set(expected) == {"val/accuracy", "val/accuracy/text", "val/accuracy/image", "val/accuracy/video"}
