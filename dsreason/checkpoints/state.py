"""trainer_state.json: what a checkpoint says of its run. Nothing here needs torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, NonNegativeInt, TypeAdapter, ValidationError

from dsreason.errors import CheckpointError
from dsreason.problems import first_problem

STATE_FILE = "trainer_state.json"
MAX_RANKS = 100_000
"""No run has more; the files of every rank are looked for one by one."""


@dataclass
class TrainerState:
    """Where a run stands, beside weights, optimizer and random numbers."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    step: NonNegativeInt = 0
    """Finished optimizer steps."""
    epoch: float = 0.0
    consumed_samples: NonNegativeInt = 0
    best_metric: float | None = None
    best_name: str = ""
    """Which metric `best_metric` is a value of."""
    best_step: int | None = None
    model_path: str = ""
    """Folder the model was loaded from; export takes config, tokenizer and processor from it."""
    extra: dict[str, Any] = field(default_factory=dict)
    """What else the run wants back; JSON values only."""


@dataclass(frozen=True)
class Parameter:
    shape: list[NonNegativeInt]
    trained: bool


@dataclass(frozen=True)
class SavedRun:
    """Content of trainer_state.json."""

    state: TrainerState
    world_size: Annotated[int, Field(ge=1, le=MAX_RANKS)]
    zero_stage: Annotated[int, Field(ge=1, le=3)]
    precision: Literal["bf16", "fp32"]
    parameters: dict[str, Parameter]
    ranks: list[NonNegativeInt] = field(default_factory=list)
    """Those that wrote into this folder; older checkpoints do not say it, and are of all."""
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def ranks_here(self) -> Sequence[int]:
        return self.ranks or range(self.world_size)


SAVED_RUN = TypeAdapter(SavedRun)


def read_state(folder: Path) -> SavedRun:
    """trainer_state.json of a checkpoint. CheckpointError names what cannot be used in it."""
    file = folder / STATE_FILE
    try:
        saved = SAVED_RUN.validate_json(file.read_bytes(), strict=True)
        if max(saved.ranks_here) >= saved.world_size:
            raise ValueError(f"ranks is {saved.ranks}, and world_size {saved.world_size}")
    except (OSError, ValueError) as cause:
        problem = first_problem(cause) if isinstance(cause, ValidationError) else cause
        raise CheckpointError(f"{file}: is not the state of a checkpoint ({problem}); choose another one") from cause
    return saved
