"""`dsreason infer` without a model: its options, its prompts and the streamed text."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

import pytest
import typer
from PIL import Image
from transformers import AutoTokenizer

from dsreason.cli import infer as cli
from dsreason.errors import CheckpointError, ConfigError, DataError
from dsreason.evaluation import infer as evaluation_infer
from dsreason.evaluation.infer import (
    InferSettings,
    build_prompt_encoder,
    build_sample,
    check_length,
    describe_media,
    find_model,
    limit_length,
    read_prompts,
    save_frames,
    stream,
)
from dsreason.files.lock import hold_folder
from dsreason.models.load import read_model_config
from dsreason.rewards.text import REQUEST
from dsreason.rollout.protocol import Sampling
from tests.unit.media.videos import write_video


def call(*arguments: str) -> None:
    app = typer.Typer()
    app.command()(cli.infer)
    app(list(arguments), standalone_mode=False)


@pytest.fixture(autouse=True)
def plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


# ---------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--prompt=?",), "no image or video is specified; use --image FILE or --video FILE"),
        (("--image=a.png", "--prompt=?", "--prompt-file=p.txt"), "--prompt and --prompt-file are mutually exclusive"),
        (("--image=a.png", "--prompt= "), "--prompt: the prompt is empty"),
        (("--image=a.png", "--prompt-file=no.txt"), r"--prompt-file no\.txt: cannot be read \(.*No such file"),
        (
            ("--video=a.mp4", "--prompt=?", "--fps=2", "--nframes=8"),
            r"--fps \(2\) and --nframes \(8\) are mutually exclusive",
        ),
        (
            ("--image=a.png", "--prompt=?", "--template-argument=thinking"),
            r"--template-argument thinking: must have the form NAME=VALUE",
        ),
        (
            ("--image=a.png", "--prompt=?", "--template-argument=tools=1"),
            r"--template-argument: .*tools is passed to the chat template by dsreason",
        ),
        (("--video=a.mp4", "--prompt=?", "--fps=0"), r"--fps \(0\) must be greater than 0"),
        (("--image=a.png", "--prompt=?", "--top-p=0"), r"--top-p \(0\) must be greater than 0 and at most 1"),
        (("--video=a.mp4", "--prompt=?", "--fps=nan"), r"--fps \(nan\) must be greater than 0 and at most 1000"),
        (("--video=a.mp4", "--prompt=?", "--fps=inf"), r"--fps \(inf\) must be greater than 0 and at most 1000"),
        (("--image=a.png", "--prompt=?", "--top-p=nan"), r"--top-p \(nan\) must be greater than 0 and at most 1"),
        *(
            (
                ("--image=a.png", "--prompt=?", f"--repetition-penalty={value}"),
                rf"--repetition-penalty \({value}\) must be",
            )
            for value in ("0", "nan", "inf", "1e-300")
        ),
        *(
            (
                ("--image=a.png", "--prompt=?", f"--temperature={value}"),
                rf"--temperature \({value}\) must be 0, or from",
            )
            for value in ("nan", "inf", "1e-300", "3")
        ),
    ],
)
def test_invalid_infer_options_are_rejected(options, text, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=text):
        call("--model=tiny:qwen2_5_vl", *options)


def test_missing_or_unreadable_media_are_reported(tmp_path) -> None:
    (tmp_path / "text.mp4").write_text("no video")
    for option, text in (("--image=no.png", "no.png: no such file"), (f"--video={tmp_path / 'text.mp4'}", "text.mp4")):
        with pytest.raises(DataError, match=text):
            call("--model=tiny:qwen2_5_vl", option, "--prompt=?")


def test_infer_is_rejected_under_a_launcher(monkeypatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "0")
    with pytest.raises(ConfigError, match="start it without torchrun"):
        call("--model=tiny:qwen2_5_vl", "--image=a.png", "--prompt=?")


def test_only_specified_options_become_frame_settings() -> None:
    assert cli.build_frame_settings(None, None, None, None) == {}
    assert cli.build_frame_settings(None, 8, 500, 900) == {"nframes": 8, "max_pixels": 500, "total_pixels": 900}
    assert cli.build_frame_settings(1.5, None, None, 900) == {"fps": 1.5, "total_pixels": 900}


@pytest.mark.parametrize(
    ("media", "prompt"),
    [
        (["--video=a.mp4"], "Describe what you see in this video."),
        (["--image=a.png"], "Describe what you see in this image."),
        (["--image=a.png", "--video=a.mp4"], "Describe what you see in this video."),
    ],
)
def test_missing_prompt_defaults_to_a_description(media, prompt, monkeypatch, capsys) -> None:
    requested: list[list[str]] = []
    monkeypatch.setattr(evaluation_infer, "infer", lambda settings, prompts, say: requested.append(prompts) or iter(()))
    call("--model=tiny:qwen2_5_vl", *media)
    assert requested == [[prompt]]
    assert f'no --prompt: using "{prompt}"' in capsys.readouterr().err


def test_prompts_are_read_from_file(tmp_path) -> None:
    (tmp_path / "one.txt").write_text("Where is\nthe ball?\n")
    (tmp_path / "two.jsonl").write_text('\ufeff{"prompt": "Where?"}\n\n{"prompt": "When\u2028?", "id": 3}\n', "utf-8")
    assert read_prompts(None, tmp_path / "one.txt") == ["Where is\nthe ball?"]
    assert read_prompts(None, tmp_path / "two.jsonl") == ["Where?", "When\u2028?"]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("", "the prompt is empty"),
        ('{"prompt": "a"}\n{"prompt": ""}', "the prompt is empty"),
        ('{"prompt": "a"}\n{prompt', r"p\.jsonl, line 2: the line is not valid JSON"),
        ('{"question": "a"}', r"p\.jsonl, row 1: must be {\"prompt\": \"…\"}; got {'question': 'a'}"),
        ("[1]", r"p\.jsonl, row 1: must be .*; got \[1\]"),
    ],
)
def test_unusable_prompt_file_is_rejected(content, text, tmp_path) -> None:
    (tmp_path / "p.jsonl").write_text(content)
    with pytest.raises((ConfigError, DataError), match=text):
        read_prompts(None, tmp_path / "p.jsonl")


def test_images_precede_videos_and_text() -> None:
    vision = {"fps": 4.0, "max_pixels": 900, "total_pixels": 5000}
    settings = InferSettings("m", images=("a.png", "b.png"), videos=("c.mp4",), vision=vision)
    sample = build_sample(settings, 0, "Which?")
    assert sample.messages == [
        {
            "role": "user",
            "content": [
                {"type": "image", "image": "a.png", "max_pixels": 900},
                {"type": "image", "image": "b.png", "max_pixels": 900},
                {"type": "video", "video": "c.mp4", **vision},
                {"type": "text", "text": "Which?"},
            ],
        }
    ]


@pytest.mark.parametrize(
    ("system", "reasoning", "expected"),
    [
        ("", False, None),
        ("Be brief.", False, "Be brief."),
        ("", True, f"You are a helpful assistant. {REQUEST}"),
        ("Be brief.", True, f"Be brief. {REQUEST}"),
    ],
)
def test_system_message_requests_answer_format(system, reasoning, expected) -> None:
    messages = build_sample(InferSettings("m", images=("a.png",), system=system, reasoning=reasoning), 0, "?").messages
    assert [m["content"] for m in messages if m["role"] == "system"] == ([expected] if expected else [])


@pytest.fixture
def media(tmp_path: Path) -> tuple[str, str]:
    Image.new("RGB", (140, 84), "red").save(tmp_path / "still.png")
    return str(tmp_path / "still.png"), str(write_video(tmp_path / "clip.mp4", 40))


def settings_for(media: tuple[str, str], tiny: Path, **changes) -> InferSettings:
    return InferSettings(str(tiny), images=media[:1], videos=media[1:], vision={"fps": 2.0}, **changes)


def test_too_long_prompt_reports_both_lengths(media, tiny) -> None:
    settings = settings_for(media, tiny)
    encoder, longest = build_prompt_encoder(settings, tiny, read_model_config(tiny).dtype)
    assert longest == 32768
    sample = build_sample(settings, 0, "Where?")
    length = check_length(encoder, sample, longest)
    assert length == len(encoder.encode_prompt(sample).encoded)
    with pytest.raises(
        DataError, match=rf"prompt 1 has {length} tokens, but the model supports at most {length}, including"
    ):
        check_length(encoder, sample, length)


def test_answer_length_is_limited_to_remaining_tokens() -> None:
    message: list[str] = []
    sampling = Sampling(temperature=0.5, max_completion_length=100, seed=3)
    assert limit_length(sampling, 100, message.append) == sampling
    assert message == []
    assert limit_length(sampling, 40, message.append) == Sampling(temperature=0.5, max_completion_length=40, seed=3)
    assert message == ["note: --max-tokens (100) is reduced to 40, the maximum after this prompt"]


def test_media_are_described_and_saved_as_processed(media, tiny, tmp_path) -> None:
    settings = settings_for(media, tiny, timestamps=True)
    encoder, _ = build_prompt_encoder(settings, tiny, read_model_config(tiny).dtype)
    prompt = encoder.encode_prompt(build_sample(settings, 0, "Where?"))
    still, clip = json.loads(json.dumps(describe_media(prompt)))
    assert still == {
        "path": media[0],
        "kind": "image",
        "frames": 1,
        "seconds": None,
        "fps": None,
        "size": list(prompt.media[0].size),
    }
    frames = prompt.media[1][0]
    assert clip == {
        "path": media[1],
        "kind": "video",
        "frames": 8,
        "seconds": 4.0,
        "fps": 2.0,
        "size": [frames.shape[2], frames.shape[1]],
    }
    save_frames(prompt, tmp_path / "new" / "folder")
    names = sorted(path.name for path in (tmp_path / "new" / "folder").iterdir())
    assert names[:3] == ["1_still.png", "2_clip_000_0.00s.png", "2_clip_001_0.60s.png"]
    assert len(names) == 9
    with Image.open(tmp_path / "new" / "folder" / names[1]) as saved:
        assert saved.tobytes() == frames[0].tobytes()
    with hold_folder(tmp_path / "new"), pytest.raises(ConfigError, match="new: is in use by process"):
        save_frames(prompt, tmp_path / "new")


def test_unwritable_frame_folder_is_reported(media, tiny, tmp_path) -> None:
    settings = settings_for(media, tiny)
    encoder, _ = build_prompt_encoder(settings, tiny, read_model_config(tiny).dtype)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--save-frames .*file: cannot be written"):
        save_frames(encoder.encode_prompt(build_sample(settings, 0, "?")), tmp_path / "file")


# ---------------------------------------------------------------- the model


def found(model: Path | str) -> Path:
    with ExitStack() as stack:
        return find_model(InferSettings(str(model)), stack, lambda text: None)


def test_run_folder_resolves_to_final_export(tmp_path) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "config.json").write_text('{"config": {}}')  # config.json of a run, not of a model
    final = tmp_path / "export" / "final"
    final.mkdir(parents=True)
    (final / "config.json").write_text("{}")
    assert found(tmp_path) == final


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("empty", r"^--model .*empty: has no config\.json"),
        ("tiny:gpt", "^--model tiny:gpt: the tiny model must be one of"),
        ("./no/such/folder", r"^--model \./no/such/folder: the folder does not exist"),
    ],
)
def test_error_quotes_unavailable_model_as_specified(name, text, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=text):
        found(name)


# ---------------------------------------------------------------- text


@pytest.mark.parametrize(
    "text", ["The ball moves left.", "naïve — 你好，世界 🙂👩‍👩‍👧 done", "\n\n<think>a</think> \t 1,234.5", "", "é"]
)
def test_streamed_text_matches_full_decoding(text, tiny) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    ids = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
    pieces = list(stream(ids, tokenizer))
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=True) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_pieces_are_streamed_once_characters_are_complete(tiny) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    drawn: list[int] = []

    def draw(ids):
        for token in ids:
            drawn.append(token)
            yield token

    ids = tokenizer("ab 你 c")["input_ids"]
    pieces = stream(draw(ids), tokenizer)
    first = next(pieces)
    assert "ab 你 c".startswith(first) and len(drawn) == 1
    assert first + "".join(pieces) == "ab 你 c"


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_truncated_character_is_streamed_as_decoded(cut, tiny) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    full = tokenizer("a🙂")["input_ids"]
    assert len(full) > 3  # the tiny vocabulary encodes it byte by byte
    ids = full[:-cut]
    assert "".join(stream(ids, tokenizer)) == tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("size", [1, 2, 3, 100])
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>It turns.</think> <answer>C</answer>", [("<think>It turns.</think>", True), (" <answer>C</answer>", False)]),
        ("a < b <think>c", [("a < b ", False), ("<think>c", True)]),
        ("no tags <thi", [("no tags <thi", False)]),
        ("<think>a</think><think>b</think>", [("<think>a</think><think>b</think>", True)]),
    ],
)  # fmt: skip
def test_thoughts_are_separated_despite_split_tags(text, expected, size) -> None:
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    joined: list[tuple[str, bool]] = []
    for piece, thought in cli.split_thoughts(pieces):
        if piece and joined and joined[-1][1] == thought:
            joined[-1] = (joined[-1][0] + piece, thought)
        elif piece:
            joined.append((piece, thought))
    assert joined == expected
