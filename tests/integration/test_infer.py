"""`dsreason infer` on tiny models: it streams the same answers as the engine, from every kind of model folder."""

from __future__ import annotations

import json
from pathlib import Path
from unittest import mock

import pytest
import torch
import typer

from dsreason.cli.infer import infer as command
from dsreason.evaluation.ask.engine import VERSION
from dsreason.evaluation.infer import InferSettings, build_prompt_encoder, build_sample, draw_batch, infer
from dsreason.models.processors.loading import load_processor
from dsreason.rollout.protocol import Sampling
from dsreason.rollout.transformers_engine import TransformersEngine, TransformersSettings
from tests.integration.command import dsreason
from tests.integration.rows import write_mixed_rows
from tests.integration.test_eval import run as evaluate

pytestmark = [pytest.mark.integration, pytest.mark.long]

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="the folder ../shared/data with real media is absent")
GREEDY = Sampling(temperature=0, max_completion_length=12)


@pytest.fixture(scope="module")
def media(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Write an image and a video."""
    folder = write_mixed_rows(tmp_path_factory.mktemp("media")).parent
    return str(folder / "1_0.png"), str(folder / "2.mp4")


def run(capsys: pytest.CaptureFixture[str], *options: object) -> tuple[str, str]:
    """Run `dsreason infer OPTIONS`, and return its stdout and stderr."""
    app = typer.Typer()
    app.command()(command)
    capsys.readouterr()
    app([str(option) for option in options], standalone_mode=False)
    return capsys.readouterr()


@pytest.mark.parametrize(
    "sampling",
    [GREEDY, Sampling(temperature=0.8, top_p=0.9, repetition_penalty=1.3, max_completion_length=12, seed=4)],
    ids=["greedy", "sampled with a penalty"],
)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_infer_matches_rollout_engine(tiny: Path, media: tuple[str, str], sampling: Sampling, dtype: str) -> None:
    settings = InferSettings(
        str(tiny), images=media[:1], videos=media[1:], vision={"fps": 4.0}, sampling=sampling, dtype=dtype
    )
    prompts = ["Which way does it move?", "What colour?"]
    torch_dtype = torch.float32 if dtype == "fp32" else torch.bfloat16
    engine = TransformersEngine(
        tiny,
        load_processor(tiny).tokenizer,
        TransformersSettings(batch_size=1),
        dtype=torch_dtype,
        device=torch.device("cpu"),
    )
    engine.load(VERSION)
    encoder, _ = build_prompt_encoder(settings, tiny, torch_dtype)
    encoded = [encoder.encode_prompt(build_sample(settings, i, prompt)) for i, prompt in enumerate(prompts)]
    expected = engine.generate(encoded, sampling, version=VERSION)
    with mock.patch.object(engine, "iter_completions", wraps=engine.iter_completions) as requested:
        together = [tuple(ids) for _, ids in draw_batch(engine, zip(encoded, [sampling] * 2, strict=True))]
    assert requested.call_count == 1
    assert together == [completion.ids for completion in expected]
    for answering, completion in zip(infer(settings, prompts, say=print), expected, strict=True):
        text = "".join(answering)
        assert tuple(answering.ids) == completion.ids
        assert text == completion.text == answering.result()["full_response"]
        assert answering.finish_reason == completion.finish_reason
        assert answering.result()["completion_tokens"] == len(completion.ids)


def test_json_option_prints_single_object(media: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--model=tiny:qwen2_5_vl", f"--image={media[0]}", f"--video={media[1]}", "--prompt=Where?", "--fps=2"]
    out, err = run(capsys, *options, "--json", "--max-tokens=5", "--timestamps")
    document = json.loads(out)
    assert list(document) == [
        "model",
        "vision",
        "media",
        "prompt",
        "prompt_tokens",
        "reasoning",
        "answer",
        "full_response",
        "finish_reason",
        "completion_tokens",
        "seconds",
    ]
    assert document["vision"] == {"fps": 2.0, "total_pixels": 6_422_528}
    assert "vision settings: fps = 2 (set by you); total_pixels = 6422528 (default; " in err
    assert [medium["path"] for medium in document["media"]] == list(media)
    assert [medium["kind"] for medium in document["media"]] == ["image", "video"]
    assert document["prompt"] == "Where?"
    assert 1 <= document["completion_tokens"] <= 5
    assert "loading the weights" in err


def test_each_answer_has_its_prompt_as_heading(
    media: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "Where?"}\n{"prompt": "When?"}\n')
    options = ["--model=tiny:qwen3_vl", f"--video={media[1]}", f"--prompt-file={tmp_path / 'p.jsonl'}"]
    options += ["--temperature=0", "--max-tokens=6"]
    out, err = run(capsys, *options)
    lines = [json.loads(line) for line in run(capsys, *options, "--json")[0].splitlines()]
    assert [line["prompt"] for line in lines] == ["Where?", "When?"]
    first, second = (line["full_response"] for line in lines)
    assert out == f"## Where?\n\n{first}\n\n## When?\n\n{second}\n\n"
    assert err.count("prompt tokens") == 2
    assert err.count("cut off") == sum(line["finish_reason"] == "length" for line in lines)


def test_same_seed_gives_same_answer(media: tuple[str, str]) -> None:
    def text(seed: int) -> str:
        sampling = Sampling(temperature=1.0, max_completion_length=10, seed=seed)
        settings = InferSettings("tiny:qwen2_5_vl", images=media[:1], sampling=sampling)
        (answering,) = [(list(answering), answering)[1] for answering in infer(settings, ["Where?"], say=print)]
        return answering.result()["full_response"]

    assert text(1) == text(1) != text(2)


def texts(file: str) -> dict[str, str]:
    """Return the response of each result in the file, by id."""
    return {item["id"]: item["full_response"] for item in json.loads(file)}


@pytest.mark.long
def test_run_checkpoint_and_export_give_equal_answers(
    media: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = [
        "data.limit=16",
        "train.max_steps=2",
        "train.global_batch_size=4",
        "train.precision=fp32",
        "data.validation=2",
    ]
    ended = dsreason("sft", "--output-dir=D", "--nproc=1", *(f"--set={c}" for c in changes), cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    answers = []
    folder = tmp_path / "D"
    for model in (folder, folder / "checkpoints" / "step_2", folder / "checkpoints", folder / "export" / "final"):
        options = [f"--model={model}", f"--video={media[1]}", "--prompt=Where?", "--temperature=0", "--max-tokens=8"]
        out, err = run(capsys, *options, "--json", "--dtype=fp32")
        answers.append(json.loads(out)["full_response"])
        assert ("exporting" in err) == ("checkpoints" in str(model))
    assert len(set(answers)) == 1
    requested = ["--adapter=builtin", "--limit=2", "--set=model.dtype=float32", "--set=generation.max_retries=0"]
    ended = evaluate(tmp_path, *([f"--model={model}", *requested] for model in (folder, folder / "checkpoints")))
    assert [code for code, _ in ended] == [0, 0], ended
    names = ("D-final", "D-step_2")
    # The temporary exports have been deleted.
    assert sorted(path.name for path in (tmp_path / "results").iterdir()) == list(names)
    by_run, by_checkpoint = (
        [f.read_text() for f in sorted((tmp_path / "results" / n).glob("*/builtin/*"))] for n in names
    )
    assert [texts(text) for text in by_run] == [texts(text) for text in by_checkpoint]


@needs_shared
@pytest.mark.parametrize("option", ["image=photo.jpg", "image=sample.png", "video=sample.mp4", "video=packer.mp4"])
def test_questions_about_real_media_get_answers(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    kind, name = option.split("=")
    options = ["--model=tiny:qwen2_5_vl", f"--{kind}={SHARED / name}", "--prompt=What?", "--max-tokens=4", "--json"]
    (medium,) = json.loads(run(capsys, *options)[0])["media"]
    seconds = {"sample.mp4": 2.5, "packer.mp4": 10.003}.get(name)
    assert medium["seconds"] == seconds
    assert medium["frames"] == {"sample.mp4": 10, "packer.mp4": 40}.get(name, 1)


def test_command_streams_to_stdout_and_rejects_mistakes(media: tuple[str, str], tmp_path: Path) -> None:
    options = ["infer", "--model=tiny:qwen2_5_vl", f"--image={media[0]}", "--prompt=What?", "--max-tokens=3"]
    ended = dsreason(*options, "--json", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["prompt"] == "What?"
    wrong = dsreason("infer", "--model=nowhere/at all", f"--image={media[0]}", "--prompt=What?", cwd=tmp_path)
    assert wrong.returncode == 2
    assert wrong.stdout == ""
    assert "error: --model nowhere/at all: the folder does not exist" in wrong.stderr
    assert "Traceback" not in wrong.stderr


@pytest.mark.long
def test_vllm_and_transformers_give_equal_answers(media: tuple[str, str], tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "What?"}\n{"prompt": "Where is it, and when?"}\n')
    options = ["infer", "--model=tiny:qwen3_vl", f"--image={media[0]}", "--prompt-file=p.jsonl", "--max-tokens=6"]
    options += ["--temperature=0", "--dtype=fp32", "--json"]
    ended = [dsreason(*options, f"--engine={engine}", cwd=tmp_path) for engine in ("vllm", "transformers")]
    assert [item.returncode for item in ended] == [0, 0], ended[0].stderr
    by_vllm, by_transformers = ([json.loads(line) for line in item.stdout.splitlines()] for item in ended)
    for name in ("prompt", "full_response", "completion_tokens"):
        assert [line[name] for line in by_vllm] == [line[name] for line in by_transformers]
