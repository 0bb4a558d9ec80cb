"""`dsreason eval` with the installed command: answers match their questions, none is missing, and kills do not change them."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dsreason.cli.main import main
from dsreason.config.schema_eval import EvalConfig
from dsreason.data.chat import EncodedPrompt
from dsreason.data.types import EncodedSample
from dsreason.evaluation.ask.answerers import Answering
from dsreason.evaluation.ask.engine import VERSION, EngineAnswerer
from dsreason.evaluation.questions.grading import Grader
from dsreason.evaluation.questions.questions import load_questions
from dsreason.evaluation.report.results import find_run, read_run
from dsreason.evaluation.run import Evaluation
from dsreason.models.processors.loading import open_encoder
from dsreason.rollout.protocol import Completion
from dsreason.rollout.transformers_engine import TransformersEngine
from tests.distributed import run_on_ranks
from tests.integration.command import COMMAND, dsreason
from tests.integration.rows import COLOURS, film
from tests.unit.evaluation.stand_in import PROXIES, serving

pytestmark = pytest.mark.integration

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"

FP32 = ("--set", 'model.dtype="float32"')
SHORT = (
    "--set",
    "generation.max_retries=1",
    "--set",
    "generation.max_tokens=16",
)  # a random model never generates a stop token, so its answers must be kept short
NUM_CLIPS = 6


@pytest.fixture(scope="module")
def benchmark(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create `benchmark/robots` with six clips, of which the second has two questions; all kinds of questions occur."""
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


def evaluate(folder: Path, results: str, *options: object) -> subprocess.CompletedProcess[str]:
    ended = dsreason("eval", "--results-dir", results, *FP32, *options, cwd=folder)
    assert ended.returncode == 0, ended.stderr
    assert "Traceback" not in ended.stderr
    return ended


def commands(folder: str, calls: list[list[str]]) -> list[tuple[int, str]]:
    """Run each `dsreason …` in a process that has already imported most modules; return exit codes and outputs."""
    os.chdir(folder)
    for name in (*PROXIES, "OPENAI_API_KEY"):
        os.environ.pop(name, None)
    ended = []
    for number, call in enumerate(calls):
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(name, None)  # the command is not a rank here, but starts a job with one rank
        sys.argv = ["dsreason", *call]
        with open(f"output_{number}", "w") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            try:
                main()
                code = 0
            except SystemExit as exited:
                code = int(exited.code or 0)
            sys.stdout.flush()
            sys.stderr.flush()
        ended.append((code, Path(f"output_{number}").read_text()))
    return ended


def run(folder: Path, *calls: list[object]) -> list[tuple[int, str]]:
    return run_on_ranks(commands, 1, str(folder), [["eval", *map(str, call)] for call in calls])[0]


def results(folder: Path) -> list[dict[str, Any]]:
    """Return all stored results by id, without measured times."""
    paths = [item for file in sorted(folder.glob("*/*/*/*.json")) for item in json.loads(file.read_text())]
    return sorted(({**item, "seconds": None} for item in paths), key=lambda item: item["id"])


@pytest.fixture(scope="module")
def undisturbed(benchmark: Path, tiny_qwen2_5_vl: Path) -> list[dict[str, Any]]:
    ended = evaluate(benchmark, "whole", "--model", tiny_qwen2_5_vl, "--data", ".", *SHORT)
    assert "questions/s" in ended.stderr
    return results(benchmark / "whole")


def test_answers_are_stored_with_their_clips(undisturbed: list[dict[str, Any]], benchmark: Path) -> None:
    assert len({item["id"] for item in undisturbed}) == NUM_CLIPS + 1
    assert [item["video_id"] for item in undisturbed] == [f"clip.{i}" for i in (0, 1, 1, 2, 3, 4, 5)]
    assert {item["kind"] for item in undisturbed} == {"multiple_choice", "yes_no", "open"}
    first = undisturbed[0]
    assert first["prompt"][0] == "Answer the questions."
    assert first["prompt"][1].splitlines()[1:3] == ["(A) red", "(B) green"]
    assert (first["attempts"], first["error"]) in ((1, None), (2, None))
    (run,) = (benchmark / "whole").glob("*/letter")
    summary = json.loads((run / "summary.json").read_text())
    assert summary["accuracy"]["over_all"]["total"] == NUM_CLIPS + 1
    assert (run / "report.html").stat().st_size > 10_000


