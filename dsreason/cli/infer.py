"""`dsreason infer`: ask a model about images and videos."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TextIO

import typer
from pydantic import TypeAdapter, ValidationError

from dsreason.config.load import parse_value
from dsreason.config.schema_data import SourceConfig, TemplateArguments
from dsreason.errors import ConfigError
from dsreason.imports import make_imports_fast
from dsreason.job import launch
from dsreason.job.gpu import check_gpus
from dsreason.problems import describe_first_problem
from dsreason.screen import print_message, write

if TYPE_CHECKING:
    from dsreason.evaluation.infer import StreamedAnswer

THINK, THOUGHT = "<think>", "</think>"


def infer(
    model: Annotated[
        str,
        typer.Option(
            help="Hugging Face folder, Hub name, tiny:qwen2_5_vl, dsreason run (its newest weights are used), or dsreason "
            "checkpoint."
        ),
    ],
    image: Annotated[list[str] | None, typer.Option(help="Image file; may be repeated. Images come first.")] = None,
    video: Annotated[
        list[str] | None,
        typer.Option(help="Video file; may be repeated. Videos come after images, and before the prompt."),
    ] = None,
    prompt: Annotated[
        str | None, typer.Option(help='What to ask; default: "Describe what you see in this video." (or image).')
    ] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(help='File with the prompt, or a .jsonl with one {"prompt": …} per line.')
    ] = None,
    system: Annotated[str, typer.Option(help="System message; default: the one in the model's chat template.")] = "",
    template_argument: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=VALUE: argument for the chat template, such as enable_thinking=false; may be repeated. Default: as in "
            "training.",
        ),
    ] = None,
    reasoning: Annotated[
        bool, typer.Option("--reasoning", help="Ask for <think>…</think> <answer>…</answer> in the system message.")
    ] = False,
    fps: Annotated[
        float | None, typer.Option(help="Frames per second to sample from a video; default: as in training, or else 4.")
    ] = None,
    nframes: Annotated[
        int | None, typer.Option(min=1, help="Number of frames to sample from a video, instead of --fps.")
    ] = None,
    max_pixels: Annotated[
        int | None, typer.Option(min=1, help="Maximum number of pixels per image or frame; default: as in training.")
    ] = None,
    total_pixels: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Maximum number of pixels per video; two frames count as one. A token covers 784 or 1024 pixels. Default: as "
            "in training, or else 6422528.",
        ),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option(min=1, help="Maximum length of an answer in tokens, including reasoning.")
    ] = 4096,
    temperature: Annotated[float, typer.Option(help="Sampling temperature; 0 takes the most probable token.")] = 0.6,
    top_p: Annotated[
        float, typer.Option(help="Sample only from the most probable tokens whose probabilities add up to this.")
    ] = 0.95,
    repetition_penalty: Annotated[
        float, typer.Option(help="Values above 1 make tokens that already occur less likely.")
    ] = 1.05,
    seed: Annotated[int, typer.Option(min=0, help="Random seed; the same seed gives the same answer.")] = 0,
    timestamps: Annotated[
        bool, typer.Option("--timestamps", help="Write the time on each frame, in a black border below it.")
    ] = False,
    save_frames: Annotated[
        Path | None, typer.Option(help="Folder to save the images and frames that the model sees.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per prompt, and nothing else.")
    ] = False,
    engine: Annotated[
        Literal["auto", "transformers", "vllm"],
        typer.Option(
            help="Inference engine; vllm does not stream. auto: vllm for many prompts on a GPU, otherwise transformers."
        ),
    ] = "auto",
    dtype: Annotated[
        Literal["auto", "bf16", "fp32"],
        typer.Option(help="Data type of the weights; auto uses the type in the model's config.json."),
    ] = "auto",
) -> None:
    """Ask a model about images and videos. The answer is streamed to stdout; other messages go to stderr."""
    if launch.is_rank():
        raise ConfigError("infer: runs as a single process; start it without torchrun, deepspeed or srun")
    vision = build_frame_settings(fps, nframes, max_pixels, total_pixels)
    if not 0 < top_p <= 1:
        raise ConfigError(f"--top-p ({top_p:g}) must be greater than 0 and at most 1")
    if temperature != 0 and not 0.01 <= temperature <= 2:
        raise ConfigError(f"--temperature ({temperature:g}) must be 0, or from 0.01 to 2")
    if not 0.01 <= repetition_penalty <= 2:
        raise ConfigError(f"--repetition-penalty ({repetition_penalty:g}) must be from 0.01 to 2; 1 disables it")
    if not (image or video):
        raise ConfigError("no image or video is specified; use --image FILE or --video FILE")
    launch.prepare_environment()
    check_gpus()
    stdout = sys.stdout
    with redirect_stdout(sys.stderr):  # some libraries log to stdout, even when they are imported
        with make_imports_fast():
            from dsreason.evaluation.infer import InferSettings, read_prompts
            from dsreason.evaluation.infer import infer as run
            from dsreason.rollout.protocol import Sampling

        if prompt is None and prompt_file is None:
            prompt = choose_prompt(bool(video))
            print_message(f'no --prompt: using "{prompt}"', err=True)
        prompts = read_prompts(prompt, prompt_file)
        settings = InferSettings(
            model=model,
            images=tuple(image or ()),
            videos=tuple(video or ()),
            vision=vision,
            template_arguments=parse_template_arguments(template_argument or []),
            system=system,
            reasoning=reasoning,
            sampling=Sampling(
                temperature=temperature,
                top_p=top_p,
                max_completion_length=max_tokens,
                repetition_penalty=repetition_penalty,
                seed=seed,
            ),
            timestamps=timestamps,
            save_frames=save_frames,
            engine=engine,
            dtype=dtype,
        )
        for answering in run(settings, prompts, print_message):
            if as_json:
                write_json(answering, stdout)
            else:
                write_text(answering, stdout, heading=len(prompts) > 1)


def parse_template_arguments(options: list[str]) -> dict[str, Any]:
    """Parse options such as `enable_thinking=false`; values are written as in TOML, and other texts need no quotes."""
    values = {}
    for option in options:
        name, equals, value = option.partition("=")
        if not (equals and name.strip()):
            raise ConfigError(
                f"--template-argument {option}: must have the form NAME=VALUE, such as enable_thinking=false"
            )
        values[name.strip()] = parse_value(value.strip())
    try:
        return TypeAdapter(TemplateArguments).validate_python(values)
    except ValidationError as error:
        raise ConfigError(
            f"--template-argument: {describe_first_problem(error).removeprefix('value error, ')}"
        ) from None


def choose_prompt(video: bool) -> str:
    """Return the default question that adapters ask about a video, or its equivalent for an image."""
    question = str(SourceConfig.model_fields["question"].default)
    return question if video else question.replace("video", "image")


def build_frame_settings(
    fps: float | None, nframes: int | None, max_pixels: int | None, total_pixels: int | None
) -> dict[str, float]:
    """Build the vision settings from the command-line options that were passed."""
    if fps is not None and nframes is not None:
        raise ConfigError(f"--fps ({fps:g}) and --nframes ({nframes}) are mutually exclusive; remove one")
    if fps is not None and not 0 < fps <= 1000:
        raise ConfigError(f"--fps ({fps:g}) must be greater than 0 and at most 1000")
    vision = {"fps": fps, "nframes": nframes, "max_pixels": max_pixels, "total_pixels": total_pixels}
    return {key: value for key, value in vision.items() if value is not None}


def write_json(answering: StreamedAnswer, stdout: TextIO) -> None:
    for _ in answering:
        pass
    write(json.dumps(answering.result(), ensure_ascii=False), file=stdout)


def write_text(answering: StreamedAnswer, stdout: TextIO, *, heading: bool) -> None:
    """Print the answer as it is generated; thoughts are dimmed on a terminal."""
    if heading:
        write(f"## {answering.prompt.sample.meta['prompt']}\n", file=stdout)
    for text, thought in split_thoughts(answering):
        write(text, file=stdout, end="", dim=thought and stdout.isatty())
        stdout.flush()
    write("\n" if heading else "", file=stdout)
    tokens, seconds = len(answering.ids), answering.seconds
    print_message(f"{len(answering.prompt.encoded)} prompt tokens, {tokens} generated in {seconds:.1f} s", err=True)
    if answering.finish_reason == "length":
        print_message("the answer is cut off: it reached --max-tokens or the model's context length", err=True)


def split_thoughts(pieces: Iterable[str]) -> Iterator[tuple[str, bool]]:
    """Yield pairs (text, whether it is part of the thoughts).

    Tags count as part of the thoughts, and may be split across pieces.
    """
    buffer, thinking = "", False
    for piece in pieces:
        buffer += piece
        while (at := buffer.find(THOUGHT if thinking else THINK)) >= 0:
            end = at + len(THOUGHT) * thinking
            yield buffer[:end], thinking
            buffer, thinking = buffer[end:], not thinking
        tag = THOUGHT if thinking else THINK
        begun = next(
            n for n in range(len(tag) - 1, -1, -1) if buffer.endswith(tag[:n])
        )  # length of a possibly incomplete tag
        yield buffer[: len(buffer) - begun], thinking
        buffer = buffer[len(buffer) - begun :]
    yield buffer, thinking
