"""Types shared by all packages: a dataset row, the same row as tensors, and a packed or padded batch of rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    import torch

Message = dict[str, Any]
"""An OpenAI-style message: `{"role": "user", "content": str | [part, ...]}`."""
MediaKind = Literal["image", "video"]
TOKEN_TYPES: dict[MediaKind, int] = {"image": 1, "video": 2}
"""Media kind → its value in `mm_token_type_ids`; text is 0."""


@dataclass(frozen=True)
class Sample:
    """One dataset row, as an adapter returns it.

    Example: `Sample(id="7", messages=[{"role": "user", "content": [{"type": "video", "video": "/d/clips/7.mp4", "fps": 1},
    {"type": "text", "text": "Which way does it move?"}]}, {"role": "assistant", "content": "left"}], answer="left")`.

    A media part is `{"type": "image"|"video", "image"|"video": path}` with the optional keys `fps`, `nframes`,
    `min_frames`, `max_frames`, `min_pixels`, `max_pixels`, `total_pixels`, `video_start`, `video_end` (seconds).
    """

    id: str
    messages: list[Message]
    answer: str | None = None
    options: dict[str, str] | None = None
    meta: dict[str, Any] = field(default_factory=dict)
    rejected: list[Message] | None = None
    """The whole conversation with the rejected ending, in preference rows; `messages` has the preferred ending."""


@dataclass(frozen=True)
class EncodedSample:
    """A sample as tensors for the model, with `T` tokens.

    `loss_mask` is True on trained tokens (assistant text and its end-of-turn token). `mm_token_type_ids` is 0 for text,
    1 for image and 2 for video placeholders. `mm_kwargs` has the keys of the Hugging Face forward: `pixel_values`
    `[patches, dim]`, `image_grid_thw` `[images, 3]`, `pixel_values_videos`, `video_grid_thw`, and, for Qwen2.5-VL video,
    `second_per_grid_ts` `[videos]`.

    A sample may continue another one, its `parent`: it sees the parent's tokens and media besides its own. The completions
    of one prompt are such samples; the parent's last token predicts the first token of each.
    """

    id: str
    input_ids: torch.Tensor  # [T] int64
    loss_mask: torch.Tensor  # [T] bool
    position_ids: torch.Tensor  # [3, T] int64: temporal, height, width
    mm_token_type_ids: torch.Tensor  # [T] int64
    mm_kwargs: dict[str, torch.Tensor]
    parent: EncodedSample | None = field(default=None, kw_only=True)

    def __len__(self) -> int:
        """Count the sample's tokens without the parent's."""
        return int(self.input_ids.shape[0])


class Segment(NamedTuple):
    """A sample's position in a packed row. Its tokens see those of the segment `parent` and, causally, each other.

    Example: a prompt of 5 tokens with completions of 2 and 3:
    `(Segment(0, 5), Segment(5, 2, parent=0), Segment(7, 3, parent=0))`.
    """

    start: int
    length: int
    parent: int | None = None
    """Index of the segment that this one continues, which itself has no parent."""

    @property
    def end(self) -> int:
        return self.start + self.length


@dataclass(frozen=True)
class MediaPart:
    """One rank's share of encoding the media of a row that several ranks compute, and the exchange of their features.

    Media are cut between frames, which do not see each other in any vision tower. Features are counted in tokens.
    """

    grids: torch.Tensor  # [pieces, 3] int64, for the pixels on this rank; kept on the host
    sent: torch.Tensor  # [S] int64: indices of this rank's features to send, ordered by receiving rank
    sent_counts: tuple[int, ...]
    """Number of features sent to each rank."""
    received_counts: tuple[int, ...]
    """Number of features received from each rank."""
    order: torch.Tensor  # [R] int64: puts the received features in the order of `indices`
    indices: torch.Tensor  # [R] int64: placeholder tokens of this rank's part, counted from its start


@dataclass(frozen=True)
class RowPart:
    """One rank's part of a packed row that the ranks of its group share: the tokens from `start` to `end`."""

    start: int
    end: int
    targets: torch.Tensor  # [M] int64: those of the batch's N targets that this rank predicts
    predictors: torch.Tensor  # [M] int64: the tokens that predict them, counted from `start`
    media: MediaPart | None
    """Media of the part; None if the row shows no media."""


