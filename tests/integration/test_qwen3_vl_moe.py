"""A mixture of experts: ranks that use different experts finish a step, and vLLM gets the weights of all experts."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch.nn.functional import linear
from transformers import AutoModelForImageTextToText
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import Qwen3VLMoeTextTopKRouter as Router

from dsreason.models.load import load_model
from dsreason.models.policy import Policy
from dsreason.models.tiny import build_tiny
from tests.distributed import run_on_ranks
from tests.integration.command import dsreason, metrics
from tests.integration.rows import write_mixed_rows
from tests.integration.test_cosmos3 import CONFIG, REWARDS
from tests.integration.test_gradient_invariance import worst_difference
from tests.integration.test_zero3_blocks import first_batches, sft_config

pytestmark = pytest.mark.integration


@contextmanager
def only_half_of_the_experts(half: int) -> Iterator[None]:
    """Route all tokens to the first (0) or the second (1) half of each layer's experts."""

    def route(router: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = linear(hidden.reshape(-1, router.hidden_dim), router.weight)
        is_other = torch.arange(router.num_experts) // (router.num_experts // 2) != half
        scores, experts = logits.masked_fill(is_other, -torch.inf).softmax(-1).topk(router.top_k)
        return logits, scores / scores.sum(-1, keepdim=True), experts

    with mock.patch.object(Router, "forward", route):
        yield


def open_engine(rows: str, model: str, **sections: Any) -> Any:
    from dsreason.config.deepspeed import resolve_deepspeed
    from dsreason.job.ranks import gather_objects, init_world
    from dsreason.train.common.opening import build_policy_engine

    world = init_world()
    config = sft_config(rows, model, {"model": {"gradient_checkpointing": True}, **sections})
    deepspeed = resolve_deepspeed(config.deepspeed, config, device="cpu", world_size=world.size)
    deepspeed["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    batches = first_batches(config, world.rank, world.size, gather_objects)
    return build_policy_engine(config, deepspeed, Path(model)), batches, world


def train_on_rank(rows: str, model: str) -> Any:
    """Take a step whose ranks use disjoint experts, and then steps of which only one rank has a row.

    Return the first step's micro-batches on this rank, pickled, its number of trained tokens and its gradients; and the numbers
    of trained tokens of this rank's micro-batches in the other steps.
    """
    from dsreason.train.sft.loop import accumulate_gradients
    from tests.engines import full_gradients

    engine, batches, world = open_engine(rows, model)
    with only_half_of_the_experts(world.rank):
        accumulate_gradients(engine, batches, world)
        gradients = {name: gradient.numpy() for name, gradient in full_gradients(engine).items()}
        engine.step()
    engine.destroy()
    train = {"global_batch_size": 1, "router_loss_weight": 0.1}
    engine, few, _ = open_engine(rows, model, train=train, lora={"rank": 4, "targets": ["self_attn"]})
    for _ in range(2):  # the second step compares the order of modules between the ranks
        accumulate_gradients(engine, few, world)
        engine.step()
    return (
        pickle.dumps(batches.micro_batches),
        batches.num_tokens,
        gradients,
        [len(b.targets) for b in few.micro_batches],
    )


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, tiny_qwen3_vl_moe: Path) -> list[Any]:
    rows = write_mixed_rows(tmp_path_factory.mktemp("rows"))
    return run_on_ranks(train_on_rank, 2, str(rows), str(tiny_qwen3_vl_moe), timeout=300)


@pytest.mark.long
def test_rank_without_rows_finishes_steps(results: list[Any]) -> None:
    assert [counts for *_, counts in results] == [[8], [0]]


@pytest.mark.long
def test_ranks_with_disjoint_experts_finish_step(results: list[Any], tiny_qwen3_vl_moe: Path) -> None:
    policy = Policy(load_model(tiny_qwen3_vl_moe, dtype=torch.float32))
    for rank, (micro_batches, num_tokens, _) in enumerate(result[:3] for result in results):
        with only_half_of_the_experts(rank):
            for batch in pickle.loads(micro_batches):
                (-policy(batch).sum() / num_tokens).backward()
    expected = {name: parameter.grad.numpy() for name, parameter in policy.named_parameters()}
    experts = torch.from_numpy(results[0][2]["model.model.language_model.layers.0.mlp.experts.down_proj"])
    assert experts[:4].any() and experts[4:].any()  # each rank contributes the gradients of its experts
    assert worst_difference(results[0][2], expected) <= 1e-5


def check_separate_adapter(exported: Path) -> None:
    """Check that peft computes the merged model's output from the base model and the adapter in the export."""
    base = AutoModelForImageTextToText.from_pretrained(build_tiny("qwen3_vl_moe", exported.parent / "base"))
    merged, ids = AutoModelForImageTextToText.from_pretrained(exported), torch.arange(20, 60)[None]
    with torch.no_grad():
        expected = PeftModel.from_pretrained(base, exported / "adapter")(input_ids=ids).logits
        torch.testing.assert_close(merged(input_ids=ids).logits, expected, rtol=0, atol=1e-5)


ADAPTERS = ("--set", 'lora={rank = 4, targets = ["self_attn", "mlp\\\\.experts"]}')


@pytest.mark.long
@pytest.mark.parametrize(
    ("preset", "adapters"), [("gspo", ()), pytest.param("dapo", ADAPTERS, marks=pytest.mark.nightly)]
)
def test_vllm_samples_from_trained_experts(preset: str, adapters: tuple[str, ...], tmp_path: Path) -> None:
    config = CONFIG.format(rows=write_mixed_rows(tmp_path / "data")).replace("cosmos3_omni", "qwen3_vl_moe")
    (tmp_path / "run.toml").write_text(config.replace("[grpo]", f'[grpo]\npreset = "{preset}"'))
    (tmp_path / "rewards.py").write_text(REWARDS)
    options = ("--config", "run.toml", "--nproc", 2, "--output-dir", "run", "--set", "train.router_loss_weight=0.01")
    done = dsreason("grpo", *options, *adapters, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    steps = [line for line in metrics(tmp_path / "run") if "train/loss" in line]
    assert [line["step"] for line in steps] == [1, 2]
    assert all(line["mismatch/max_abs_logprob"] <= 1e-5 for line in steps)
    # 2 if all experts are equally loaded, and 8 if all tokens are sent to the same two of 8 experts with certainty
    assert all(2 <= line["router/balance_loss"] <= 8 and 1 <= line["router/max_load"] <= 4 for line in steps)
    exported = tmp_path / "run/export/final"
    name = "model.language_model.layers.0.mlp.experts.gate_up_proj"
    assert load_file(exported / "model.safetensors")[name].shape == (8, 128, 384)  # as published
    if adapters:
        check_separate_adapter(exported)
    trained = dict(load_model(exported, dtype=torch.float32).named_parameters())
    reference = dict(AutoModelForImageTextToText.from_pretrained(exported, dtype=torch.float32).named_parameters())
    assert trained[name].shape == (8, 384, 128) and trained[name].is_contiguous()
    assert all(trained[name].equal(reference[name]) for name in trained)
