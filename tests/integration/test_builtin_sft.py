"""The built-in recipe, run with the installed command: the model learns from the pixels, and the run writes all expected
files."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.distributed import run_on_ranks
from tests.integration.command import metrics

pytestmark = [pytest.mark.integration, pytest.mark.long]


@pytest.fixture(scope="module")
def run(trained_qwen2_5_vl: Path) -> Path:
    return trained_qwen2_5_vl


def test_generated_answers_become_correct(warm_start, run):
    random, last = metrics(warm_start)[0], metrics(run)[-1]
    assert random["step"] == 0
    assert random["val/accuracy"] < 0.1
    assert last["val/accuracy"] >= 0.8
    assert last["val/accuracy/video"] >= 0.75


def test_half_of_200_held_out_rows_are_videos(run):
    answers = [
        json.loads(line) for line in next((run / "validation").glob("step_[1-9]*.jsonl")).read_text().splitlines()
    ]
    videos = [answer for answer in answers if any(str(path).endswith(".mp4") for path in answer["media"])]
    assert len(answers) >= 200
    assert len(videos) == len(answers) // 2


@pytest.mark.nightly
def test_adapter_training_raises_accuracy(trained_adapters):
    first, last = metrics(trained_adapters)[0], metrics(trained_adapters)[-1]
    assert 0.4 <= first["val/accuracy"] <= 0.65
    assert last["val/accuracy"] >= 0.9


@pytest.mark.nightly
def test_small_adapters_are_exported_next_to_model(trained_adapters):
    final = trained_adapters / "export" / "final"
    sizes = [
        sum(tensor.numel() for tensor in load_file(final / name).values())
        for name in ("adapter/adapter_model.safetensors", "model.safetensors")
    ]
    assert sizes[0] <= 0.1 * sizes[1]
    assert "LoRA of rank 16" in (final / "README.md").read_text()


def blanked_answers(model: str) -> tuple[float, list[tuple[str, str]]]:
    """Return the accuracy when all media are replaced with grey ones, and the (question, reference) of each row."""
    from dsreason.config.deepspeed import resolve_deepspeed
    from dsreason.config.load import load_config
    from dsreason.config.schema import SFTConfig
    from dsreason.data.sources import open_datasets
    from dsreason.engine.offload import StateOffload
    from dsreason.job.ranks import init_world
    from dsreason.monitor.memory import MemoryLedger
    from dsreason.monitor.progress import Progress
    from dsreason.rollout.transformers_engine import TransformersEngine, TransformersSettings
    from dsreason.train.common.opening import build_policy_engine
    from dsreason.train.common.preflight import DTYPES, build_encoder
    from dsreason.train.common.sampler import Sampler
    from dsreason.train.common.validate import HeldOut, validate
    from tests.blank import BlankEncoder

    world = init_world()
    config = load_config(SFTConfig, None, [f"model.path={json.dumps(model)}"], default_recipe="builtin_sft.toml")
    _, held_out = open_datasets(config.data)
    encoder = BlankEncoder(**vars(build_encoder(config, Path(model))))
    deepspeed = resolve_deepspeed(config.deepspeed, config, device="cpu", world_size=1)
    engine = build_policy_engine(config, deepspeed, Path(model))
    rollout = TransformersEngine(
        Path(model),
        encoder.processor.tokenizer,
        TransformersSettings(batch_size=config.validation.micro_batch_size),
        dtype=DTYPES[config.train.precision],
        device=world.device,
    )
    sampler = Sampler(rollout, engine, StateOffload(engine), MemoryLedger(world.device))
    rows = HeldOut(held_out, encoder, config, world)
    result = validate(sampler, rows, version=1, progress=Progress())
    return result.metrics["val/accuracy"], [(answer.prompt, answer.reference) for answer in result.answers]


def best_blind_accuracy(rows: list[tuple[str, str]]) -> float:
    """Return the accuracy of guessing the most frequent answer to each question."""
    by_question: dict[str, Counter[str]] = defaultdict(Counter)
    for question, reference in rows:
        by_question[question][reference] += 1
    return sum(max(answers.values()) for answers in by_question.values()) / len(rows)


def test_accuracy_falls_to_chance_without_pixels(run):
    accuracy, rows = run_on_ranks(blanked_answers, 1, str(run / "export" / "final"))[0]
    assert accuracy <= best_blind_accuracy(rows) + 0.05


def test_run_folder_contains_all_documented_files(run):
    config = json.loads((run / "config.json").read_text())
    assert config["world_size"] == 2
    assert {"torch", "deepspeed", "transformers"} <= config["versions"].keys()
    step = metrics(run)[-1]["step"]
    for name in (
        f"checkpoints/step_{step}/COMPLETE",
        "export/final/model.safetensors",
        "logs/rank_0.log",
        "logs/rank_1.log",
    ):
        assert (run / name).is_file()
    assert list((run / "tensorboard").iterdir())
