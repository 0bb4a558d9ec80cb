"""What a run of every trainer has on one rank."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from dsreason.config.schema import RunConfig

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

    from dsreason.data.chat import Encoder
    from dsreason.data.sources import SampleDataset
    from dsreason.rewards.scoring import Scorer
    from dsreason.runtime.checkpoint import TrainerState
    from dsreason.runtime.checkpoint_writer import CheckpointWriter
    from dsreason.runtime.memory import MemoryLedger
    from dsreason.runtime.metrics import Metrics
    from dsreason.runtime.progress import Progress
    from dsreason.runtime.stop import StopRequest
    from dsreason.runtime.uploads import Uploader
    from dsreason.runtime.watchdog import Watchdog
    from dsreason.runtime.world import World
    from dsreason.train.common.nonfinite import FiniteCheck
    from dsreason.train.common.sampler import Sampler


@dataclass(kw_only=True)
class Run:
    """The parts of a run on one rank; `state` says how far it is."""

    config: RunConfig
    world: World
    output_dir: Path
    model_path: Path
    engine: DeepSpeedEngine
    encoder: Encoder
    validation_data: SampleDataset
    sampler: Sampler
    scorer: Scorer | None
    """Rewards of held-out answers; None where there are no rewards."""
    metrics: Metrics
    progress: Progress
    memory: MemoryLedger
    watchdog: Watchdog
    writer: CheckpointWriter
    uploads: Uploader
    stop: StopRequest
    finite: FiniteCheck
    total_steps: int
    state: TrainerState
    num_skipped: int = 0
    """Uses of rows that were left out since this process started."""
    named_skipped: set[str] = field(default_factory=set)

    @property
    def checkpoints(self) -> Path:
        return self.output_dir / "checkpoints"
