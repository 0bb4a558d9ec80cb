"""Log-probabilities of the answers under the reference: measured once and kept in the run folder, or given with the rows."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from deepspeed import DeepSpeedEngine
from torch import Tensor

from dsreason.engine.reference import BaseReference
from dsreason.errors import ConfigError, DataError
from dsreason.files.atomic import write_file
from dsreason.files.disk import instead_of_file
from dsreason.job.ranks import World, gather_objects, on_rank_zero
from dsreason.losses.preference import Pairs, pairs_of
from dsreason.train.dpo.loader import MicroBatch, PairFacts, StepPairs

log = logging.getLogger(__name__)

FILE = "reference.jsonl"
"""In the run folder: first the model, then a line for each row."""


class Reference(Protocol):
    """What log-ratios are taken against."""

    def logprobs(self, engine: DeepSpeedEngine, one: MicroBatch, part: str) -> Tensor:
        """`[P, 2]` float64 on the engine's device: of the chosen and the rejected answers.

        Every rank calls it at the same place. `part` is "training" or "validation". Raises DataError for a pair of which
        nothing is known.
        """


class NoReference:
    """All log-probabilities are 0."""

    def logprobs(self, engine: DeepSpeedEngine, one: MicroBatch, part: str) -> Tensor:
        return torch.zeros(len(one.pairs), 2, dtype=torch.float64, device=engine.device)


class AdapterOff:
    """The model without its adapters, asked in every step."""

    def __init__(self, base: BaseReference) -> None:
        self.base = base

    def logprobs(self, engine: DeepSpeedEngine, one: MicroBatch, part: str) -> Tensor:
        with self.base.in_place():
            pairs = pairs_without_reference(engine, one)
        return torch.stack([pairs.chosen, pairs.rejected], dim=1)


class GivenReference:
    """What the rows say, or a file by their ids."""

    def __init__(self, by_id: Mapping[str, tuple[float, float]] | None, file: str | None) -> None:
        self.by_id, self.file = by_id, file

    def logprobs(self, engine: DeepSpeedEngine, one: MicroBatch, part: str) -> Tensor:
        return as_tensor([self.of(pair) for pair in one.pairs], engine)

    def of(self, pair: PairFacts) -> tuple[float, float]:
        found = pair.given if self.by_id is None else self.by_id.get(pair.id)
        if found is None:
            raise DataError(f"{pair.where} (sample {pair.id!r}): {nothing_given(self.file)}")
        return found


def nothing_given(file: str | None) -> str:
    """Why a row cannot be used with `dpo.reference = "precomputed"`."""
    if file is not None:
        return f"dpo.reference_file ({file}) has no line of this id; add it"
    return (
        'no fields ref_chosen_logprob and ref_rejected_logprob, which dpo.reference = "precomputed" needs; add them, give '
        'dpo.reference_file, or set dpo.reference = "model"'
    )


@dataclass(frozen=True)
class Measured:
    """A line of the file: `{"part": "training", "row": 3, "id": "7", "fingerprint": "…", "chosen": -10.5, "rejected": -9.8}`."""

    part: str
    row: int
    id: str
    fingerprint: str
    chosen: float
    rejected: float


@dataclass
class StoredReference:
    """What the model that training began with gave each row."""

    file: Path
    rows: dict[tuple[str, int], Measured] = field(default_factory=dict)
    """By part and row; equal on all ranks."""

    def logprobs(self, engine: DeepSpeedEngine, one: MicroBatch, part: str) -> Tensor:
        return as_tensor([self.of(pair, part) for pair in one.pairs], engine)

    def of(self, pair: PairFacts, part: str) -> tuple[float, float]:
        found = self.rows.get((part, pair.row))
        if found is None or found.fingerprint != pair.fingerprint:
            raise DataError(
                f"{pair.where} (sample {pair.id!r}): the row is not as it was when {self.file} was measured; put the data back, "
                "or start a new run in another --output-dir"
            )
        return found.chosen, found.rejected

    def missing(self, part: str, rows: Iterable[int]) -> list[int]:
        return sorted(row for row in set(rows) if (part, row) not in self.rows)

    def measure(self, engine: DeepSpeedEngine, part: str, batch: StepPairs, world: World) -> None:
        """Add what the engine's weights give these rows, to the file as well. Collective."""
        own = [one for micro_batch in batch.parts for one in measured(engine, micro_batch, part)]
        found = [one for rank in world.of_groups(gather_objects(own)) for one in rank]
        for one in found:
            if not math.isfinite(one.chosen + one.rejected):
                raise DataError(
                    f"{part} row {one.row + 1} (sample {one.id!r}): the reference gives its answers the log-probabilities "
                    f"{one.chosen} and {one.rejected}; look at the model and the row"
                )
            self.rows[part, one.row] = one
        on_rank_zero(partial(append, self.file, found))


