"""The loss and gradient of given pairs are independent of their division among ranks and rows, do not depend on whether both
answers share their prompt, and equal those of a plain sum over single conversations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import run_on_ranks
from tests.integration.lora import LORA, trained_adapters
from tests.integration.rows import write_mixed_rows
from tests.integration.test_gradient_invariance import Gradients, worst_difference

pytestmark = pytest.mark.integration

LOSS = {
    "loss_weights": {"sigmoid": 0.5, "hinge": 0.3, "ipo": 0.01, "robust": 0.2, "bco": 0.3},
    "beta": 0.3,
    "label_smoothing": 0.1,
    "sft_weight": 0.5,
    "reference": "precomputed",
}
BASELINE = (0.4, 2)
"""Sum and number of the rewards in the previous steps."""
CUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "1 rank, a row": (1, {}),
    "1 rank, a pair a row": (1, {"micro_batch_size": 1}),
    "1 rank, rows of 120": (1, {"max_tokens_per_micro_batch": 120}),
    "1 rank, padded rows": (1, {"packing": False, "micro_batch_size": 8}),
    "1 rank, padded, by tokens": (1, {"packing": False, "max_tokens_per_micro_batch": 400}),
    "1 rank, sdpa": (1, {"attention": "sdpa"}),
    "1 rank, ZeRO-2": (1, {"max_tokens_per_micro_batch": 120, "deepspeed": "zero2.json"}),
    "2 ranks, a row each": (2, {}),
    "2 ranks, padded rows": (2, {"packing": False, "micro_batch_size": 2}),
    "2 ranks, ZeRO-2": (2, {"micro_batch_size": 2, "deepspeed": "zero2.json"}),
    "2 ranks compute each row": (2, {"sequence_parallel_size": 2}),
    "4 ranks, rows of 120": (4, {"max_tokens_per_micro_batch": 120}),
}
BY_HAND = "by hand"
TRAINED = {"qwen2_5_vl": ("qwen2_5_vl", {}), "qwen3_vl": ("qwen3_vl", {}), "adapters": ("qwen3_vl", LORA)}
"""Name → model family, and settings of the trained adapters (empty: all weights are trained)."""
OF_ADAPTERS = ("1 rank, rows of 120", "1 rank, padded rows", "2 ranks, a row each", "2 ranks compute each row", BY_HAND)
WANTED = [
    (cut, subject) for cut in [BY_HAND, *CUTS] for subject in TRAINED if subject != "adapters" or cut in OF_ADAPTERS
]


def run_config(rows: str, model: str, settings: dict[str, Any], lora: dict[str, Any]) -> Any:
    from dsreason.config.schema_dpo import DPOConfig

    train = {"precision": "fp32", "global_batch_size": 8, **settings}
    model_section = {"path": model, "gradient_checkpointing": False, "attention": train.pop("attention", "auto")}
    return DPOConfig.model_validate(
        {
            "model": model_section,
            "deepspeed": train.pop("deepspeed", "zero3.json"),
            "data": {"adapter": "jsonl", "path": rows, "workers": 0, "vision": {"fps": 4.0}},
            "train": train,
            "lora": lora,
            "dpo": LOSS,
        }
    )


def write_pairs(folder: Path, count: int = 8) -> Path:
    """Write pairs that alternate between text only, an image, a video and two images, with answers of different lengths and
    made-up reference log-probabilities."""
    rows = write_mixed_rows(folder, count)
    result = []
    for i, line in enumerate(rows.read_text().splitlines()):
        row = json.loads(line)
        row |= {"chosen": row.pop("answer"), "rejected": " or ".join(["grey", "pink", "cyan"][: 1 + i % 3])}
        result.append(row | {"ref_chosen_logprob": -10.0 - i, "ref_rejected_logprob": -12.5 + i / 2})
    rows.write_text("".join(json.dumps(row) + "\n" for row in result))
    return rows


Case = tuple[str, str, dict[str, Any], dict[str, Any] | None]


def results_on_rank(cases: list[Case]) -> list[tuple[float, Gradients]] | None:
    """Return the loss and full gradients of each case's first step, on rank 0; a case without settings is computed by hand."""
    from dsreason.config.deepspeed import resolve_deepspeed
    from dsreason.data.sources import open_datasets
    from dsreason.job.ranks import build_row_groups, gather_objects, init_world
    from dsreason.train.common.global_batches import build_step_order
    from dsreason.train.common.opening import build_policy_engine
    from dsreason.train.common.preflight import build_encoder
    from dsreason.train.dpo.loader import PairLoader
    from dsreason.train.dpo.preflight import build_pair_encoder
    from dsreason.train.dpo.reference import RowReference
    from dsreason.train.dpo.update import Baseline, accumulate_gradients, build_settings, compute_pair_metrics
    from tests.engines import full_gradients

    job, result = init_world(), []
    for rows, model, lora, settings in cases:
        config = run_config(rows, model, settings or {}, lora)
        world = build_row_groups(job, config.train.sequence_parallel_size)
        training, _ = open_datasets(config.data)
        encoder = build_encoder(config, Path(model))
        # The computation by hand runs several forward passes before the backward pass, which ZeRO-3 does not allow for
        # blocks that it gathers as a whole.
        file = "zero2.json" if settings is None else config.deepspeed
        deepspeed = resolve_deepspeed(file, config, device="cpu", world_size=world.size)
        with trained_adapters():
            engine = build_policy_engine(config, deepspeed, Path(model), world.group)
        if settings is None:
            loss = backward_by_hand(engine, encoder, training)
        else:
            loader = PairLoader(
                training,
                build_pair_encoder(encoder),
                build_step_order(training, config),
                config,
                exchange=gather_objects,
                rank=world.rank,
                world_size=world.size,
                ranks_per_row=world.ranks_per_row,
            )
            reference, baseline = RowReference(), Baseline(*BASELINE)
            batches = next(iter(loader))
            assert batches.num_samples == 8
            pairs, _ = accumulate_gradients(engine, batches, reference, config.dpo, world, baseline)
            loss = compute_pair_metrics(pairs, config.dpo, build_settings(config.dpo, baseline))["total"]
        result.append((loss, {name: grad.numpy() for name, grad in full_gradients(engine).items()}))
        engine.destroy()
    return result if job.is_main else None


