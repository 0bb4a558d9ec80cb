"""`dsreason infer`: questions about the same media, answered one after another as a stream of text."""

from __future__ import annotations

import importlib.util
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from PIL import Image
from transformers import PreTrainedTokenizerBase

from dsreason.answers.parsing import parse
from dsreason.checkpoints.export_digests import check_digests
from dsreason.checkpoints.shards import DTYPES
from dsreason.checkpoints.trained_template import read_template_arguments
from dsreason.checkpoints.trained_vision import read_trained_vision
from dsreason.config.schema import ModelConfig
from dsreason.config.schema_data import VisionConfig
from dsreason.config.schema_eval import DEFAULT_FPS
from dsreason.data.chat import EncodedPrompt
from dsreason.data.messages import list_media_paths
from dsreason.data.prompts import PromptEncoder
from dsreason.data.rows import JsonLinesRows
from dsreason.data.sources import select_vision_settings
from dsreason.data.types import Sample
from dsreason.errors import CheckpointError, ConfigError, DataError
from dsreason.evaluation.ask.engine import VERSION
from dsreason.evaluation.ask.models import export_temporarily, find_run_weights, is_checkpoint
from dsreason.evaluation.timestamps import TimestampEncoder, compute_frame_times
from dsreason.evaluation.vision import choose_vision
from dsreason.files.cache import get_cache_dir
from dsreason.files.lock import hold_folder
from dsreason.job.gpu import choose_device
from dsreason.job.ranks import init_world, shutdown
from dsreason.media.images import probe_image
from dsreason.media.videos import probe_video
from dsreason.models.load import build_checked_model, read_model_config, resolve_model
from dsreason.models.placement import load_where_it_fits
from dsreason.models.processors.loading import open_encoder
from dsreason.rewards.text import REQUEST
from dsreason.rollout.opening import open_rollout_engine
from dsreason.rollout.protocol import Completion, RolloutEngine, Sampling, find_media_token_ids
from dsreason.rollout.transformers_engine import draw_tokens, read_stop_token_ids
from dsreason.rollout.vllm_arguments import VLLMSettings

MANY_PROMPTS = 8
"""Number of prompts above which `auto` selects vLLM on a GPU, because vLLM then saves more time than its startup takes."""
MOST_PROMPT_BYTES = 16 * 1024**2
DEFAULTS = VisionConfig(fps=DEFAULT_FPS, total_pixels=6_422_528)
"""Vision settings for models whose training settings are unknown, as in cosmos-reason1."""

Asked = tuple[EncodedPrompt, Sampling]
Draw = Callable[[Iterator[Asked]], Iterator[tuple[EncodedPrompt, Iterator[int]]]]
"""Type of a function that samples answers: it maps prompts to (prompt, sampled token ids including the stop token). The n-th
prompt uses the n-th random stream."""


@dataclass(frozen=True)
class InferSettings:
    """The settings that all questions in a call share.

    Example: `InferSettings(model="tiny:qwen3_vl", videos=("a.mp4",), vision={"fps": 4.0})`.
    """

    model: str
    """Hugging Face folder, Hub name, `tiny:…`, dsreason run or dsreason checkpoint; see `models.find_run_weights`."""
    images: tuple[str, ...] = ()
    videos: tuple[str, ...] = ()
    vision: dict[str, float] = field(default_factory=dict)
    """Keys of `[data.vision]` for every media item; unset keys take the values of the model's training, or else of `DEFAULTS`."""
    template_arguments: dict[str, Any] = field(default_factory=dict)
    """Arguments of the chat template; unset ones take the values of the model's training, if its folder records them."""
    system: str = ""
    """System message; "" uses the chat template's default."""
    reasoning: bool = False
    """Whether the system message requests the format `<think>…</think> <answer>…</answer>`."""
    sampling: Sampling = Sampling()
    timestamps: bool = False
    """Whether to write the time on video frames."""
    save_frames: Path | None = None
    """Folder to which the images and frames that the model sees are written; None does not write them."""
    engine: Literal["auto", "transformers", "vllm"] = "auto"
    dtype: Literal["auto", "bf16", "fp32"] = "auto"
    """Data type of the weights; `auto` uses the type in config.json."""


