"""What crosses between the rooms: a dataset row, the same row as tensors, and a padded batch of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

Message = dict[str, Any]
"""OpenAI-style: `{"role": "user", "content": str | [part, ...]}`."""


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
    """Right-padded samples, one micro-batch: `B` rows of `T` tokens. `mm_kwargs` concatenates the rows' media in order."""

    ids: tuple[str, ...]
    input_ids: torch.Tensor  # [B, T] int64
    attention_mask: torch.Tensor  # [B, T] int64
    loss_mask: torch.Tensor  # [B, T] bool
    position_ids: torch.Tensor  # [3, B, T] int64
    mm_token_type_ids: torch.Tensor  # [B, T] int64
    mm_kwargs: dict[str, torch.Tensor]

    def to(self, device: torch.device) -> Batch:
        move = {k: v.to(device, non_blocking=True) for k, v in self.mm_kwargs.items()}
        names = ("input_ids", "attention_mask", "loss_mask", "position_ids", "mm_token_type_ids")
        return Batch(self.ids, *(getattr(self, n).to(device, non_blocking=True) for n in names), mm_kwargs=move)