def test_unreadable_clips_fail_only_their_questions(
    undisturbed: list[dict[str, Any]], benchmark: Path, tiny_qwen2_5_vl: Path, tmp_path: Path
) -> None:
    shutil.copytree(benchmark / "benchmark", tmp_path / "benchmark")
    clips = tmp_path / "benchmark" / "robots" / "clips"
    (clips / "clip.0.mp4").unlink()
    (clips / "clip.4.mp4").write_bytes((clips / "clip.4.mp4").read_bytes()[:300])
    options = ["--model", tiny_qwen2_5_vl, "--data", tmp_path, "--results-dir", "r", *FP32, *SHORT]
    [(code, text)] = run(tmp_path, options)
    assert code == 0, text
    result = {item["id"]: item for item in results(tmp_path / "r")}
    for video_id in ("clip.0", "clip.4"):
        failed = result.pop(next(id for id, item in result.items() if item["video_id"] == video_id))
        assert not failed["is_correct"]
        assert video_id in failed["error"]
    other_items = [item for item in undisturbed if item["id"] in result]
    assert len(other_items) == NUM_CLIPS - 1
    assert [result[item["id"]]["full_response"] for item in other_items] == [
        item["full_response"] for item in other_items
    ]
    [row] = [line.split() for line in text.splitlines() if line.split()[:1] == ["all"]]
    # The last column counts answered questions; the fourth column from the right counts all questions.
    assert (row[-1], row[-4]) == (f"{NUM_CLIPS - 1}", f"{NUM_CLIPS + 1}")

    shutil.copy(benchmark / "benchmark/robots/clips/clip.0.mp4", clips)
    [(_, text)] = run(tmp_path, options)  # only the question whose clip now exists is asked again
    assert "1 questions in " in text
    assert sum(item["error"] is None for item in results(tmp_path / "r")) == NUM_CLIPS


def test_changed_settings_are_rejected_with_both_values(
    undisturbed: list[dict[str, Any]], benchmark: Path, tiny_qwen2_5_vl: Path
) -> None:
    options = ["--results-dir", "whole", "--model", tiny_qwen2_5_vl, "--data", ".", *FP32, *SHORT]
    [(code, text)] = run(benchmark, [*options, "--set", "evaluation.seed=7"])
    assert code == 2
    assert "evaluation.seed was 1, but is now 7" in text
    assert results(benchmark / "whole") == undisturbed