def measured(engine: DeepSpeedEngine, one: MicroBatch, part: str) -> list[Measured]:
    pairs = pairs_without_reference(engine, one)
    sums = zip(one.pairs, pairs.chosen.tolist(), pairs.rejected.tolist(), strict=True)
    return [Measured(part, pair.row, pair.id, pair.fingerprint, *both) for pair, *both in sums]


@torch.no_grad()
def pairs_without_reference(engine: DeepSpeedEngine, one: MicroBatch) -> Pairs:
    """What the engine's forward gives them. Collective."""
    lengths = one.lengths.to(engine.device)
    zeros = torch.zeros(len(one.pairs), 2, dtype=torch.float64, device=engine.device)
    return pairs_of(engine(one.batch.to(engine.device)), lengths, zeros)


def as_tensor(values: list[tuple[float, float]], engine: DeepSpeedEngine) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device=engine.device).view(-1, 2)


# ---------------------------------------------------------------- files


def open_stored(output_dir: Path, checkpoint: Path | None, model: str) -> StoredReference:
    """What was measured before, of the run that is continued or of an earlier start of this one. For rank 0.

    Args:
        model: fingerprint of the model that training begins with.

    Raises:
        ConfigError: the run that is continued had another reference.
    """
    file = output_dir / FILE
    places = [file] if checkpoint is None else [file, checkpoint.parent.parent / FILE]
    found = next((place for place in places if place.is_file()), None)
    lines = [] if found is None else read_lines(found)
    then = lines[0].get("model") if lines else model
    if then != model and checkpoint is not None:
        raise ConfigError(
            f"model.path is another model than the reference of this run was measured with (fingerprint {model}, in {found} "
            f"{then}); put the model back, or start a new run in another --output-dir"
        )
    if then != model:
        log.warning("%s was measured with another model; it is made anew", found)
        lines = []
    rows = [as_measured(line, found) for line in lines[1:]]
    write_file(file, "".join(json.dumps(line) + "\n" for line in [{"model": model}, *map(asdict, rows)]))
    return StoredReference(file, {(one.part, one.row): one for one in rows})


def as_measured(line: dict[str, Any], file: Path | None) -> Measured:
    try:
        return Measured(**line)
    except TypeError as error:
        raise DataError(f"{file}: {line!r:.200} is no measured row; correct or delete the file") from error


def append(file: Path, rows: Iterable[Measured]) -> None:
    with file.open("a", encoding="utf-8") as lines:
        lines.writelines(json.dumps(asdict(one)) + "\n" for one in rows)


def read_lines(file: Path) -> list[dict[str, Any]]:
    """Without a last line that a killed process left unfinished. DataError for anything that is no object."""
    try:
        content = file.read_bytes()
    except OSError as error:
        raise DataError(f"{file}: cannot be read ({error.strerror}); correct or delete it") from error
    found = []
    for number, line in enumerate(content[: content.rfind(b"\n") + 1].splitlines(), start=1):
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{file}, line {number}: not JSON ({error}); correct or delete the file") from error
        if not isinstance(value, dict):
            raise DataError(f"{file}, line {number}: not an object; correct or delete the file")
        found.append(value)
    return found


def read_given(path: str) -> dict[str, tuple[float, float]]:
    """`dpo.reference_file`: by id the log-probabilities of the chosen and the rejected answer.

    Raises:
        ConfigError, DataError: no such file, or a line without them.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise ConfigError(f"dpo.reference_file {file.absolute()}: {instead_of_file(file)}")
    found: dict[str, tuple[float, float]] = {}
    for number, line in enumerate(read_lines(file), start=1):
        if line.keys() == {"model"}:
            continue
        values = line.get("chosen"), line.get("rejected")
        if "id" not in line or not all(isinstance(one, int | float) and math.isfinite(one) for one in values):
            raise DataError(
                f"{file}, line {number}: must have id, chosen and rejected, two log-probabilities; is {line!r:.200}"
            )
        key, both = str(line["id"]), (float(line["chosen"]), float(line["rejected"]))
        if found.setdefault(key, both) != both:
            raise DataError(
                f"{file}, line {number}: the id {key!r} is there twice with other values; give each row an id"
            )
    return found
