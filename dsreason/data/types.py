"""The types shared by all packages: a dataset row, the same row as tensors, and a padded batch of them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch

Message = dict[str, Any]
"""OpenAI-style: `{"role": "user", "content": str | [part, ...]}`."""
MediaKind = Literal["image", "video"]


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


@dataclass(frozen=True)
class EncodedSample:
    """A sample as the model reads it; `T` tokens.

    `loss_mask` is True on trained tokens (assistant text and its end-of-turn token). `mm_token_type_ids` is 0 for text,
    1 for image and 2 for video placeholders. `mm_kwargs` has the keys of the Hugging Face forward: `pixel_values`
    `[patches, dim]`, `image_grid_thw` `[images, 3]`, `pixel_values_videos`, `video_grid_thw`, and, for Qwen2.5-VL video,
    `second_per_grid_ts` `[videos]`.
    """

    id: str
    input_ids: torch.Tensor  # [T] int64
    loss_mask: torch.Tensor  # [T] bool
    position_ids: torch.Tensor  # [3, T] int64: temporal, height, width
    mm_token_type_ids: torch.Tensor  # [T] int64
    mm_kwargs: dict[str, torch.Tensor]

    def __len__(self) -> int:
        return int(self.input_ids.shape[0])


@dataclass(frozen=True)
class Batch:
    """Right-padded samples, one micro-batch: `B` rows of `T` tokens.

    `mm_kwargs` concatenates the rows' in order, but pixels that several rows share are there once. `media_numbers` has,
    by kind (`image`, `video`), the number of each shown medium among those whose pixels are there.

    Example: of three rows where the first and the last show one image, the second another:
    `media_numbers={"image": (0, 1, 0)}`, `image_grid_thw` `[3, 3]`, and `pixel_values` of two images.
    """

    ids: tuple[str, ...]
    input_ids: torch.Tensor  # [B, T] int64
    attention_mask: torch.Tensor  # [B, T] int64
    loss_mask: torch.Tensor  # [B, T] bool
    position_ids: torch.Tensor  # [3, B, T] int64
    mm_token_type_ids: torch.Tensor  # [B, T] int64
    mm_kwargs: dict[str, torch.Tensor]
    media_numbers: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def to(self, device: torch.device) -> Batch:
        """A copy on the device. What goes to a GPU is pinned first: the copy then does not wait for the GPU's work."""

        def move(tensor: torch.Tensor) -> torch.Tensor:
            pinned = device.type == "cuda" and tensor.device.type == "cpu"
            return (tensor.pin_memory() if pinned else tensor).to(device, non_blocking=True)

        return replace(
            self,
            input_ids=move(self.input_ids),
            attention_mask=move(self.attention_mask),
            loss_mask=move(self.loss_mask),
            position_ids=move(self.position_ids),
            mm_token_type_ids=move(self.mm_token_type_ids),
            mm_kwargs={key: move(value) for key, value in self.mm_kwargs.items()},
        )
