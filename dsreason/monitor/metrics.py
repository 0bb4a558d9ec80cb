"""Metrics of a run. Every sink receives all values, texts and images under the same names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsreason.config.schema import MonitorConfig
from dsreason.monitor.sinks.sink import Sink

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from PIL.Image import Image
    from torch import Tensor


@dataclass(frozen=True)
class Metrics(AbstractContextManager["Metrics"]):
    """Metrics writer for the training loop on every rank. On ranks above 0, it has no sinks and discards everything."""

    sinks: Sequence[Sink] = ()

    def log_scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Record `values` for `step`; several calls for the same step extend its entry. Steps must not decrease."""
        for sink in self.sinks:
            sink.log_scalars(step, values)

    def log_text(self, step: int, name: str, text: str) -> None:
        for sink in self.sinks:
            sink.log_text(step, name, text)

    def log_images(self, step: int, name: str, images: Sequence[Image]) -> None:
        for sink in self.sinks:
            sink.log_images(step, name, images)

    def log_video(self, step: int, name: str, gif: bytes) -> None:
        for sink in self.sinks:
            sink.log_video(step, name, gif)

    def log_histogram(self, step: int, name: str, values: Tensor | NDArray[Any]) -> None:
        for sink in self.sinks:
            sink.log_histogram(step, name, values)

    def close(self) -> None:
        for sink in self.sinks:
            sink.close()

    def __exit__(self, *exc: object) -> None:
        self.close()


def check_sinks(config: MonitorConfig) -> None:
    """Raise ConfigError if a configured sink cannot be used. Call this before any rank starts."""
    from dsreason.monitor.sinks.wandb import check_wandb

    check_wandb(config)


def open_metrics(
    output_dir: Path, *, rank: int, resume_step: int | None, config: MonitorConfig, run_config: dict[str, Any]
) -> Metrics:
    """Open a run's sinks on rank 0. Scalars are written to disk immediately.

    Args:
        output_dir: folder for `metrics.jsonl` and `tensorboard/`.
        resume_step: step of the loaded checkpoint; None for a new run. Metrics already logged for later steps are dropped.
        run_config: configuration to show in TensorBoard and W&B; it must not contain secrets.
    """
    if rank != 0:
        return Metrics()
    from dsreason.monitor.sinks.json_lines import JSONLines
    from dsreason.monitor.sinks.tensorboard import TensorBoard  # only rank 0 imports its writer
    from dsreason.monitor.sinks.wandb import WeightsAndBiases

    output_dir.mkdir(parents=True, exist_ok=True)
    trackers = [WeightsAndBiases(output_dir, config, run_config, resume_step)] if config.wandb else []
    local = [
        JSONLines(output_dir / "metrics.jsonl", resume_step),
        TensorBoard(output_dir / "tensorboard", run_config, resume_step),
    ]
    return Metrics([*local, *trackers])
