"""Encoder that converts messages and media files to token ids, a loss mask, positions and pixels.

A plan, made only from media headers and the chat template, determines the token count (`measure`) and the exact size of every
media item. `encode` then decodes each file once, resizes its image or frames once to the planned size, and calls the Hugging Face
processor with resizing and frame sampling disabled, so that a rollout engine can receive the same decoded media and the same ids.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import ProcessorMixin

from dsreason.data.collate import GRIDS
from dsreason.data.media_plan import Medium, PlannedMedium, convert_video_metadata, describe_video, load_medium
from dsreason.data.messages import join_text, list_media_parts, list_media_paths, prompt_messages
from dsreason.data.render import RenderedSegment, find_opening, render_prompt, render_training
from dsreason.data.types import TOKEN_TYPES, EncodedSample, MediaKind, Sample
from dsreason.errors import DataError
from dsreason.families import Family
from dsreason.families.family import Vision
from dsreason.media import images, videos, vision
from dsreason.media.frames import describe_video_path

MAX_MEDIA_TOKENS = 1_000_000
"""Maximum number of media tokens per sample, which exceeds every model's limit; longer samples are rejected before encoding."""


OPENING_TOKENS = 16
"""Number of tokens at the end of a prompt among which `<think>` is searched for; a vocabulary may need several tokens for it."""


class SampleTooLong(DataError):
    """Error for a sample with more than `max_length` tokens; samples are never truncated."""


@dataclass(frozen=True)
class EncodedPrompt:
    """Prompt for generation. `prompt_ids` has one placeholder per media item; `encoded.input_ids` has one per vision token."""

    sample: Sample
    encoded: EncodedSample
    prompt_ids: list[int]
    media: list[Medium]
    opening: str = ""
    """The tag with which the prompt already opens the reply's thoughts, such as `<think>\\n`; "" if it opens none."""

    @property
    def media_bytes(self) -> int:
        """Bytes of memory that the decoded media and their pixel values occupy."""
        decoded = [
            m.width * m.height * len(m.getbands()) if isinstance(m, Image.Image) else m[0].nbytes for m in self.media
        ]
        return sum(decoded) + sum(tensor.nbytes for tensor in self.encoded.mm_kwargs.values())

    def drop_pixels(self) -> EncodedPrompt:
        """Return the prompt without pixel values, for an engine that processes the media itself."""
        return replace(self, encoded=replace(self.encoded, mm_kwargs={}))


