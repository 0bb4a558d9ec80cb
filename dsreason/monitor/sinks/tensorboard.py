"""A sink that writes curves, texts, images and histograms to `tensorboard/`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.utils.tensorboard import SummaryWriter

from dsreason.errors import SaveError
from dsreason.monitor.sinks.sink import Sink

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from PIL.Image import Image
    from torch import Tensor


class TensorBoard(Sink):
    """A writer for a TensorBoard folder. Events that a stopped run has written for steps after `resume_step` are purged."""

    def __init__(self, folder: Path, run_config: dict[str, Any], resume_step: int | None) -> None:
        self.folder = folder
        first_step = 0 if resume_step is None else resume_step + 1
        with self._convert_folder_errors():
            self.writer = SummaryWriter(str(folder), purge_step=first_step if folder.exists() else None)
            self.writer.add_text("config", format_as_code(json.dumps(run_config, indent=2, default=str)), first_step)

    @contextmanager
    def _convert_folder_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:  # errors in the writer's thread are raised by any later call
            reason = error.strerror or str(error)
            raise SaveError(
                f"{self.folder}: the curves cannot be written ({reason}); the folder must exist and be writable during the "
                "entire run"
            ) from error

    def log_scalars(self, step: int, values: Mapping[str, float]) -> None:
        with self._convert_folder_errors():
            for name, value in values.items():
                self.writer.add_scalar(name, value, step)
            self.writer.flush()

    def log_text(self, step: int, name: str, text: str) -> None:
        with self._convert_folder_errors():
            self.writer.add_text(name, format_as_code(text), step)

    def log_images(self, step: int, name: str, images: Sequence[Image]) -> None:
        import numpy as np

        with self._convert_folder_errors():
            for i, image in enumerate(images):
                self.writer.add_image(f"{name}/{i}", np.asarray(image.convert("RGB")), step, dataformats="HWC")

    def log_video(self, step: int, name: str, gif: bytes) -> None:
        """Write the GIF as an image summary, as `add_video` does, but without the package that it needs to encode a GIF."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        width, height = (int.from_bytes(gif[at : at + 2], "little") for at in (6, 8))
        picture = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=gif)
        with self._convert_folder_errors():
            self.writer._get_file_writer().add_summary(Summary(value=[Summary.Value(tag=name, image=picture)]), step)
            self.writer.flush()

    def log_histogram(self, step: int, name: str, values: Tensor | NDArray[Any]) -> None:
        with self._convert_folder_errors():
            self.writer.add_histogram(name, values, step)

    def close(self) -> None:
        with self._convert_folder_errors():
            self.writer.close()


def format_as_code(text: str) -> str:
    """Format text as a Markdown code block, in which TensorBoard preserves line breaks and angle brackets."""
    return "".join(f"    {line}\n" for line in text.splitlines())