@dataclass
class StreamedAnswer:
    """An answer that is being generated. Iterate over its text to the end, then call `result`."""

    model: str
    vision: dict[str, float]
    """Vision settings that were used."""
    prompt: EncodedPrompt
    drawn: Iterator[int]
    stop_ids: Sequence[int]
    tokenizer: PreTrainedTokenizerBase
    ids: list[int] = field(default_factory=list)
    seconds: float = 0.0

    def __iter__(self) -> Iterator[str]:
        started = time.perf_counter()
        yield from stream(self._record(), self.tokenizer)
        self.seconds = time.perf_counter() - started

    def _record(self) -> Iterator[int]:
        for token in self.drawn:
            self.ids.append(token)
            yield token

    @property
    def finish_reason(self) -> Literal["stop", "length"]:
        return "stop" if self.ids and self.ids[-1] in self.stop_ids else "length"

    def result(self) -> dict[str, Any]:
        """Return the answer as JSON values. `prompt` is the question's text; `size` is (width, height) as the model sees it."""
        text = self.tokenizer.decode(self.ids, skip_special_tokens=True)
        parsed = parse(text, "reasoning", kind="open")
        return {
            "model": self.model,
            "vision": self.vision,
            "media": describe_media(self.prompt),
            "prompt": self.prompt.sample.meta["prompt"],
            "prompt_tokens": len(self.prompt.encoded),
            "reasoning": parsed.reasoning,
            "answer": parsed.answer,
            "full_response": text,
            "finish_reason": self.finish_reason,
            "completion_tokens": len(self.ids),
            "seconds": round(self.seconds, 3),
        }


def infer(settings: InferSettings, prompts: Sequence[str], say: Callable[[str], None]) -> Iterator[StreamedAnswer]:
    """Yield a `StreamedAnswer` for each prompt. Each must be consumed completely before the next is requested.

    Args:
        say: called with a message before slow steps, and if a setting has to be changed.

    Raises:
        DsReasonError: media or model cannot be read, or a prompt is too long for the model. This is raised before any prompt is
            answered.
    """
    for path in settings.images:
        probe_image(path)
    for path in settings.videos:
        probe_video(path)
    with ExitStack() as stack:
        folder = find_model(settings, stack, say)
        user = VisionConfig.model_validate(settings.vision)
        trained_arguments = read_template_arguments(folder)
        vision = choose_vision(user, read_trained_vision(folder), settings.model, DEFAULTS, trained_arguments)
        say(vision.describe())
        settings = replace(
            settings,
            vision=vision.settings.model_dump(exclude_none=True),
            template_arguments=trained_arguments | settings.template_arguments,
        )
        dtype = DTYPES.get(settings.dtype) or read_model_config(folder).dtype or torch.float32
        encoder, longest = build_prompt_encoder(settings, folder, dtype)
        samples = [build_sample(settings, number, prompt) for number, prompt in enumerate(prompts)]
        lengths = [check_length(encoder, sample, longest) for sample in samples]
        needed = min(longest, max(lengths) + settings.sampling.max_completion_length)
        first = encoder.encode_prompt(samples[0])
        save_frames(first, settings.save_frames)
        say("loading the weights …")
        draw_ids = open_engine(settings, folder, dtype, encoder, needed, len(prompts), stack)
        tokenizer, stop_ids = encoder.processor.tokenizer, read_stop_token_ids(folder)
        rooms = [longest - length for length in lengths]
        wanted_engine = (
            (encoder.encode_prompt(sample) if number else first, limit_length(settings.sampling, room, say))
            for number, (sample, room) in enumerate(zip(samples, rooms, strict=True))
        )
        for encoded, ids in draw_ids(wanted_engine):
            yield StreamedAnswer(settings.model, settings.vision, encoded, ids, stop_ids, tokenizer)


# ---------------------------------------------------------------- model


def find_model(settings: InferSettings, stack: ExitStack, say: Callable[[str], None]) -> Path:
    """Return the model's Hugging Face folder (see `models.find_run_weights`); the export of a checkpoint exists until `stack`
    closes."""
    try:
        own_weights = find_run_weights(settings.model)
        if own_weights is not None and is_checkpoint(own_weights):
            say(f"exporting {own_weights} …")
            return stack.enter_context(export_temporarily(own_weights, Path(tempfile.gettempdir()), settings.dtype))
        folder = resolve_model(ModelConfig(path=str(own_weights or settings.model)), get_cache_dir() / "models")
        check_digests(folder)
        return folder
    except CheckpointError as error:
        raise CheckpointError(str(error).replace("model.path", "--model", 1)) from None


def build_prompt_encoder(settings: InferSettings, folder: Path, dtype: torch.dtype) -> tuple[PromptEncoder, int]:
    """Return the trainer's encoder, and the maximum number of tokens in prompt plus answer."""
    longest = int(read_model_config(folder).get_text_config().max_position_embeddings)
    encoder = open_encoder(
        folder,
        dtype=dtype,
        max_length=longest,
        max_length_key="max_position_embeddings",
        template_arguments=settings.template_arguments,
        template_key="--template-argument",
    )
    kind = TimestampEncoder if settings.timestamps else PromptEncoder
    return kind(**vars(encoder)), longest


