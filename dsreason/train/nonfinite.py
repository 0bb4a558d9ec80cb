"""What happens when a loss or gradient is no number: stop with the batch saved, or skip the step and count it."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from safetensors.torch import save_file

from dsreason.data.types import Batch
from dsreason.errors import DsReasonError
from dsreason.runtime.world import World, barrier

log = logging.getLogger(__name__)

FIELDS = ("input_ids", "attention_mask", "loss_mask", "position_ids", "mm_token_type_ids")
MAX_SKIPPED = 10
"""Steps in a row that may be skipped: after so many the weights, not the batches, are to blame."""


@dataclass
class FiniteCheck:
    """Looks at every step of a run. `folder` is where batches are saved."""

    rule: Literal["stop", "skip"]
    folder: Path
    world: World
    skipped: int = 0
    in_a_row: int = 0

    def metrics(self, metrics: dict[str, float], batches: Sequence[Batch], step: int) -> dict[str, float]:
        """The step's metrics where loss and gradient norm are finite, else those of them that are. Collective.

        DeepSpeed does not apply gradients whose norm is not finite; `train/skipped_steps` counts them. Raises
        DsReasonError with the rule "stop", naming where every rank has saved its batch, and with "skip" after
        `MAX_SKIPPED` in a row.
        """
        loss, norm = metrics["train/loss"], metrics["train/grad_norm"]
        if math.isfinite(loss) and math.isfinite(norm):
            self.in_a_row = 0
            return metrics
        what = f"step {step}: loss {loss}, gradient norm {norm} with learning rate {metrics['train/learning_rate']:g}"
        if self.rule == "stop":
            saved = self.folder / f"step_{step}"
            save_batches(batches, saved, self.world.rank)
            barrier()
            raise DsReasonError(
                f"{what}; every rank's samples are in {saved}. Lower optim.lr, look at these samples, or set "
                'train.on_nonfinite = "skip"'
            )
        self.skipped, self.in_a_row = self.skipped + 1, self.in_a_row + 1
        if self.in_a_row == MAX_SKIPPED:
            raise DsReasonError(f"{what}, as in the {MAX_SKIPPED - 1} steps before; lower optim.lr")
        log.warning("%s: skipped, the weights stay as they were", what)
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        return finite | {"train/skipped_steps": float(self.skipped)}


def save_batches(batches: Sequence[Batch], folder: Path, rank: int) -> None:
    """This rank's micro-batches as `rank_R.safetensors`, and the ids of their samples as `rank_R.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {f"{i}.{name}": vars(batch)[name] for i, batch in enumerate(batches) for name in FIELDS}
    tensors |= {f"{i}.{name}": value for i, batch in enumerate(batches) for name, value in batch.mm_kwargs.items()}
    save_file(
        {name: value.contiguous().clone() for name, value in tensors.items()}, folder / f"rank_{rank}.safetensors"
    )
    (folder / f"rank_{rank}.json").write_text(json.dumps([list(batch.ids) for batch in batches], indent=1) + "\n")
