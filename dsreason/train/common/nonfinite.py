"""A check for NaN or infinite losses and gradients: it saves the batch and stops, or skips the step and counts it."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from dsreason.checkpoints.checkpoint_folder import TrainerState
from dsreason.config.schema import JobConfig
from dsreason.data.types import Batch
from dsreason.errors import DsReasonError, SaveError
from dsreason.files.atomic import open_draft, write_file
from dsreason.files.step_names import format_step
from dsreason.job.ranks import World, share_errors

log = logging.getLogger(__name__)

FIELDS = ("input_ids", "targets", "predictors", "position_ids", "mm_token_type_ids")
MAX_SKIPPED = 10
"""Number of consecutive steps with a NaN or infinite loss or gradient after which the run stops, because by then the
weights must be at fault."""


def build_finite_check(config: JobConfig, output_dir: Path, world: World, state: TrainerState) -> FiniteCheck:
    """Build the check for a run, starting from the counts saved in the run's state."""
    return FiniteCheck(
        config.train.on_nonfinite,
        output_dir / "nonfinite",
        world,
        skipped=state.extra.get("skipped_steps", 0),
        in_a_row=state.extra.get("nonfinite_in_a_row", 0),
    )


@dataclass
class FiniteCheck:
    """A check of each step's loss and gradient norm. Bad batches are saved in `folder`. A resumed run continues the counts."""

    rule: Literal["stop", "skip"]
    folder: Path
    world: World
    skipped: int = 0
    in_a_row: int = 0

    @property
    def counts(self) -> dict[str, int]:
        """Counts to save in a checkpoint."""
        return {"skipped_steps": self.skipped, "nonfinite_in_a_row": self.in_a_row}

    def metrics(
        self,
        metrics: dict[str, float],
        batches: Sequence[Batch | Mapping[str, Tensor]],
        step: int,
        names: Callable[[], list[list[Any]]] | None = None,
    ) -> dict[str, float]:
        """Return the metrics to log: all of `metrics`, or only the finite ones if the loss or the gradient norm is
        not finite. Collective.

        DeepSpeed does not apply gradients whose norm is not finite; `train/skipped_steps` counts these steps. An
        infinite loss may have a finite gradient, which is applied.

        Args:
            names: returns the sample names to save with each micro-batch; if None, the ids of each `Batch` are saved.

        Raises:
            DsReasonError: the loss or gradient norm is not finite, and either the rule is "stop" (the message then names the
                folder where every rank has saved its batch) or this is the last of `MAX_SKIPPED` such steps in a row.
        """
        loss, norm = metrics["train/loss"], metrics["train/grad_norm"]
        if math.isfinite(loss) and math.isfinite(norm):
            self.in_a_row = 0
            return metrics
        description = (
            f"step {step}: loss {loss}, gradient norm {norm} at learning rate {metrics['train/learning_rate']:g}"
        )
        if self.rule == "stop":
            saved = self.folder / format_step(step)
            sample_names = [list(b.ids) for b in batches if isinstance(b, Batch)] if names is None else names()
            with share_errors():
                self._save(batches, sample_names, saved, description)
            raise DsReasonError(
                f"{description}; every rank saved its samples in {saved}; lower optim.lr, inspect these samples, or set "
                'train.on_nonfinite = "skip"'
            )
        self.in_a_row += 1
        if self.in_a_row == MAX_SKIPPED:
            raise DsReasonError(f"{description}, as in the previous {MAX_SKIPPED - 1} steps; lower optim.lr")
        if math.isfinite(norm):
            log.warning("%s: the gradient is finite and was applied", description)
        else:
            self.skipped += 1
            log.warning("%s: the step was skipped and the weights are unchanged", description)
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        return finite | {"train/skipped_steps": float(self.skipped)}

    def _save(
        self, batches: Sequence[Batch | Mapping[str, Tensor]], names: list[list[Any]], folder: Path, description: str
    ) -> None:
        """Save this rank's micro-batches as `rank_R.safetensors`, and the names of their samples as `rank_R.json`."""
        tensors: dict[str, Tensor] = {}
        for i, batch in enumerate(batches):
            batch_tensors = get_tensors(batch) if isinstance(batch, Batch) else batch
            tensors |= {f"{i}.{name}": value.contiguous().clone() for name, value in batch_tensors.items()}
        file = folder / f"rank_{self.world.rank}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with open_draft(file.with_suffix(".safetensors")) as draft:
                save_file(tensors, draft)
            text = json.dumps(names, indent=1, ensure_ascii=False) + "\n"
            write_file(file.with_suffix(".json"), text)
        except (OSError, SafetensorError) as error:
            raise SaveError(
                f"{description}; rank {self.world.rank} cannot save its samples in {folder}: {error}"
            ) from error


def get_tensors(batch: Batch) -> dict[str, Tensor]:
    tensors = {name: vars(batch)[name] for name in FIELDS} | dict(batch.mm_kwargs)
    if batch.attention_mask is not None:
        tensors["attention_mask"] = batch.attention_mask
    if batch.segments:  # start, length, and the index of the parent or -1
        rows = [
            (segment.start, segment.length, -1 if segment.parent is None else segment.parent)
            for segment in batch.segments
        ]
        tensors["segments"] = torch.tensor(rows)
    # If the batch is a part, it holds the pixels of only this rank's frames, whose patch grids are saved as `part_grids`.
    if batch.part is not None:
        tensors["part"] = torch.tensor((batch.part.start, batch.part.end))
        if batch.part.media is not None:
            tensors["part_grids"] = batch.part.media.grids
    return tensors | {f"{kind}_numbers": torch.tensor(numbers) for kind, numbers in batch.media_numbers.items()}