def open_engine(
    settings: InferSettings,
    folder: Path,
    dtype: torch.dtype,
    encoder: PromptEncoder,
    max_length: int,
    num_prompts: int,
    stack: ExitStack,
) -> Draw:
    """Start an engine with the weights loaded; it runs until `stack` closes. `max_length` limits the sequence length for vLLM."""
    installed = importlib.util.find_spec("vllm") is not None
    if settings.engine == "vllm" and not installed:
        raise ConfigError("--engine vllm: vLLM is not installed; install it, or use --engine transformers")
    device = choose_device(0)
    on_gpu = device.type == "cuda"
    if settings.engine == "vllm" or (settings.engine == "auto" and installed and on_gpu and num_prompts > MANY_PROMPTS):
        return stack.enter_context(open_vllm_engine(folder, dtype, encoder, max_length))
    model = load_where_it_fits(folder, dtype=dtype, device=device)
    banned_ids = torch.tensor(
        find_media_token_ids(encoder.processor.tokenizer, encoder.family), dtype=torch.long, device=device
    )
    stop_ids = torch.tensor(read_stop_token_ids(folder), device=device)

    def draw_ids(requests: Iterator[Asked]) -> Iterator[tuple[EncodedPrompt, Iterator[int]]]:
        for number, (prompt, sampling) in enumerate(requests):
            tokens = draw_tokens(model, [prompt.encoded], [number], sampling, banned_ids=banned_ids, stop_ids=stop_ids)
            yield prompt, (int(token) for token, _ in tokens)

    return draw_ids


@contextmanager
def open_vllm_engine(folder: Path, dtype: torch.dtype, encoder: PromptEncoder, max_length: int) -> Iterator[Draw]:
    """Start a vLLM engine for the prompts. It gets all prompts at once and returns only complete answers, so nothing is
    streamed."""
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    build_checked_model(folder)
    settings = VLLMSettings(max_model_len=max_length, gpu_memory_utilization=0.9)  # nothing else uses the GPU
    with ExitStack() as stack:
        world = init_world()
        stack.callback(shutdown)
        tokenizer = encoder.processor.tokenizer
        engine = open_rollout_engine(folder, tokenizer, world, settings, dtype=dtype, loaded_version=VERSION)
        yield partial(draw_batch, stack.enter_context(engine))


def draw_batch(engine: RolloutEngine, requests: Iterator[Asked]) -> Iterator[tuple[EncodedPrompt, Iterator[int]]]:
    """Sample the answers to all prompts in a single call; the prompts share one copy of the media."""
    prompts: list[EncodedPrompt] = []
    samplings: list[Sampling] = []
    for prompt, sampling in requests:
        media = prompts[0].media if prompts else prompt.media
        prompts.append(replace(prompt if engine.reads_pixels else prompt.drop_pixels(), media=media))
        samplings.append(sampling)
    streams = range(len(prompts))
    completed = engine.iter_completions(prompts, samplings, version=VERSION, streams=streams)
    completions: dict[int, Completion] = {}

    def iter_ids(number: int) -> Iterator[int]:
        while number not in completions:
            completions.update([next(completed)])
        yield from completions[number].ids

    for number in streams:
        yield prompts[number], iter_ids(number)