@dataclass(frozen=True)
class Batch:
    """One micro-batch: samples in one packed row (`B` = 1) or in `B` right-padded rows, of `T` tokens.

    A packed row has `segments` and no `attention_mask`: attention separates the samples by their segments. Padded rows have
    the mask and no segments.

    `targets` are the indices of the trained tokens in the flattened rows, and `predictors` the indices of the tokens whose
    hidden states predict them: the previous token, or the last token of the prompt for a completion's first one. The first
    token of a sample without a parent has no predictor and is not trained.

    `mm_kwargs` concatenates those of the rows in order, but holds pixels that several rows share only once. `media_numbers`
    maps each kind (`image`, `video`) to the index of every shown media item among the distinct ones.

    Example: in three rows the first and the last show one image, the second another:
    `media_numbers={"image": (0, 1, 0)}`, `image_grid_thw` `[3, 3]`, and `pixel_values` of two images.

    With a `part` the ranks of a group compute the row together: all hold the same batch, except that each rank holds only the
    pixels that it encodes.
    """

    ids: tuple[str, ...]
    input_ids: torch.Tensor  # [B, T] int64
    attention_mask: torch.Tensor | None  # [B, T] int64
    targets: torch.Tensor  # [N] int64
    predictors: torch.Tensor  # [N] int64
    position_ids: torch.Tensor  # [3, B, T] int64
    mm_token_type_ids: torch.Tensor  # [B, T] int64, on the host
    mm_kwargs: dict[str, torch.Tensor]  # the grids on the host
    media_numbers: dict[str, tuple[int, ...]] = field(default_factory=dict)
    segments: tuple[Segment, ...] = ()
    part: RowPart | None = None

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the samples and of the media that keep the ranks in step, without padding."""
        return self.input_ids.numel() if self.attention_mask is None else int(self.attention_mask.sum())

    def to(self, device: torch.device) -> Batch:
        """Copy to the device, except for the grids and token types, from which the host computes the media's layout."""
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
    """Copy a tensor to the device; pin it first if that is a GPU, so that the host does not wait for the GPU."""
    pinned = device.type == "cuda" and tensor.device.type == "cpu"
    return (tensor.pin_memory() if pinned else tensor).to(device, non_blocking=True)


def move_part(part: RowPart, move: Callable[[torch.Tensor], torch.Tensor]) -> RowPart:
    media = part.media
    if media is not None:
        media = replace(media, sent=move(media.sent), order=move(media.order), indices=move(media.indices))
    return replace(part, targets=move(part.targets), predictors=move(part.predictors), media=media)


@dataclass(frozen=True)
class MediaTokens:
    """Distinct media in the order in which the vision tower encodes them: all images, then all videos.

    Example: two images of 4 tokens, shown as first, second, first, then one video of 8 tokens:
    `grids` `[3, 3]`, `numbers=(0, 1, 0, 2)`, `indices` `[20]`, whose last 8 belong to the video.
    """

    grids: torch.Tensor  # [distinct media, 3] int64, in patches: frames, height, width
    numbers: tuple[int, ...]
    """Index of every shown media item among the distinct ones."""
    indices: torch.Tensor  # [tokens] int64: placeholders in the flattened rows, in the order of `numbers`

    @property
    def patches_per_token(self) -> int:
        num_patches = sum(self.grids[number].prod().item() for number in self.numbers)
        return int(num_patches) // len(self.indices)

    @property
    def lengths(self) -> list[int]:
        """Number of tokens of each distinct media item."""
        patches = self.patches_per_token
        return [size // patches for size in self.grids.prod(-1).tolist()]

    def repeat_features(self, features: torch.Tensor) -> torch.Tensor:
        """Repeat the features of media that the rows show more than once: `[distinct tokens, D]` → `[tokens, D]`."""
        if len(self.numbers) == len(self.grids):
            return features
        import torch

        parts = features.split(self.lengths)
        return torch.cat([parts[number] for number in self.numbers])
