"""The interface of metrics sinks. To add a sink, override the methods that it supports and open it in `open_metrics`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from PIL.Image import Image
    from torch import Tensor


class Sink:
    """A sink that ignores everything. Steps never decrease, and a method may be called several times for the same step."""

    def log_scalars(self, step: int, values: Mapping[str, float]) -> None: ...
    def log_text(self, step: int, name: str, text: str) -> None: ...
    def log_images(self, step: int, name: str, images: Sequence[Image]) -> None: ...
    def log_video(self, step: int, name: str, gif: bytes) -> None:
        """Log an animated GIF."""

    def log_histogram(self, step: int, name: str, values: Tensor | NDArray[Any]) -> None: ...
    def close(self) -> None: ...
