"""Sequence parallelism: ranks that share each row get the same loss and gradients as a single rank."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from tests.distributed import run_on_ranks
from tests.integration import test_grpo_gradients as grpo
from tests.integration.lora import LORA, trained_adapters
from tests.integration.rows import write_mixed_rows
from tests.integration.test_gradient_invariance import Gradients, worst_difference

pytestmark = pytest.mark.integration

FAMILIES = ("qwen2_5_vl", "qwen3_vl")
Found = tuple[dict[str, float], Gradients]
"""Metrics and gradients of a step."""

SHORT = {"train": {"max_tokens_per_micro_batch": 160}}
CASES: dict[str, dict[str, Any]] = {
    "one row": {},
    "short rows": SHORT,
    "recomputed": {"model": {"gradient_checkpointing": True}},
    "frozen tower": {"model": {"freeze": ["visual"]}},
    "one sample a row": {"train": {"micro_batch_size": 1}},
    "zero 2": {"deepspeed": "zero2.json"} | SHORT,
    "adapters": {"lora": LORA},
    "adapters, inputs on the host": {
        **{"lora": LORA, "model": {"gradient_checkpointing": True}},
        "train": {"activation_offload": True, "max_tokens_per_micro_batch": 160},
    },
    "adapters beside 4 bits": {"lora": LORA, "model": {"quantize": "nf4"}},
}
"""Case → settings that are added to the usual ones."""
OF_ONE = {name: name for name in ("frozen tower", "adapters", "adapters beside 4 bits")}
OF_ONE |= {"adapters, inputs on the host": "adapters"}
"""Case → single-rank case with the same gradients; "one row" for all cases that are not listed."""


class Ranks(NamedTuple):
    count: int
    per_row: int


LAYOUTS = {
    Ranks(2, 2): list(CASES),
    Ranks(4, 2): ["short rows", "zero 2"],  # the second group has fewer rows than the first
    # The model has only two key-value heads, fewer than ranks.
    Ranks(4, 4): ["one row", "recomputed", "one sample a row"],
}


def run_config(rows: str, model: str, ranks_per_row: int, sections: dict[str, Any]) -> Any:
    from dsreason.config.schema import SFTConfig

    usual: dict[str, Any] = {
        "model": {"path": model, "gradient_checkpointing": False},
        "data": {"adapter": "jsonl", "path": rows, "workers": 0, "vision": {"fps": 4.0}},
        "train": {"precision": "fp32", "global_batch_size": 8, "sequence_parallel_size": ranks_per_row},
    }
    merged = {name: value | sections.get(name, {}) for name, value in usual.items()}
    return SFTConfig.model_validate(sections | merged)


def sft_steps(rows: str, models: list[str], ranks_per_row: int, names: list[str]) -> list[Found] | None:
    """Run the first step of each case for each model, in that order; return the results on rank 0."""
    from dsreason.config.deepspeed import resolve_deepspeed
    from dsreason.data.loader import StepLoader
    from dsreason.data.sources import open_datasets
    from dsreason.job.ranks import build_row_groups, gather_objects, init_world
    from dsreason.train.common.global_batches import build_step_order
    from dsreason.train.common.opening import build_policy_engine
    from dsreason.train.common.preflight import build_encoder
    from dsreason.train.sft.loop import accumulate_gradients
    from tests.engines import full_gradients

    world = build_row_groups(init_world(), ranks_per_row)
    result = []
    for model in models:
        for name in names:
            config = run_config(rows, model, ranks_per_row, CASES[name])
            training, _ = open_datasets(config.data)
            loader = StepLoader(
                training,
                build_encoder(config, Path(model)),
                build_step_order(training, config),
                config,
                exchange=gather_objects,
                rank=world.rank,
                world_size=world.size,
                ranks_per_row=ranks_per_row,
            )
            deepspeed = resolve_deepspeed(config.deepspeed, config, device="cpu", world_size=world.size)
            with trained_adapters():
                engine = build_policy_engine(config, deepspeed, Path(model), world.group)
            batches = next(iter(loader))
            metrics = {
                "loss": accumulate_gradients(engine, batches, world)["train/loss"],
                "trained tokens": batches.num_tokens,
                "tokens": batches.num_input_tokens,
                "samples": batches.num_samples,
            }
            result.append((metrics, {name: grad.numpy() for name, grad in full_gradients(engine).items()}))
            engine.destroy()
    return result if world.is_main else None


@pytest.fixture(scope="module")
def models(tiny_qwen2_5_vl: Path, tiny_qwen3_vl: Path) -> list[str]:
    return [str(tiny_qwen2_5_vl), str(tiny_qwen3_vl)]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_mixed_rows(tmp_path_factory.mktemp("rows")))


@pytest.fixture(scope="module")
def steps(rows: str, models: list[str]) -> dict[tuple[Ranks, str, str], Found]:
    """Compute the steps by ranks, family and case; cases with the same ranks share their processes."""
    result: dict[tuple[Ranks, str, str], Found] = {}
    for ranks, names in (LAYOUTS | {Ranks(1, 1): ["one row", *dict.fromkeys(OF_ONE.values())]}).items():
        measured = run_on_ranks(sft_steps, ranks.count, rows, models, ranks.per_row, names)[0]
        keys = [(ranks, family, name) for family in FAMILIES for name in names]
        result |= dict(zip(keys, measured, strict=True))
    return result


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("ranks", "name"), [(ranks, name) for ranks, names in LAYOUTS.items() for name in names])
def test_sequence_parallel_gradients_match_single_rank(steps, ranks: Ranks, name: str, family: str) -> None:
    metrics, gradients = steps[ranks, family, name]
    expected, of_one = steps[Ranks(1, 1), family, OF_ONE.get(name, "one row")]
    assert metrics == pytest.approx(expected, rel=1e-6)
    assert worst_difference(gradients, of_one) <= 1e-5


def head_exchange(query_heads: int, key_heads: int) -> tuple[float, float]:
    """Return the errors of attention with exchanged heads compared with plain attention, for the output and the gradients."""
    import torch

    from dsreason.data.types import Segment
    from dsreason.job.ranks import build_row_groups, init_world
    from dsreason.models.attention import attend_by_segment, attend_text, build_row_layout

    world = build_row_groups(init_world(), 3)
    segments = (Segment(0, 4), Segment(4, 2, parent=0), Segment(6, 3))
    random = torch.Generator().manual_seed(0)
    full = [torch.randn(1, heads, 9, 8, generator=random) for heads in (query_heads, key_heads, key_heads)]
    weights = torch.randn(1, 9, query_heads, 8, generator=random)
    local = slice(3 * world.rank, 3 * world.rank + 3)
    parts = [item[:, :, local].clone().requires_grad_() for item in full]
    full = [item.requires_grad_() for item in full]
    expected = attend_by_segment(*full, segments, None)
    (expected * weights).sum().backward()
    layout = build_row_layout(segments, torch.device("cpu"), world.group)
    result, _ = attend_text(torch.nn.Module(), *parts, None, layout=layout)
    (result * weights[:, local]).sum().backward()
    gradients = [(part.grad - item.grad[:, :, local]).abs().max() for part, item in zip(parts, full, strict=True)]
    return float((result - expected[:, local]).abs().max()), float(max(gradients))


@pytest.mark.parametrize(("query_heads", "key_heads"), [(6, 2), (12, 4), (3, 3), (9, 3)])
def test_head_exchange_supports_any_number_of_key_heads(query_heads: int, key_heads: int) -> None:
    for output, gradients in run_on_ranks(head_exchange, 3, query_heads, key_heads):
        assert output <= 1e-6
        assert gradients <= 2e-6


def made_up_rollouts(config: Any, encoder: Any) -> list[Any]:
    """Build two completions with made-up ids, log-probabilities and advantages for each of four prompts."""
    from dsreason.data.sources import open_datasets
    from dsreason.rollout.protocol import make_single_turn
    from dsreason.train.grpo.rollouts import Rollout

    training, _ = open_datasets(config.data)
    prompts = [encoder.encode_prompt(training[i]) for i in range(4)]
    random, result = np.random.default_rng(0), []
    for i, length in enumerate(length for lengths in grpo.LENGTHS[:4] for length in lengths[:2]):
        ids = tuple(random.integers(5, 60, length).tolist())
        logprobs = tuple(random.normal(-5, 1.0, length).tolist())
        completion = make_single_turn(ids, "", logprobs, "stop", 0)
        result.append(Rollout(prompts[i // 2], completion, 0.0, {}, float(random.normal())))
    return result


def grpo_steps(rows: str, model: str, ranks_per_row: int, variants: list[str]) -> list[Found] | None:
    """Run one GRPO step per variant and return the results on rank 0. All ranks have the same rollouts."""
    import torch

    from dsreason.config.deepspeed import resolve_deepspeed
    from dsreason.engine.engine import set_learning_rate
    from dsreason.job.ranks import build_row_groups, init_world
    from dsreason.rollout.protocol import find_media_token_ids
    from dsreason.train.common.opening import build_policy_engine
    from dsreason.train.common.preflight import build_encoder
    from dsreason.train.grpo.update import accumulate_gradients, split_into_micro_batches
    from tests.engines import full_gradients

    world, result = build_row_groups(init_world(), ranks_per_row), []
    engines: dict[int, Any] = {}
    for variant in variants:
        train = {"sequence_parallel_size": ranks_per_row, "max_tokens_per_micro_batch": 200}
        config = grpo.run_config(rows, model, variant, train)
        encoder = build_encoder(config, Path(model))
        if config.lora.rank not in engines:
            deepspeed = resolve_deepspeed(config.deepspeed, config, device="cpu", world_size=world.size)
            with trained_adapters():
                engines[config.lora.rank] = build_policy_engine(config, deepspeed, Path(model), world.group)
            set_learning_rate(engines[config.lora.rank], 0.0)
        engine = engines[config.lora.rank]
        micro_batches = split_into_micro_batches(made_up_rollouts(config, encoder), config, encoder, world.row_part)
        micro_batches = [
            replace(micro_batch, old_logprobs=grpo.other_logprobs(micro_batch, 0.1)) for micro_batch in micro_batches
        ]
        if variant.startswith("kl"):
            micro_batches = [
                replace(micro_batch, ref_logprobs=grpo.other_logprobs(micro_batch, 0.5))
                for micro_batch in micro_batches
            ]
        banned = torch.tensor(find_media_token_ids(encoder.processor.tokenizer, encoder.family))
        metrics, _ = accumulate_gradients(engine, micro_batches, config, world, banned)
        result.append((metrics, {name: grad.numpy() for name, grad in full_gradients(engine).items()}))
        engine.step()
    return result if world.is_main else None


VARIANTS = {"qwen3_vl": list(grpo.VARIANTS), "qwen2_5_vl": ["gspo", "kl", "entropy"]}


@pytest.fixture(scope="module")
def policy_steps(rows: str, models: list[str]) -> dict[tuple[int, str, str], Found]:
    """Compute the GRPO steps by number of ranks, family and variant."""
    result = {}
    for family, model in zip(FAMILIES, models, strict=True):
        for ranks in (1, 2):
            measured = run_on_ranks(grpo_steps, ranks, rows, model, ranks, VARIANTS[family])[0]
            result |= {(ranks, family, variant): item for variant, item in zip(VARIANTS[family], measured, strict=True)}
    return result


@pytest.mark.parametrize(("family", "variant"), [(family, name) for family in VARIANTS for name in VARIANTS[family]])
def test_sequence_parallel_policy_gradients_match_single_rank(policy_steps, family: str, variant: str) -> None:
    metrics, gradients = policy_steps[2, family, variant]
    expected, of_one = policy_steps[1, family, variant]
    assert metrics == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert np.sqrt(sum(np.sum(grad**2) for grad in of_one.values())) > 1e-3
    assert worst_difference(gradients, of_one) <= 1e-5