def stream(ids: Iterable[int], tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    """Yield the text of the token ids piece by piece, each piece made of complete characters.

    Joined, the pieces equal the text of all ids decoded at once.
    """
    pending: list[int] = []
    for token in ids:
        pending.append(token)
        text = str(tokenizer.decode(pending, skip_special_tokens=True))
        if not text.endswith("\ufffd"):  # the text does not end with an incomplete character
            yield text
            pending = []
    if pending:  # the answer was cut off in the middle of a character
        yield str(tokenizer.decode(pending, skip_special_tokens=True))


# ---------------------------------------------------------------- prompt


def build_sample(settings: InferSettings, number: int, prompt: str) -> Sample:
    """Build the sample for a prompt: images, then videos, then the text."""
    media = [("image", path) for path in settings.images] + [("video", path) for path in settings.videos]
    vision = VisionConfig.model_validate(settings.vision)
    parts = [{"type": kind, kind: path, **select_vision_settings({}, vision, kind)} for kind, path in media]
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": prompt}]}]
    system = settings.system
    if settings.reasoning:
        system = f"{system or 'You are a helpful assistant.'} {REQUEST}"
    if system:
        messages.insert(0, {"role": "system", "content": system})
    return Sample(id=f"prompt {number + 1}", messages=messages, meta={"prompt": prompt})


def check_length(encoder: PromptEncoder, sample: Sample, longest: int) -> int:
    """Return the prompt's length in tokens, reading only media headers; raise DataError if it leaves no room for an answer."""
    length = encoder.measure(sample)
    if length >= longest:
        raise DataError(
            f"{sample.id} has {length} tokens, but the model supports at most {longest}, including the answer; use "
            "fewer frames (--fps, --nframes) or smaller ones (--max-pixels, --total-pixels)"
        )
    return length


def limit_length(sampling: Sampling, room: int, say: Callable[[str], None]) -> Sampling:
    if sampling.max_completion_length <= room:
        return sampling
    say(f"note: --max-tokens ({sampling.max_completion_length}) is reduced to {room}, the maximum after this prompt")
    return replace(sampling, max_completion_length=room)


def read_prompts(prompt: str | None, file: Path | None) -> list[str]:
    """Return `prompt`, the content of a text file, or the prompts from a .jsonl file with `{"prompt": …}` per line.

    Raises:
        ConfigError: both arguments or neither are set, the file cannot be read or is malformed, or a prompt is empty.
    """
    if (prompt is None) == (file is None):
        raise ConfigError(
            "--prompt and --prompt-file are both missing; pass one of them"
            if prompt is None
            else "--prompt and --prompt-file are mutually exclusive; remove one of them"
        )
    try:
        if file is None:
            prompts = [str(prompt)]
        elif file.suffix == ".jsonl":
            rows = JsonLinesRows(file)
            prompts = [_parse_prompt(rows[i], rows.describe_location(i)) for i in range(len(rows))]
        else:
            prompts = [read_prompt(file)]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompt-file {file}: cannot be read ({error})") from None
    if not prompts or not all(prompt_text.strip() for prompt_text in prompts):
        raise ConfigError(f"{'--prompt' if file is None else file}: the prompt is empty")
    return prompts


def read_prompt(file: Path) -> str:
    """Read text from a file, which may be a pipe such as `<(…)`."""
    with file.open("rb") as opened:
        content = opened.read(MOST_PROMPT_BYTES + 1)
    if len(content) > MOST_PROMPT_BYTES:
        raise ConfigError(
            f"--prompt-file {file}: is larger than the maximum of {MOST_PROMPT_BYTES} bytes; use a shorter prompt"
        )
    return content.decode("utf-8-sig").strip()


def _parse_prompt(row: Any, where: str) -> str:
    prompt = row.get("prompt") if isinstance(row, dict) else None
    if not isinstance(prompt, str):
        raise ConfigError(f'{where}: must be {{"prompt": "…"}}; got {row!r:.80}')
    return prompt


# ---------------------------------------------------------------- media, as the model sees them


def describe_media(prompt: EncodedPrompt) -> list[dict[str, Any]]:
    """Return `{path, kind, frames, seconds, fps, size}` for each media item; `fps` is the rate of the sampled frames."""
    prompts = []
    for path, medium in zip(list_media_paths(prompt.sample.messages), prompt.media, strict=True):
        if isinstance(medium, Image.Image):
            kind: dict[str, Any] = {"kind": "image", "frames": 1, "seconds": None, "fps": None, "size": medium.size}
        else:
            frames, metadata = medium
            kind = {
                "kind": "video",
                "frames": len(frames),
                "seconds": round(metadata["duration"], 3),
                "fps": round(len(frames) / metadata["total_num_frames"] * metadata["fps"], 3),
                "size": (frames.shape[2], frames.shape[1]),
            }
        prompts.append({"path": path, **kind})
    return prompts


def save_frames(prompt: EncodedPrompt, folder: Path | None) -> None:
    """Write the images and frames that the model sees: `1_photo.png`, `2_sample_000_0.00s.png`, …"""
    if folder is None:
        return
    media = zip(list_media_paths(prompt.sample.messages), prompt.media, strict=True)
    try:
        with hold_folder(folder):
            for number, (path, medium) in enumerate(media, start=1):
                name = f"{number}_{Path(path).stem}"
                if isinstance(medium, Image.Image):
                    medium.save(folder / f"{name}.png")
                    continue
                frames, metadata = medium
                for i, (frame, at) in enumerate(zip(frames, compute_frame_times(metadata), strict=True)):
                    Image.fromarray(frame).save(folder / f"{name}_{i:03d}_{at:.2f}s.png")
    except OSError as error:
        raise ConfigError(f"--save-frames {folder}: cannot be written ({error})") from None
