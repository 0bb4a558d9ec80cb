"""`dsreason eval` through the installed command: never misaligned, never short, and the same however often it is killed."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.integration.command import dsreason
from tests.integration.rows import COLOURS, film

pytestmark = pytest.mark.integration

FP32 = ("--set", 'model.dtype="float32"')
SHORT = (
    "--set",
    "generation.max_retries=1",
    "--set",
    "generation.max_tokens=16",
)  # a random model never ends by itself
NUM_CLIPS = 6


@pytest.fixture(scope="module")
def benchmark(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`benchmark/robots`: six clips, the second with two questions; of all kinds."""
    folder = tmp_path_factory.mktemp("eval")
    clips = folder / "benchmark" / "robots" / "clips"
    clips.mkdir(parents=True)
    items = []
    for i in range(NUM_CLIPS):
        film(clips / f"clip.{i}.mp4", list(COLOURS.values())[i % 4], np.random.default_rng(i))
        question = {"question": "Which colour?", "index2ans": {"A": "red", "B": "green"}, "answer": "AB"[i % 2]}
        items.append({"video": f"clips/clip.{i}.mp4", "qa_pairs": question})
    items[1]["qa_pairs"] = [items[1]["qa_pairs"], {"question": "Does it move?", "answer": "yes"}]
    items[2]["qa_pairs"] = {"question": "What colour is it?", "answer": "blue"}
    (clips.parent / "robots_benchmark_qa_pairs.json").write_text(json.dumps(items))
    return folder


def evaluate(folder: Path, results: str, *options: object, code: int = 0) -> subprocess.CompletedProcess[str]:
    ended = dsreason("eval", "--results-dir", results, *FP32, *options, cwd=folder)
    assert ended.returncode == code, ended.stderr
    assert "Traceback" not in ended.stderr
    return ended


def results(folder: Path) -> list[dict[str, Any]]:
    """Every stored result by id, without what a clock measured."""
    found = [item for file in sorted(folder.glob("*/*/*/*.json")) for item in json.loads(file.read_text())]
    return sorted(({**item, "seconds": None} for item in found), key=lambda item: item["id"])


@pytest.fixture(scope="module")
def undisturbed(benchmark: Path, tiny_qwen2_5_vl: Path) -> list[dict[str, Any]]:
    ended = evaluate(benchmark, "whole", "--model", tiny_qwen2_5_vl, "--data", ".", *SHORT)
    assert "questions/s" in ended.stderr
    return results(benchmark / "whole")


def test_every_question_has_one_answer_under_its_clip(undisturbed: list[dict[str, Any]], benchmark: Path) -> None:
    ids = [f"robots/clip.{i}/0" for i in range(NUM_CLIPS)] + ["robots/clip.1/1"]
    assert [item["id"] for item in undisturbed] == sorted(ids)
    assert {item["kind"] for item in undisturbed} == {"multiple_choice", "yes_no", "open"}
    first = undisturbed[0]
    assert first["prompt"][0] == "Answer the questions."
    assert first["prompt"][1].splitlines()[1:3] == ["(A) red", "(B) green"]
    assert (first["attempts"], first["error"]) in ((1, None), (2, None))
    (run,) = (benchmark / "whole").glob("*/letter")
    summary = json.loads((run / "summary.json").read_text())
    assert summary["accuracy"]["over_all"]["total"] == NUM_CLIPS + 1
    assert (run / "report.html").stat().st_size > 10_000


def test_a_missing_and_a_broken_clip_count_as_wrong_and_change_no_other_answer(
    undisturbed: list[dict[str, Any]], benchmark: Path, tiny_qwen2_5_vl: Path, tmp_path: Path
) -> None:
    shutil.copytree(benchmark / "benchmark", tmp_path / "benchmark")
    clips = tmp_path / "benchmark" / "robots" / "clips"
    (clips / "clip.0.mp4").unlink()
    (clips / "clip.4.mp4").write_bytes((clips / "clip.4.mp4").read_bytes()[:300])
    options = ("--model", tiny_qwen2_5_vl, "--data", tmp_path, *SHORT)
    ended = evaluate(tmp_path, "r", *options)
    found = {item["id"]: item for item in results(tmp_path / "r")}
    for id in ("robots/clip.0/0", "robots/clip.4/0"):
        failed = found.pop(id)
        assert not failed["is_correct"]
        assert id.split("/")[1] in failed["error"]
    others = [item for item in undisturbed if item["id"] in found]
    assert len(others) == NUM_CLIPS - 1
    assert [found[item["id"]]["full_response"] for item in others] == [item["full_response"] for item in others]
    assert f"{NUM_CLIPS + 1}" in ended.stdout and f"{NUM_CLIPS - 1}" in ended.stdout  # all, and answered

    shutil.copy(benchmark / "benchmark/robots/clips/clip.0.mp4", clips)
    evaluate(tmp_path, "r", *options)  # what is there now is asked again
    assert sum(item["error"] is None for item in results(tmp_path / "r")) == NUM_CLIPS