@dataclass(frozen=True)
class Encoder:
    """Picklable encoder that converts samples to tensors.

    `position_ids` is a function that maps (mm_token_type_ids [T], mm_kwargs) to positions [3, T].
    """

    processor: ProcessorMixin
    family: Family
    position_ids: Callable[[Tensor, dict[str, Tensor]], Tensor]
    max_length: int
    max_length_key: str = "model.max_length"
    """Name of the setting that determines `max_length`, for error messages."""
    needs_reply: bool = True
    """Whether to reject samples without an assistant turn; otherwise, such a sample is a prompt without trained tokens."""
    video_decoder: Literal["pyav", "torchcodec"] = "pyav"
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the chat template; see `data.template_arguments`."""

    @property
    def sees(self) -> bool:
        """Whether the model accepts images and videos."""
        return self.family.vision is not None

    @property
    def pad_id(self) -> int:
        return int(self.processor.tokenizer.pad_token_id)

    def encode(self, sample: Sample) -> EncodedSample:
        """Encode the conversation; the text and the end-of-turn token of every assistant turn are trained.

        Raises:
            DataError: the sample cannot be encoded; the message names the sample.
            SampleTooLong: the sample has more than `max_length` tokens.
        """
        encoded, _ = self._encode(sample, self._render(sample))
        return encoded

    def encode_prompt(self, sample: Sample) -> EncodedPrompt:
        """Encode the generation prompt, with all messages except a final assistant turn; ids from `encode` start with its ids."""
        prompt, segments = self._render_prompt(sample)
        encoded, loaded = self._encode(prompt, segments)
        ids = [token for segment in segments for token in segment.ids]
        opening = find_opening(self.processor.tokenizer.decode(ids[-OPENING_TOKENS:]))
        return EncodedPrompt(sample, encoded, ids, loaded, opening)

    def encode_answer(self, prompt: EncodedPrompt, conversation: Sample) -> EncodedSample:
        """Encode the part of a conversation that follows its prompt, as a sample whose parent is the prompt."""
        ids, mask = self._render_answer(prompt.prompt_ids, conversation)
        # Text positions continue after the prompt's largest position on any axis.
        positions = prompt.encoded.position_ids.max() + 1 + torch.arange(len(ids))
        return EncodedSample(
            id=conversation.id,
            input_ids=torch.tensor(ids, dtype=torch.int64),
            loss_mask=torch.tensor(mask, dtype=torch.bool),
            position_ids=positions.expand(3, -1),
            mm_token_type_ids=torch.zeros(len(ids), dtype=torch.int64),
            mm_kwargs={},
            parent=prompt.encoded,
        )

    def measure(self, sample: Sample) -> int:
        """Compute `len(encode(sample))` from media headers, without decoding; the result may exceed `max_length`."""
        return self._count(sample, self._render(sample))

    def _render_answer(self, prompt_ids: list[int], conversation: Sample) -> tuple[list[int], list[bool]]:
        """Return the ids and the loss mask after the prompt, up to and including the last trained token."""
        text = self._join_text_parts(conversation)
        segments = render_training(self.processor, self.family.tokens, text, self.template_arguments)
        ids = [token for segment in segments for token in segment.ids]
        mask = [trained for segment in segments for trained in segment.mask]
        start, end = len(prompt_ids), max(i for i, trained in enumerate(mask) if trained) + 1
        if ids[:start] != prompt_ids or end <= start:
            raise DataError(
                f"sample {conversation.id!r}: the chat template renders the conversation differently from its prompt, so that "
                "the conversation does not start with the prompt; change the template"
            )
        return ids[start:end], mask[start:end]

    def _render(self, sample: Sample) -> list[RenderedSegment]:
        has_reply = any(message["role"] == "assistant" for message in sample.messages)
        render = render_training if has_reply or self.needs_reply else render_prompt
        return render(self.processor, self.family.tokens, self._join_text_parts(sample), self.template_arguments)

    def _render_prompt(self, sample: Sample) -> tuple[Sample, list[RenderedSegment]]:
        prompt = replace(sample, messages=prompt_messages(sample))
        text = self._join_text_parts(prompt)
        return prompt, render_prompt(self.processor, self.family.tokens, text, self.template_arguments)

    def _join_text_parts(self, sample: Sample) -> Sample:
        """If the model is text-only, join the parts of each message into a string, which is what its chat template expects.

        Raises:
            DataError: the model is text-only and the sample has an image or a video.
        """
        if self.sees:
            return sample
        if media_files := list_media_paths(sample.messages):
            raise DataError(
                f"sample {sample.id!r} contains {describe_video_path(media_files[0])}, but {self.family.name} accepts only text; "
                "use a vision-language model, or rows without images and videos"
            )
        return replace(sample, messages=[{**message, "content": join_text(message)} for message in sample.messages])

    def _encode(self, sample: Sample, segments: list[RenderedSegment]) -> tuple[EncodedSample, list[Medium]]:
        planned = self.plan_media(sample)
        ids, mask = self._expand(sample, segments, planned)
        self.check_length(sample, len(ids))
        loaded = self._load(sample, planned)
        return self._finish(sample, ids, mask, planned, loaded), loaded

    def _count(self, sample: Sample, segments: list[RenderedSegment]) -> int:
        ids, _ = self._expand(sample, segments, self.plan_media(sample))
        return len(ids)

    def build_dummy(self, kind: MediaKind) -> EncodedSample:
        """Build an untrained sample: the smallest black media item that the model accepts, with its start and end tokens."""
        side, frames = self._get_pixel_limits(kind).factor, self._temporal_patch
        size, black = (side, side), np.zeros((frames, side, side, 3), np.uint8)
        info = vision.VideoInfo(frames, 1.0, side, side, float(frames))
        metadata = describe_video(info, vision.FrameChoice(tuple(range(frames)), frames))
        planned = PlannedMedium(kind, "", size, self._compute_grid(frames, size), metadata=metadata)
        loaded: Medium = Image.fromarray(black[0]) if kind == "image" else (black, metadata)
        sample = Sample(id=f"dummy {kind}", messages=[])
        tokens = self.family.tokens
        placeholder = tokens.image if kind == "image" else tokens.video
        text = tokens.media_start + placeholder + tokens.media_end
        segment = RenderedSegment(self.processor.tokenizer(text, add_special_tokens=False)["input_ids"])
        ids, mask = self._expand(sample, [segment], [planned])
        return self._finish(sample, ids, mask, [planned], [loaded])

    # ------------------------------------------------------------ planning

    def plan_media(self, sample: Sample) -> list[PlannedMedium]:
        """Plan the sample's images and videos, in order, from their headers. Raise DataError if a file cannot be used."""
        planned = []
        for number, message in enumerate(sample.messages):
            for part in list_media_parts([message]):
                try:
                    planned.append(self._plan_image(part) if part["type"] == "image" else self._plan_video(part))
                except DataError as error:
                    raise DataError(f"sample {sample.id!r}, message {number}: {error}") from error
        if (tokens := sum(medium.grid[0] * self._count_group_tokens(medium) for medium in planned)) > MAX_MEDIA_TOKENS:
            raise SampleTooLong(
                f"sample {sample.id!r} has {tokens} media tokens, but a sample may have only {MAX_MEDIA_TOKENS}; "
                "use fewer frames or pixels"
            )
        return planned

    def _count_group_tokens(self, medium: PlannedMedium) -> int:
        """Return the number of tokens of an image, or of one frame group of a video."""
        _, height, width = medium.grid
        merge: int = self.processor.image_processor.merge_size
        return height * width // merge**2

    def _plan_image(self, part: Mapping[str, Any]) -> PlannedMedium:
        path = str(part["image"])
        height, width = images.probe_image(path)
        try:
            limits = vision.choose_image_limits(self._get_pixel_limits("image"), self._vision)
            size = vision.compute_image_size(height, width, part, limits)
        except DataError as error:
            raise DataError(f"{path}: {error}") from error
        return PlannedMedium("image", path, size, self._compute_grid(1, size))

    def _plan_video(self, part: Mapping[str, Any]) -> PlannedMedium:
        path, patch = str(part["video"]), self._temporal_patch
        info = videos.probe_video(path)
        try:
            frame_choice = vision.sample_frames(info, part, self._vision, patch)
            count = len(frame_choice.indices)
            limits = self._get_pixel_limits("video")
            size = vision.compute_video_size(info.height, info.width, count, part, limits, self._vision, patch)
        except DataError as error:
            raise DataError(f"{describe_video_path(path)}: {error}") from error
        metadata = describe_video(info, frame_choice)
        return PlannedMedium("video", path, size, self._compute_grid(count, size), frame_choice.indices, metadata)

    @property
    def _vision(self) -> Vision:
        assert self.family.vision is not None  # text-only models have already rejected samples with media
        return self.family.vision

    def _get_pixel_limits(self, kind: MediaKind) -> vision.PixelLimits:
        processor = self.processor.image_processor if kind == "image" else self.processor.video_processor
        return vision.PixelLimits(
            factor=processor.patch_size * processor.merge_size,
            min_pixels=processor.size["shortest_edge"],
            max_pixels=processor.size["longest_edge"],
        )

    @property
    def _temporal_patch(self) -> int:
        return int(self.processor.video_processor.temporal_patch_size)

    def _compute_grid(self, num_frames: int, size: tuple[int, int]) -> tuple[int, int, int]:
        patch = self.processor.image_processor.patch_size
        return -(-num_frames // self._temporal_patch), size[0] // patch, size[1] // patch

    # ------------------------------------------------------------ tokens

    @property
    def _placeholders(self) -> dict[int, MediaKind]:
        if not self.sees:
            return {}
        return {self.processor.image_token_id: "image", self.processor.video_token_id: "video"}

    def _expand(
        self, sample: Sample, segments: list[RenderedSegment], planned: list[PlannedMedium]
    ) -> tuple[list[int], list[bool]]:
        """Return the token ids and the loss mask, with every placeholder replaced by the tokens of its media item."""
        kind_by_token = self._placeholders
        ids: list[int] = []
        mask: list[bool] = []
        remaining = iter(planned)
        for segment in segments:
            for token, trained in self._drop_video_marks(segment):
                if token in kind_by_token:
                    medium = next(remaining, None)
                    if medium is None or medium.kind != kind_by_token[token]:
                        raise DataError(
                            f"sample {sample.id!r}: the chat template does not render the media in the sample's order; "
                            "change the template"
                        )
                    expanded = self._expand_placeholder(medium)
                    ids += expanded
                    mask += [False] * len(expanded)
                else:
                    ids.append(token)
                    mask.append(trained)
        if next(remaining, None) is not None:
            raise DataError(
                f"sample {sample.id!r}: the chat template omits some of the {len(planned)} media items; change the "
                "template"
            )
        return ids, mask

    def _drop_video_marks(self, segment: RenderedSegment) -> list[tuple[int, bool]]:
        """Return a segment's tokens and mask, without the marks around videos if the processor adds marks to each frame."""
        tokens = list(zip(segment.ids, segment.mask, strict=True))
        if self.family.vision is None or not self.family.vision.frames_have_marks:
            return tokens
        video = [
            self.processor.vision_start_token_id,
            self.processor.video_token_id,
            self.processor.vision_end_token_id,
        ]
        for start in reversed(range(len(tokens) - 2)):
            if segment.ids[start : start + 3] == video:
                tokens[start : start + 3] = [tokens[start + 1]]
        return tokens

    def _expand_placeholder(self, medium: PlannedMedium) -> list[int]:
        """Return the ids that replace a placeholder; the text of a video may include timestamps, as for Qwen3-VL."""
        per_group = self._count_group_tokens(medium)
        if medium.kind == "image":
            return [self.processor.image_token_id] * per_group
        # The processor writes one token per group, whose id is repeated below: this is cheaper than tokenizing repeated text.
        merge = self.processor.image_processor.merge_size
        inputs = {
            "video_grid_thw": torch.tensor([[medium.grid[0], merge, merge]]),
            "video_metadata": [convert_video_metadata(medium.metadata)],
        }
        text = self.processor.replace_video_token(inputs, video_idx=0)
        ids = self.processor.tokenizer(text, add_special_tokens=False)["input_ids"]
        video_id = self.processor.video_token_id
        return [token for short in ids for token in ([short] * (per_group if short == video_id else 1))]

    def check_length(self, sample: Sample, length: int) -> None:
        """Raise SampleTooLong if `length` exceeds `max_length`."""
        if length > self.max_length:
            raise SampleTooLong(
                f"sample {sample.id!r} has {length} tokens, but the maximum is {self.max_length} "
                f"({self.max_length_key}); "
                'raise it, use fewer frames or pixels, or skip such samples with model.on_too_long = "skip"'
            )

    # ------------------------------------------------------------ tensors

    def _load(self, sample: Sample, planned: list[PlannedMedium]) -> list[Medium]:
        """Decode each file once and resize its image or frames once."""
        try:
            return [load_medium(medium, self.video_decoder) for medium in planned]
        except DataError as error:
            raise DataError(f"sample {sample.id!r}: {error}") from error

    def _finish(
        self, sample: Sample, ids: list[int], mask: list[bool], planned: list[PlannedMedium], loaded: list[Medium]
    ) -> EncodedSample:
        mm_kwargs = self._build_mm_kwargs(loaded)
        for kind, key in GRIDS.items():
            grids = [list(medium.grid) for medium in planned if medium.kind == kind]
            if grids and mm_kwargs[key].tolist() != grids:
                raise DataError(
                    f"sample {sample.id!r}: the processor returned {key} {mm_kwargs[key].tolist()}, but {grids} was "
                    "expected"
                )
        input_ids = torch.tensor(ids, dtype=torch.int64)
        types = torch.zeros_like(input_ids)
        for token, kind in self._placeholders.items():
            types[input_ids == token] = TOKEN_TYPES[kind]
        return EncodedSample(
            id=sample.id,
            input_ids=input_ids,
            loss_mask=torch.tensor(mask, dtype=torch.bool),
            position_ids=self.position_ids(types, mm_kwargs),
            mm_token_type_ids=types,
            mm_kwargs=mm_kwargs,
        )

    def _build_mm_kwargs(self, loaded: list[Medium]) -> dict[str, Tensor]:
        """Run the processor on media that already have their final size; return keyword arguments for the model's forward."""
        pictures = [medium for medium in loaded if isinstance(medium, Image.Image)]
        clips = [medium for medium in loaded if not isinstance(medium, Image.Image)]
        inputs: dict[str, Any] = {}
        if (
            pictures
        ):  # the image processor is called directly: the full processor would merge all settings for every row
            inputs |= self.processor.image_processor(pictures, do_resize=False, return_tensors="pt")
        if clips:
            # Without resizing, the limit of a frame has no effect, but Qwen's processors warn if it is unset.
            caps = {"cap_pixels_per_frame": False} if self._vision.caps_frames else {}
            inputs |= self.processor(
                videos=[frames for frames, _ in clips],
                video_metadata=[convert_video_metadata(metadata) for _, metadata in clips],
                do_sample_frames=False,
                do_resize=False,
                do_rescale=False,
                do_normalize=False,
                **caps,
                return_metadata=True,  # which Cosmos3-Edge's processor needs to write the timestamps
                return_tensors="pt",
            )
            inputs.pop("video_metadata")
            inputs["pixel_values_videos"] = self._normalise_patches(inputs["pixel_values_videos"])
        return {key: _cast_to_forward_dtype(value) for key, value in inputs.items()}

    def _normalise_patches(self, patches: Tensor) -> Tensor:
        """Rescale and normalise uint8 patches [N, values per patch] in the same way as the processor.

        Frames are cut into patches before they are normalised, because cutting uint8 is four times as fast as cutting float32.
        """
        video = self.processor.video_processor
        if self._vision.channels_last:
            channel_patches = patches.view(len(patches), video.patch_size, -1, 3).permute(0, 3, 1, 2)
        else:
            channel_patches = patches.view(len(patches), 3, -1, video.patch_size)
        normalised: Tensor = video.rescale_and_normalize(
            channel_patches,
            video.do_rescale,
            video.rescale_factor,
            video.do_normalize,
            video.image_mean,
            video.image_std,
        )
        return (normalised.permute(0, 2, 3, 1) if self._vision.channels_last else normalised).flatten(1)


def _cast_to_forward_dtype(value: Tensor | list[float]) -> Tensor:
    tensor = torch.as_tensor(value)
    return tensor.to(torch.float32 if tensor.is_floating_point() else torch.int64)
