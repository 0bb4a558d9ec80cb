"""Plans of complete runs: whether they fit, the reasons if not, and suggestions, which must work."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dsreason.cli.data.chosen_run import choose_trainer
from dsreason.config.load import load_config
from dsreason.config.schema import RunConfig
from dsreason.tools.planning.advice import apply_change, list_suggestions
from dsreason.tools.planning.phases import GIB
from dsreason.tools.planning.plan import Plan, plan_run
from dsreason.tools.planning.request import Machine, PlanRequest
from dsreason.tools.planning.training import compute_activations
from tests.unit.tools.planning.made_requests import SEVEN, grpo, sft

RECIPES = Path(__file__).parents[4] / "launch" / "recipes"
SIZED = re.compile(r"Sized for (\d+) GPUs? of (\d+) GB")


def item(plan: Plan, phase: str, name: str) -> int:
    return sum(
        element.nbytes
        for result in plan.phases
        if result.name.startswith(phase)
        for element in result.items
        if element.name == name
    )


def test_7b_sft_on_two_gpus_needs_offload() -> None:
    plan = plan_run(sft(gpus=2, train={"max_tokens_per_micro_batch": 16384}))
    assert not plan.fits
    assert plan.problems[0].startswith("forward and backward")
    assert "--ds-config zero3_offload.json" in [
        suggestion.change.text.partition(" (")[0] for suggestion in list_suggestions(plan)
    ]


def test_7b_grpo_fits_on_four_gpus() -> None:
    plan = plan_run(grpo(gpus=4, train={"max_tokens_per_micro_batch": 16384}))
    assert plan.fits
    assert {phase.name.partition(" (")[0] for phase in plan.phases} == {
        "rollout: vLLM awake",
        "weight sync",
        "forward and backward",
        "optimizer step",
    }


@pytest.mark.parametrize(("ds_config", "fits"), [("zero3_offload.json", True), ("zero3.json", False)])
def test_32b_fits_on_eight_gpus_with_offload(ds_config: str, fits: bool) -> None:
    assert plan_run(sft("Qwen/Qwen3-VL-32B-Instruct", 8, ds_config)).fits is fits


def test_suggested_change_fits_when_planned_again() -> None:
    plan = plan_run(sft(gpus=2, train={"max_tokens_per_micro_batch": 16384}))
    result = list_suggestions(plan)
    assert result
    for item in result:
        second = plan_run(apply_change(plan.request, item.change))
        assert second.fits
        assert f"fits, {second.fullest.total / GIB:.1f} GiB per GPU" in item.text


def test_fitting_run_gets_no_suggestions() -> None:
    assert list_suggestions(plan_run(sft(gpus=8))) == []


def test_too_small_cache_is_reported_with_suggestion() -> None:
    plan = plan_run(grpo(gpus=4, rollout={"gpu_memory_utilization": 0.22}))
    assert any("but one sequence has up to" in text for text in plan.problems)
    keys = [key for suggestion in list_suggestions(plan) for key in suggestion.change.sets]
    assert "rollout.gpu_memory_utilization" in keys


def test_vllm_shortage_is_reported_by_phase() -> None:
    plan = plan_run(grpo(gpus=1, lora={"rank": 16}, rollout={"gpu_memory_utilization": 0.9}))
    assert [text.partition(":")[0] for text in plan.problems] == ["rollout"]


def test_offloaded_layer_inputs_move_to_the_host() -> None:
    """Expect inputs of 28 layers with 4,096 tokens of 3,584 values of 2 bytes; those of one layer stay on the GPU."""
    usual, moved = sft(), sft(train={"activation_offload": True})
    assert compute_activations(usual).inputs == 28 * 4096 * 3584 * 2
    assert compute_activations(moved).inputs == 4096 * 3584 * 2
    assert compute_activations(moved).on_host == 28 * 4096 * 3584 * 2


def test_sequence_parallel_ranks_divide_the_tokens() -> None:
    request = sft(train={"sequence_parallel_size": 4})
    assert request.tokens == 1024
    assert compute_activations(request).inputs == 28 * 1024 * 3584 * 2


def test_kl_needs_host_copies_except_with_adapters() -> None:
    name = "copies of reference and policy for swapping, pinned"

    def copies(request: PlanRequest) -> int:
        return sum(item.nbytes for item in plan_run(request).host.items if item.name == name)

    assert copies(grpo(grpo={"kl_coef": 0.1})) == pytest.approx(2 * 2 * 8_292_166_656, rel=1e-4)
    assert copies(grpo(grpo={"kl_coef": 0.0})) == 0
    assert copies(grpo(grpo={"kl_coef": 0.1}, lora={"rank": 8})) == 0


@pytest.mark.parametrize(("offload", "on_gpu"), [(False, True), (True, False)])
def test_teacher_placement_follows_config(offload: bool, on_gpu: bool) -> None:
    plan = plan_run(grpo(gpus=8, distill={"teacher": SEVEN, "offload": offload}))
    share = pytest.approx(2 * 8_292_166_656 / 8, rel=1e-4)
    assert item(plan, "rollout", "teacher's weights") == (share if on_gpu else 0)
    assert sum(element.nbytes for element in plan.host.items if element.name == "teacher") == (
        0 if on_gpu else pytest.approx(2 * 8_292_166_656, rel=1e-4)
    )


def test_validation_that_generates_needs_full_model_copy() -> None:
    plan = plan_run(sft(data={"validation": 100}))
    assert item(plan, "sampling with transformers", "full copy of the model") == 2 * 8_292_166_656
    silent = plan_run(sft(data={"validation": 100}, validation={"generate": False}))
    assert item(silent, "sampling with transformers", "full copy of the model") == 0


def test_disk_estimate_uses_bytes_per_parameter() -> None:
    disk = plan_run(sft()).disk
    assert [item.nbytes for item in disk.items] == [4 * 14 * 8_292_166_656, 2 * 8_292_166_656]


def planned_recipes() -> list[Path]:
    files = [file for file in sorted(RECIPES.glob("*.toml")) if "eval" not in file.name]
    return [file for file in files if issubclass(choose_trainer(file, None, None).schema, RunConfig)]


@pytest.mark.parametrize("recipe", planned_recipes(), ids=lambda file: file.stem)
def test_shipped_recipes_fit_their_stated_gpus(recipe: Path) -> None:
    trainer = choose_trainer(recipe, None, None)
    config = load_config(trainer.schema, recipe, (), default_recipe=trainer.recipe)
    sized = SIZED.search(recipe.read_text())
    machine = Machine(int(sized[1]), float(sized[2])) if sized else Machine(1)
    plan = plan_run(PlanRequest(trainer.name, config, machine, config.deepspeed, recipe.name))
    assert plan.problems == []


def test_held_out_forward_is_a_separate_phase() -> None:
    """Expect eight rows of 4,096 tokens, however long training rows are, with four copies of their hidden states."""
    plan = plan_run(sft(data={"validation": 100}, train={"max_tokens_per_micro_batch": 4096}))
    assert item(plan, "validation", "hidden states") == 4 * 8 * 4096 * 3584 * 2
    assert item(plan_run(sft()), "validation", "hidden states") == 0


def test_fewer_held_out_rows_are_suggested() -> None:
    plan = plan_run(sft(data={"validation": 100}, gpus=4, validation={"micro_batch_size": 256, "generate": False}))
    assert [text.partition(":")[0] for text in plan.problems] == ["validation"]
    assert "validation.micro_batch_size" in [
        key for suggestion in list_suggestions(plan) for key in suggestion.change.sets
    ]