def test_other_settings_in_the_same_folder_are_refused_with_both_values(
    undisturbed: list[dict[str, Any]], benchmark: Path, tiny_qwen2_5_vl: Path
) -> None:
    options = ("--model", tiny_qwen2_5_vl, "--data", ".", *SHORT)
    ended = evaluate(benchmark, "whole", *options, "--set", "evaluation.seed=7", code=2)
    assert "evaluation.seed was 1 and is 7" in ended.stderr
    assert results(benchmark / "whole") == undisturbed


@pytest.mark.parametrize("engine", ["vllm", "transformers"])
def test_ranks_and_engines_give_the_same_answers(
    undisturbed: list[dict[str, Any]], benchmark: Path, tiny_qwen2_5_vl: Path, engine: str
) -> None:
    """Greedy with a repetition penalty: one process of transformers, two ranks of it, and vLLM over two ranks."""
    options = ("--model", tiny_qwen2_5_vl, "--data", ".", "--set", "generation.repetition_penalty=1.3")
    options += SHORT
    if not (benchmark / "one").exists():
        evaluate(benchmark, "one", *options)
    parallel = ("--tensor-parallel-size", 2) if engine == "vllm" else ("--nproc", 2)
    evaluate(benchmark, engine, *options, *parallel, "--set", f'model.engine="{engine}"')
    expected, found = results(benchmark / "one"), results(benchmark / engine)
    assert found == expected
    assert [item["full_response"] for item in found] != [item["full_response"] for item in undisturbed]


def test_the_seed_s_yaml_runs_unchanged(benchmark: Path, tiny_qwen2_5_vl: Path) -> None:
    config = Path(__file__).parents[2] / "../shared/cosmos_configs/evaluate.yaml"
    if not config.exists():
        pytest.skip("../shared/cosmos_configs is not here")
    shutil.copytree(benchmark / "benchmark" / "robots", benchmark / "as_published" / "robovqa")
    folder = benchmark / "as_published" / "robovqa"
    (folder / "robots_benchmark_qa_pairs.json").rename(folder / "robovqa_benchmark_qa_pairs.json")
    shutil.copytree(folder, folder.parent / "av")
    (folder.parent / "av/robovqa_benchmark_qa_pairs.json").rename(folder.parent / "av/av_benchmark_qa_pairs.json")
    options = ("--config", config, "--model", tiny_qwen2_5_vl, "--data", "as_published", "--limit", 2)
    evaluate(benchmark, "yaml", *options, "--set", "generation.max_tokens=8", *SHORT)
    found = results(benchmark / "yaml")
    assert sorted({item["datasource"] for item in found}) == ["av", "robovqa"]
    assert len(found) == 4
    assert all("<think> your reasoning </think>" in item["prompt"][1] for item in found)


NUM_QUESTIONS, NUM_KILLS = 200, 3


def test_killed_at_random_it_ends_with_the_results_of_an_undisturbed_one(tiny_qwen2_5_vl: Path, tmp_path: Path) -> None:
    options = ["--model", tiny_qwen2_5_vl, "--adapter", "builtin", "--limit", NUM_QUESTIONS, *FP32]
    options += [
        "--set",
        "evaluation.batch_size=16",
        "--set",
        "generation.max_retries=0",
        "--set",
        "generation.max_tokens=8",
    ]
    evaluate(tmp_path, "whole", *options)
    command = [str(Path(sys.executable).parent / "dsreason"), "eval", "--results-dir", "killed", *map(str, options)]
    moments = random.Random(0)

    def num_answered() -> int:
        return sum(item["error"] is None for item in results(tmp_path / "killed"))

    for kill in range(NUM_KILLS):
        process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        there = num_answered()
        goal = there + moments.randrange(5, NUM_QUESTIONS // (NUM_KILLS + 1))
        while process.poll() is None and num_answered() < goal:
            time.sleep(moments.random() * 0.05)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert there < num_answered() < NUM_QUESTIONS, f"kill {kill} came too late to matter"
        assert len(results(tmp_path / "killed")) == NUM_QUESTIONS  # nothing is missing from what would be scored now
    evaluate(tmp_path, "killed", *options)
    assert results(tmp_path / "killed") == results(tmp_path / "whole")
    assert len(results(tmp_path / "whole")) == NUM_QUESTIONS
