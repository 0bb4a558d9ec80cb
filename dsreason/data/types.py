"""Types shared by all packages: a data set's row, the encoded row, and a packed or padded batch of encoded rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    import torch

Message = dict[str, Any]
"""A message in OpenAI's format: `{"role": "user", "content": str | [part, ...]}`."""
MediaKind = Literal["image", "video"]
TOKEN_TYPES: dict[MediaKind, int] = {"image": 1, "video": 2}
"""Media kind → value in `mm_token_type_ids`; text tokens have the value 0."""


@dataclass(frozen=True)
class Sample:
    """A data set's row, converted by an adapter.

    Example: `Sample(id="7", messages=[{"role": "user", "content": [{"type": "video", "video": "/d/clips/7.mp4", "fps": 1},
    {"type": "text", "text": "Which way does it move?"}]}, {"role": "assistant", "content": "left"}], answer="left")`.

    A media part is `{"type": "image"|"video", "image"|"video": path}` with the optional keys `fps`, `nframes`,
    `min_frames`, `max_frames`, `min_pixels`, `max_pixels`, `total_pixels`, `video_start`, `video_end` (seconds). A video may also
    be given as image files: a list, a folder or a pattern, with their frame rate `fps` or their `timestamps` (seconds).
    """

    id: str
    messages: list[Message]
    answer: str | None = None
    options: dict[str, str] | None = None
    meta: dict[str, Any] = field(default_factory=dict)
    rejected: list[Message] | None = None
    """For a preference row, the conversation with the rejected answer at its end (`messages` has the preferred one); None for
    other rows."""
    other_answers: tuple[str, ...] = ()
    """Additional answers that count as correct."""
    tools: list[dict[str, Any]] | None = None
    """Descriptions of the functions that the model may call, for the chat template; None if the row has no tools."""
    has_text_prompt: bool = False
    """Whether the row's prompt is plain text instead of messages; TRL reward functions then receive completions as strings."""


@dataclass(frozen=True)
class EncodedSample:
    """A sample of `T` tokens, encoded as tensors for the model.

    `loss_mask` is True for trained tokens (assistant text and its end-of-turn token). `mm_token_type_ids` is 0 for text, 1 for
    image placeholders and 2 for video placeholders. `mm_kwargs` contains keyword arguments for the Hugging Face model's forward:
    `pixel_values` `[patches, dim]`, `image_grid_thw` `[images, 3]`, `pixel_values_videos`, `video_grid_thw` and, for Qwen2.5-VL
    videos, `second_per_grid_ts` `[videos]`.

    A sample may continue another sample, its `parent`; it then also attends to the parent's tokens and media. For example, a
    prompt is the parent of all its completions, and its last token predicts the first token of each.
    """

    id: str
    input_ids: torch.Tensor  # [T] int64
    loss_mask: torch.Tensor  # [T] bool
    position_ids: torch.Tensor  # [3, T] int64: temporal, height, width
    mm_token_type_ids: torch.Tensor  # [T] int64
    mm_kwargs: dict[str, torch.Tensor]
    parent: EncodedSample | None = field(default=None, kw_only=True)

    def __len__(self) -> int:
        """Return the number of tokens, not counting the parent's."""
        return int(self.input_ids.shape[0])


class Segment(NamedTuple):
    """A sample's position in a packed row. The sample's tokens attend causally to each other, and to the segment `parent`.

    Example: a prompt of 5 tokens with completions of 2 and 3 tokens:
    `(Segment(0, 5), Segment(5, 2, parent=0), Segment(7, 3, parent=0))`.
    """

    start: int
    length: int
    parent: int | None = None
    """Index of the segment that this segment continues, or None. A parent never has a parent itself."""

    @property
    def end(self) -> int:
        return self.start + self.length


@dataclass(frozen=True)
class MediaPart:
    """One rank's share of the media in a row that several ranks compute together, and the plan for exchanging the features.

    Media are split at frame boundaries, which is possible because frames do not attend to each other in any supported vision
    tower. Features are counted in tokens.
    """

    grids: torch.Tensor  # [pieces, 3] int64, for the pixels on this rank; kept on the host
    sent: torch.Tensor  # [S] int64: indices of this rank's features to send, ordered by receiving rank
    sent_counts: tuple[int, ...]
    """Number of features sent to each rank."""
    received_counts: tuple[int, ...]
    """Number of features received from each rank."""
    order: torch.Tensor  # [R] int64: permutation of the received features into the order of `indices`
    indices: torch.Tensor  # [R] int64: placeholder tokens of this rank's part, counted from its start


@dataclass(frozen=True)
class RowPart:
    """One rank's part of a packed row that several ranks compute together: tokens `start` to `end` (exclusive)."""

    start: int
    end: int
    targets: torch.Tensor  # [M] int64: indices of the targets that this rank predicts, among the batch's N
    predictors: torch.Tensor  # [M] int64: tokens that predict these targets, counted from `start`
    media: MediaPart | None
    """Plan for encoding the media; None if the row contains no media."""