def drawn(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the results by id, with media paths replaced by file names."""
    return {item["id"]: {**item, "media": [Path(path).name for path in item["media"]]} for item in results(folder)}


def test_other_answers_ignore_removed_or_broken_questions(
    benchmark: Path, tiny_qwen2_5_vl: Path, tmp_path: Path
) -> None:
    """Sample at a temperature from random streams. The first of two questions of `clip.1` and the only one of `clip.3` are
    removed."""
    shutil.copytree(benchmark / "benchmark", tmp_path / "fewer")
    shutil.copytree(benchmark / "benchmark", tmp_path / "broken")
    annotations = tmp_path / "fewer/robots/robots_benchmark_qa_pairs.json"
    items = json.loads(annotations.read_text())
    del items[1]["qa_pairs"][0], items[3]
    annotations.write_text(json.dumps(items))
    clip = tmp_path / "broken/robots/clips/clip.4.mp4"
    clip.write_bytes(clip.read_bytes()[:300])
    drawing = ["--model", tiny_qwen2_5_vl, "--answer-type", "reasoning", *FP32, *SHORT]
    places = {"whole": benchmark / "benchmark", "fewer": tmp_path / "fewer", "broken": tmp_path / "broken"}
    ended = run(tmp_path, *([*drawing, "--results-dir", f"r_{name}", "--data", data] for name, data in places.items()))
    assert [code for code, _ in ended] == [0, 0, 0], ended
    full, fewer, broken = (drawn(tmp_path / f"r_{name}") for name in places)
    assert len({item["full_response"] for item in full.values()}) == NUM_CLIPS + 1
    gone = [item["prompt"][1][:13] for id, item in full.items() if id not in fewer]
    assert gone == ["Which colour?"] * 2
    assert fewer == {id: item for id, item in full.items() if id in fewer}
    [failed] = [item for item in broken.values() if item["error"]]
    assert failed["video_id"] == "clip.4"
    assert {**broken, failed["id"]: None} == {**full, failed["id"]: None}


@pytest.mark.skipif(not SHARED.is_dir(), reason="the folder ../shared/data with real media is absent")
def test_questions_about_real_media_are_answered(tmp_path: Path) -> None:
    media = {"photo.jpg": "image", "sample.png": "image", "sample.mp4": "video", "packer.mp4": "video"}
    rows = [
        {"id": name, kind: str(SHARED / name), "question": "What is there?", "answer": "a thing"}
        for name, kind in media.items()
    ]
    (tmp_path / "real.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ["--model", "tiny:qwen2_5_vl", "--data", "real.jsonl", *SHORT, "--set", "vision.total_pixels=2000000"]
    [(code, text)] = run(tmp_path, options)
    assert code == 0, text
    result = {item["video_id"]: item for item in results(tmp_path / "results")}
    assert result.keys() == media.keys()
    assert {item["error"] for item in result.values()} == {None}
    assert all(item["completion_tokens"] > 0 for item in result.values())
    [report] = (tmp_path / "results").glob("*/letter/report.html")
    assert report.read_text().count("data:image/") >= len(media)


# ---------------------------------------------------------------- what a person gets wrong


SERVERS = {"401": (401, 401), "404": (404, 404), "500": (200, 500), "page": (200, 200)}
"""Name → HTTP status for the list of models, and for chat completions."""


@dataclass(frozen=True)
class Mistake:
    """Options of a command with a mistake, and words that its only error message must contain."""

    options: list[str]
    words: list[str]


def mistakes(folder: Path, urls: dict[str, str]) -> dict[str, Mistake]:
    model, rows = ["--model", "good"], ["--data", "rows.jsonl"]

    def server(name: str, *options: str) -> list[str]:
        return [*rows, "--server", urls[name], "--set", "server.max_retries=0", *options]

    names = ["--set", "server.model=m"]
    return {
        "no such model": Mistake(["--model", "./nowhere", *rows], ["./nowhere: the folder does not exist"]),
        "no config.json": Mistake(["--model", "no_config", *rows], ["no_config: has no config.json"]),
        "config.json is no JSON": Mistake(["--model", "no_json", *rows], ["no_json: config.json cannot be read"]),
        "truncated weights": Mistake(
            ["--model", "truncated", *rows], ["truncated/model.safetensors is truncated or damaged"]
        ),
        "weights of another model": Mistake(
            ["--model", "other", *rows], ["other: the weights do not match config.json"]
        ),
        "a run without weights": Mistake(["--model", "run", *rows], ["run has neither export/final nor a complete"]),
        "unknown data set": Mistake(
            [*model, "--data", "data", "--dataset", "robts"],
            ["dataset robts", "did you mean robots? (available: robots)"],
        ),
        "a folder without benchmarks": Mistake([*model, "--data", "good"], ["good", "_benchmark_qa_pairs.json"]),
        "no rows": Mistake([*model, "--data", "empty.jsonl"], ["empty.jsonl", "the data set is empty"]),
        "no questions": Mistake(
            [*model, "--data", "nothing"], ["robots_benchmark_qa_pairs.json: contains no questions"]
        ),
        "a limit of 0": Mistake([*model, *rows, "--set", "evaluation.limit=0"], ["evaluation.limit", "0"]),
        "an answer outside of its options": Mistake(
            [*model, "--data", "outside.jsonl"],
            ["outside.jsonl, row 2: the answer must be one of the options A, B, or the text of an option; got 'C'"],
        ),
        "the results of somebody else": Mistake(
            [*model, *rows, "--results-dir", "others"], ["others/good/letter: contains results, but no run.json"]
        ),
        "no such scorer": Mistake([*model, *rows, "--set", "evaluation.scorer=judge.py"], ["judge.py"]),
        "a server that is down": Mistake(
            [*rows, "--server", urls["down"]], [f"server.url ({urls['down']}/v1): the server does not respond"]
        ),
        "a server that requires a key": Mistake(
            server("401"), ["requires a key, but", "OPENAI_API_KEY is not set", "401"]
        ),
        "a server that does not chat": Mistake(
            server("404", *names), ["no model 'm', or offers no chat completions at this URL (404"]
        ),
        "a server that fails": Mistake(server("500"), ["the server answered none of the first 2 questions", "500"]),
        "a server of web pages": Mistake(
            server("page", *names), ["none of the first 2 questions", "not a chat completion"]
        ),
    }


MISTAKES = list(mistakes(Path(), dict.fromkeys([*SERVERS, "down"], "")))


def write_mistakes(folder: Path, model: Path) -> None:
    rows = [
        {"id": id, "question": "Which?", "options": ["left", "right"], "answer": answer}
        for id, answer in (("a", "A"), ("b", "B"))
    ]
    for name, content in {"rows": rows, "empty": [], "outside": [rows[0], rows[1] | {"answer": "C"}]}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
    for place, items in {"data": [{"video": "clips/1.mp4", "qa_pairs": rows[0]}], "nothing": []}.items():
        (folder / place / "robots").mkdir(parents=True)
        (folder / place / "robots/robots_benchmark_qa_pairs.json").write_text(json.dumps(items))
    for name in ("good", "no_config", "no_json", "truncated", "other"):
        shutil.copytree(model, folder / name)
    (folder / "no_config/config.json").unlink()
    (folder / "no_json/config.json").write_text("{")
    weights = folder / "truncated/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    config = json.loads((model / "config.json").read_text())
    config["text_config"]["intermediate_size"] *= 2
    (folder / "other/config.json").write_text(json.dumps(config))
    (folder / "run/checkpoints").mkdir(parents=True)
    (folder / "run/config.json").write_text(json.dumps({"config": {"data": {}}, "deepspeed": {}}))
    (folder / "others/good/letter/robots").mkdir(parents=True)
    (folder / "others/good/letter/robots/1.json").write_text('[{"is_correct": true}]')


@pytest.fixture(scope="module")
def ends(tiny_qwen2_5_vl: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Mistake, tuple[int, str]]]:
    """Run the command with each mistake and return its exit code and output."""
    folder = tmp_path_factory.mktemp("mistakes")
    write_mistakes(folder, tiny_qwen2_5_vl)
    with ExitStack() as stack:
        urls = {"down": "http://127.0.0.1:9"}
        for name, (models, answers) in SERVERS.items():
            served = stack.enter_context(serving())
            served.models_status, served.models = models, served.models if name == "500" else "a page"
            served.respond = lambda path, body, status=answers: (status, "a page")
            urls[name] = served.url
        made = mistakes(folder, urls)
        ended = run(folder, *(mistake.options for mistake in made.values()))
    return {name: (made[name], end) for name, end in zip(made, ended, strict=True)}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_reported_once_before_model_loads(
    ends: dict[str, tuple[Mistake, tuple[int, str]]], name: str
) -> None:
    mistake, (code, text) = ends[name]
    assert code == 2, text
    assert "Traceback" not in text
    assert text.count("error: ") == 1
    assert [word for word in mistake.words if word not in text] == [], text


# ---------------------------------------------------------------- what the engine is given at a time


class Counting(TransformersEngine):
    """An engine that records the number of prompts in each call, and the number of rows in each batch that it samples."""

    def iter_completions(self, prompts: Sequence[EncodedPrompt], *args: Any, **kwargs: Any) -> Iterator[Any]:
        self.calls.append(len(prompts))
        return super().iter_completions(prompts, *args, **kwargs)

    def _complete_batch(self, rows: list[EncodedSample], *args: Any) -> list[Completion]:
        self.rows.append(len(rows))
        return super()._complete_batch(rows, *args)


@pytest.mark.parametrize(("memory_gib", "calls"), [(4.0, [20]), (1e-9, [16, 4])])
def test_engine_batches_fit_in_media_memory(
    tiny_qwen2_5_vl: Path, tmp_path: Path, memory_gib: float, calls: list[int]
) -> None:
    settings = {
        "sources": [{"adapter": "builtin"}],
        "model": {"path": str(tiny_qwen2_5_vl)},
        "results_dir": str(tmp_path),
    }
    config = EvalConfig.model_validate(
        settings | {"evaluation": {"limit": 20}, "generation": {"max_retries": 0, "max_tokens": 4}}
    )
    questions = load_questions(config)
    encoder = open_encoder(tiny_qwen2_5_vl, dtype=torch.float32, max_length=2048, max_length_key="model.max_length")
    engine = Counting(tiny_qwen2_5_vl, encoder.processor.tokenizer, dtype=torch.float32, device=torch.device("cpu"))
    engine.calls, engine.rows = [], []
    engine.load(VERSION)
    answerer = EngineAnswerer(engine, encoder, 2048, media_memory_gib=memory_gib, workers=0)
    with Grader(config.evaluation) as grader:
        answers = Evaluation(config, tmp_path, grader, Answering(answerer, None, {})).run(questions, set(), int)
        first = next(answers)
        assert [result.id for result in read_run(find_run(tmp_path))] == [first.id]
        assert engine.rows == [8]
        assert len([first, *answers]) == len(read_run(find_run(tmp_path))) == 20
    assert engine.calls == calls


# ---------------------------------------------------------------- ranks, engines, kills


@pytest.mark.parametrize("engine", [pytest.param("vllm", marks=pytest.mark.long), "transformers"])
def test_ranks_and_engines_give_equal_answers(
    undisturbed: list[dict[str, Any]], benchmark: Path, tiny_qwen2_5_vl: Path, engine: str
) -> None:
    """Compare greedy answers with a repetition penalty: one transformers process, two transformers ranks, and vLLM on two
    ranks."""
    options = ("--model", tiny_qwen2_5_vl, "--data", ".", "--set", "generation.repetition_penalty=1.3")
    options += SHORT
    if not (benchmark / "one").exists():
        [(code, text)] = run(benchmark, ["--results-dir", "one", *FP32, *options])
        assert code == 0, text
    parallel = ("--tensor-parallel-size", 2) if engine == "vllm" else ("--nproc", 2)
    evaluate(benchmark, engine, *options, *parallel, "--set", f'model.engine="{engine}"')
    expected, result = results(benchmark / "one"), results(benchmark / engine)
    assert result == expected
    assert [item["full_response"] for item in result] != [item["full_response"] for item in undisturbed]


def test_published_cosmos_yaml_runs_unchanged(benchmark: Path, tiny_qwen2_5_vl: Path) -> None:
    config = Path(__file__).parents[2] / "../shared/cosmos_configs/evaluate.yaml"
    if not config.exists():
        pytest.skip("../shared/cosmos_configs is not here")
    shutil.copytree(benchmark / "benchmark" / "robots", benchmark / "as_published" / "robovqa")
    folder = benchmark / "as_published" / "robovqa"
    (folder / "robots_benchmark_qa_pairs.json").rename(folder / "robovqa_benchmark_qa_pairs.json")
    shutil.copytree(folder, folder.parent / "av")
    (folder.parent / "av/robovqa_benchmark_qa_pairs.json").rename(folder.parent / "av/av_benchmark_qa_pairs.json")
    options = ["--config", config, "--model", tiny_qwen2_5_vl, "--data", "as_published", "--limit", 4]
    [(code, text)] = run(benchmark, [*options, "--results-dir", "yaml", *FP32, *SHORT])
    assert code == 0, text
    result = results(benchmark / "yaml")
    assert sorted({item["datasource"] for item in result}) == ["av", "robovqa"]
    assert len(result) == 4
    assert all("<think> your reasoning </think>" in item["prompt"][1] for item in result)


@pytest.mark.long
def test_randomly_killed_evaluation_gives_undisturbed_results(
    tiny_qwen2_5_vl: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    num_kills = 1 + request.config.getoption("--kills")
    num_questions = 40 * num_kills
    options: list[object] = ["--model", tiny_qwen2_5_vl, "--adapter", "builtin", "--limit", num_questions, *FP32]
    options += [
        "--set",
        "evaluation.batch_size=16",
        "--set",
        "generation.max_retries=0",
        "--set",
        "generation.max_tokens=8",
    ]
    [(code, text)] = run(tmp_path, ["--results-dir", "whole", *options])
    assert code == 0, text
    command = [*COMMAND, "eval", "--results-dir", "killed", *map(str, options)]
    moments = random.Random(0)
    steps = [0, *(moments.randrange(5, num_questions // num_kills) for _ in range(num_kills - 1))]

    def num_answered() -> int:
        return sum(item["error"] is None for item in results(tmp_path / "killed"))

    def is_open() -> bool:
        return any((tmp_path / "killed").glob("*/*/run.json"))

    for kill, step in enumerate(steps):
        process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        goal = num_answered() + step
        while process.poll() is None and not (is_open() and num_answered() >= goal):
            time.sleep(moments.random() * 0.05)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert goal <= num_answered() < num_questions, f"kill {kill} came too late to matter"
        if step == 0:  # the command was killed at the start, when it had only opened the folder
            assert num_answered() == 0
        else:  # a score computed now would cover all questions
            assert len(results(tmp_path / "killed")) == num_questions
    [(code, text)] = run(tmp_path, ["--results-dir", "killed", *options])
    assert code == 0, text
    assert results(tmp_path / "killed") == results(tmp_path / "whole")
    assert len(results(tmp_path / "whole")) == num_questions