def backward_by_hand(engine: Any, encoder: Any, training: Any) -> float:
    """Run one forward pass per conversation, read as for SFT, and apply the formulas of the losses directly."""
    from dataclasses import replace

    import torch

    from dsreason.data.collate import collate

    def log_sigma(x: torch.Tensor) -> torch.Tensor:
        return torch.log(torch.sigmoid(x))

    total, beta, smoothing, baseline = 0.0, 0.3, 0.1, 0.2
    for sample in training:
        answers = []
        for messages in (sample.messages, sample.rejected):
            encoded = encoder.encode(replace(sample, messages=messages))
            answers.append(engine(collate([encoded], pad_id=encoder.pad_id)))
        c = answers[0].sum() - sample.meta["ref_chosen_logprob"]
        r = answers[1].sum() - sample.meta["ref_rejected_logprob"]
        h = beta * (c - r)
        keep, flip = -(1 - smoothing) * log_sigma(h), -smoothing * log_sigma(-h)
        losses = {
            0.5: keep + flip,
            0.3: torch.relu(1 - h)
            - log_sigma(beta * c - baseline)
            - log_sigma(baseline - beta * r),  # hinge loss plus BCO loss
            0.01: (c / len(answers[0]) - r / len(answers[1]) - 1 / (2 * beta)) ** 2,
            0.2: (keep - flip) / (1 - 2 * smoothing),
        }
        total = total + sum(weight * loss for weight, loss in losses.items()) - 0.5 * answers[0].mean()
    loss = total / len(training)
    engine.set_gradient_accumulation_boundary(True)
    engine.backward(loss, scale_wrt_gas=False)
    return float(loss.detach())


@pytest.fixture(scope="module")
def results(
    tmp_path_factory: pytest.TempPathFactory, tiny_qwen2_5_vl: Path, tiny_qwen3_vl: Path
) -> dict[tuple[str, str], tuple[float, Gradients]]:
    """Return losses and gradients by batch split and trained model; cases with the same number of ranks share their processes."""
    rows = str(write_pairs(tmp_path_factory.mktemp("pairs")))
    models = {"qwen2_5_vl": str(tiny_qwen2_5_vl), "qwen3_vl": str(tiny_qwen3_vl)}
    expected: dict[str, tuple[int, dict[str, Any] | None]] = {BY_HAND: (1, None), **CUTS}
    result: dict[tuple[str, str], tuple[float, Gradients]] = {}
    for ranks in (1, 2, 4):
        keys = [(cut, subject) for cut, subject in WANTED if expected[cut][0] == ranks]
        cases = [(rows, models[TRAINED[subject][0]], TRAINED[subject][1], expected[cut][1]) for cut, subject in keys]
        result |= dict(zip(keys, run_on_ranks(results_on_rank, ranks, cases)[0], strict=True))
    return result


@pytest.mark.parametrize(("cut", "what"), [item for item in WANTED if item[0] != BY_HAND])
def test_loss_and_gradient_match_separate_forward_passes(results, cut, what):
    loss, gradients = results[cut, what]
    expected_loss, expected = results[BY_HAND, what]
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert worst_difference(gradients, expected) <= 1e-5