@dataclass(frozen=True)
class Batch:
    """One micro-batch of samples, in one packed row (`B` = 1) or in `B` right-padded rows, with `T` tokens per row.

    A packed row has `segments`, by which attention separates the samples, instead of an `attention_mask`. Padded rows have a mask
    and no segments.

    `targets` are the indices of the trained tokens in the flattened rows. `predictors` are the indices of the tokens whose
    hidden states predict them: the previous token or, for a completion's first token, the prompt's last token. The first token
    of a sample without a parent has no predictor and is not trained.

    `mm_kwargs` concatenates the rows' `mm_kwargs`, but contains pixels that several rows share only once. `media_numbers` maps
    each kind (`image`, `video`) to the media in row order; each number is an index into the distinct media items.

    Example: if the first and the last of three rows contain the same image and the second row contains a different one,
    `media_numbers={"image": (0, 1, 0)}`, `image_grid_thw` is `[3, 3]`, and `pixel_values` contains two images.

    If `part` is set, a group of ranks computes the row together. Their batches differ only in `part` and in the pixels, of which
    each rank has only those that it encodes.
    """

    ids: tuple[str, ...]
    input_ids: torch.Tensor  # [B, T] int64
    attention_mask: torch.Tensor | None  # [B, T] int64
    targets: torch.Tensor  # [N] int64
    predictors: torch.Tensor  # [N] int64
    position_ids: torch.Tensor  # [3, B, T] int64
    mm_token_type_ids: torch.Tensor  # [B, T] int64, on the host
    mm_kwargs: dict[str, torch.Tensor]  # the grids are on the host
    media_numbers: dict[str, tuple[int, ...]] = field(default_factory=dict)
    segments: tuple[Segment, ...] = ()
    part: RowPart | None = None
    num_fillers: int = 0
    """Number of tokens in dummy media and padding samples, which are at the end of the last row."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens, excluding padding but including dummy media, which only keep the ranks in step."""
        return self.input_ids.numel() if self.attention_mask is None else int(self.attention_mask.sum())

    def mask_samples(self) -> torch.Tensor:
        """Return a mask `[B, T]` that selects the tokens of samples, on the same device as the tokens."""
        import torch

        positions = torch.arange(self.input_ids.shape[1], device=self.input_ids.device)
        if self.attention_mask is None:
            return positions[None] < self.input_ids.shape[1] - self.num_fillers
        ends = self.attention_mask.sum(1, keepdim=True)
        ends[-1] -= self.num_fillers
        return positions[None] < ends

    def to(self, device: torch.device) -> Batch:
        """Copy the batch to the device, except for grids and token types, from which the host computes the media layout."""
        move = partial(copy_to_device, device=device)
        return replace(
            self,
            input_ids=move(self.input_ids),
            attention_mask=None if self.attention_mask is None else move(self.attention_mask),
            targets=move(self.targets),
            predictors=move(self.predictors),
            position_ids=move(self.position_ids),
            mm_kwargs={
                k: move(value) if k.startswith("pixel_values") else value for k, value in self.mm_kwargs.items()
            },
            part=None if self.part is None else move_part(self.part, move),
        )


def copy_to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor to the device. For a GPU, the tensor is pinned first, so that the host does not wait for the copy."""
    pinned = device.type == "cuda" and tensor.device.type == "cpu"
    return (tensor.pin_memory() if pinned else tensor).to(device, non_blocking=True)


def move_part(part: RowPart, move: Callable[[torch.Tensor], torch.Tensor]) -> RowPart:
    media = part.media
    if media is not None:
        media = replace(media, sent=move(media.sent), order=move(media.order), indices=move(media.indices))
    return replace(part, targets=move(part.targets), predictors=move(part.predictors), media=media)


@dataclass(frozen=True)
class MediaTokens:
    """A batch's distinct media in the order in which the vision tower encodes them: all images, then all videos.

    Example: two images with 4 tokens each, in the order first, second, first, followed by one video with 8 tokens:
    `grids` `[3, 3]`, `numbers=(0, 1, 0, 2)`, `indices` `[20]`, of which the last 8 belong to the video.
    """

    grids: torch.Tensor  # [distinct media, 3] int64, in patches: frames, height, width
    numbers: tuple[int, ...]
    """For each media item in row order, its index into the distinct media items."""
    indices: torch.Tensor  # [tokens] int64: placeholders in the flattened rows, in the order of `numbers`

    @property
    def patches_per_token(self) -> int:
        num_patches = sum(self.grids[number].prod().item() for number in self.numbers)
        return int(num_patches) // len(self.indices)

    @property
    def lengths(self) -> list[int]:
        """Number of tokens in each distinct media item."""
        patches = self.patches_per_token
        return [size // patches for size in self.grids.prod(-1).tolist()]

    def repeat_features(self, features: torch.Tensor) -> torch.Tensor:
        """Repeat the features of media that occur more than once in the rows: `[distinct tokens, D]` → `[tokens, D]`."""
        if len(self.numbers) == len(self.grids):
            return features
        import torch

        parts = features.split(self.lengths)
        return torch.cat([parts[number] for number in self.numbers])
