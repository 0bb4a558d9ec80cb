"""Log-probabilities of the answers under the reference: measured once and kept in the run folder, or given with the rows."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable
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
from dsreason.job.ranks import World, gather_objects, on_rank_zero
from dsreason.losses.preference import Pairs, pairs_of
from dsreason.problems import instead_of_file, parse_error
from dsreason.train.dpo.loader import MicroBatch, PairFacts, StepPairs
from dsreason.train.dpo.pairs import LOGPROB, is_logprob

log = logging.getLogger(__name__)

FILE = "reference.jsonl"
"""In the run folder: first the model, then a line for each row."""
START = b'{"model"'
VALUES = ("chosen", "rejected")
REMOVE = "remove the file: what it says is then measured anew"


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


NOTHING_GIVEN = (
    'no fields ref_chosen_logprob and ref_rejected_logprob, which dpo.reference = "precomputed" needs; add them, give '
    'dpo.reference_file, or set dpo.reference = "model"'
)


class RowReference:
    """What the rows say."""

    def logprobs(self, engine: DeepSpeedEngine, one: MicroBatch, part: str) -> Tensor:
        return as_tensor([self.of(pair) for pair in one.pairs], engine)

    def of(self, pair: PairFacts) -> tuple[float, float]:
        if pair.given is None:
            raise DataError(f"{pair.where} (sample {pair.id!r}): {NOTHING_GIVEN}")
        return pair.given


@dataclass(frozen=True)
class GivenLine:
    """A line of `dpo.reference_file`: of one that a run measured it has the row's fingerprint."""

    chosen: float
    rejected: float
    fingerprint: str | None = None


@dataclass
class GivenReference:
    """What `dpo.reference_file` says."""

    file: str
    by_id: dict[str, GivenLine] = field(default_factory=dict)
    models: set[str] = field(default_factory=set)
    """Fingerprints of those that it was measured with, where it says so."""

    def logprobs(self, engine: DeepSpeedEngine, one: MicroBatch, part: str) -> Tensor:
        return as_tensor([self.of(pair) for pair in one.pairs], engine)

    def of(self, pair: PairFacts) -> tuple[float, float]:
        if problem := self.problem(pair.id, pair.fingerprint):
            raise DataError(f"{pair.where} (sample {pair.id!r}): {problem}")
        line = self.by_id[pair.id]
        return line.chosen, line.rejected

    def problem(self, row_id: str, fingerprint: str | None = None) -> str | None:
        """Return why the row cannot be used, as far as is known without its fingerprint."""
        line = self.by_id.get(row_id)
        if line is None:
            return f"dpo.reference_file ({self.file}) has no line of this id; add it"
        if None not in (fingerprint, line.fingerprint) and fingerprint != line.fingerprint:
            return (
                f"the row is not as it was when dpo.reference_file ({self.file}) was measured (fingerprint {fingerprint}, there "
                f"{line.fingerprint}); put data, processor and data.vision back, give the file of these rows, or set "
                'dpo.reference = "model"'
            )
        return None

    def tell_other_model(self, model: str) -> None:
        """Where it was measured with another model than the one of this fingerprint, which training begins with."""
        if other_models := sorted(self.models - {model}):
            log.warning(
                "dpo.reference_file (%s) was measured with another model (fingerprint %s) than training begins with (%s): "
                'log-ratios do not begin at 0; if that is not meant, set dpo.reference = "model"',
                self.file,
                " and ".join(other_models),
                model,
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
        row = self.rows.get((part, pair.row))
        if row is None or row.fingerprint != pair.fingerprint:
            raise DataError(
                f"{pair.where} (sample {pair.id!r}): the row is not as it was when {self.file} was measured; put the data back, "
                "or start a new run in another --output-dir"
            )
        return row.chosen, row.rejected

    def missing(self, part: str, rows: Iterable[int]) -> list[int]:
        return sorted(row for row in set(rows) if (part, row) not in self.rows)

    def measure(self, engine: DeepSpeedEngine, part: str, batch: StepPairs, world: World) -> None:
        """Add what the engine's weights give these rows, to the file as well. Collective."""
        own_rows = [row for micro_batch in batch.parts for row in measured(engine, micro_batch, part)]
        rows = [row for rank in world.of_groups(gather_objects(own_rows)) for row in rank]
        for row in rows:
            if not math.isfinite(row.chosen + row.rejected):
                raise DataError(
                    f"{part} row {row.row + 1} (sample {row.id!r}): the reference gives its answers the log-probabilities "
                    f"{row.chosen} and {row.rejected}; look at the model and the row"
                )
            self.rows[part, row.row] = row
        on_rank_zero(partial(append, self.file, rows))


def measured(engine: DeepSpeedEngine, one: MicroBatch, part: str) -> list[Measured]:
    pairs = pairs_without_reference(engine, one)
    sums = zip(one.pairs, pairs.chosen.tolist(), pairs.rejected.tolist(), strict=True)
    return [Measured(part, pair.row, pair.id, pair.fingerprint, *both) for pair, *both in sums]


@torch.no_grad()
def pairs_without_reference(engine: DeepSpeedEngine, one: MicroBatch) -> Pairs:
    """Return what the engine's forward gives them. Collective."""
    lengths = one.lengths.to(engine.device)
    zeros = torch.zeros(len(one.pairs), 2, dtype=torch.float64, device=engine.device)
    return pairs_of(engine(one.batch.to(engine.device)), lengths, zeros)


def as_tensor(values: list[tuple[float, float]], engine: DeepSpeedEngine) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device=engine.device).view(-1, 2)


# ---------------------------------------------------------------- files


def open_stored(output_dir: Path, checkpoint: Path | None, model: str) -> StoredReference:
    """Return what was measured before, of the run that is continued or of an earlier start of this one. For rank 0.

    Args:
        model: fingerprint of the model that training begins with.

    Raises:
        ConfigError: the run that is continued had another reference.
    """
    file = output_dir / FILE
    places = [file] if checkpoint is None else [file, checkpoint.parent.parent / FILE]
    existing_file = next((place for place in places if place.is_file()), None)
    lines = [] if existing_file is None else read_lines(existing_file, REMOVE)
    then = lines[0][1].get("model") if lines else model
    if then != model and checkpoint is not None:
        raise ConfigError(
            f"model.path is another model than the reference of this run was measured with (fingerprint {model}, in "
            f"{existing_file} {then}); put the model back, or start a new run in another --output-dir"
        )
    if then != model:
        log.warning("%s was measured with another model; it is made anew", existing_file)
        lines = []
    rows = [as_measured(line, where) for where, line in lines[1:]]
    write_file(file, "".join(json.dumps(line) + "\n" for line in [{"model": model}, *map(asdict, rows)]))
    return StoredReference(file, {(row.part, row.row): row for row in rows})


def as_measured(line: dict[str, Any], where: str) -> Measured:
    kinds = {"part": str, "row": int, "id": str, "fingerprint": str}
    fits = line.keys() == {*kinds, *VALUES} and all(type(line[name]) is kind for name, kind in kinds.items())
    if not fits or not all(is_logprob(line[name]) for name in VALUES):
        raise DataError(f"{where}: {line!r:.200} is no measured row; {REMOVE}")
    return Measured(**line)


def append(file: Path, rows: Iterable[Measured]) -> None:
    with file.open("a", encoding="utf-8") as lines:
        lines.writelines(json.dumps(asdict(row)) + "\n" for row in rows)


def read_lines(file: Path, advice: str) -> list[tuple[str, dict[str, Any]]]:
    """With where each stands, for messages. DataError for anything that is no object.

    Where a run writes, half of a last line is what a killed process left, and does not count.
    """
    try:
        content = file.read_bytes()
    except OSError as error:
        raise DataError(f"{file}: cannot be read ({error.strerror}); {advice}") from error
    rows, lines = [], content.splitlines()
    unfinished = len(lines) if content.startswith(START) and not content.endswith(b"\n") else 0
    for number, line in enumerate(lines, start=1):
        where = f"{file}, line {number}"
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            if number == unfinished:
                break
            raise DataError(f"{where}: not JSON ({parse_error(error)}); {advice}") from error
        if not isinstance(value, dict):
            raise DataError(f"{where}: not an object; {advice}")
        rows.append((where, value))
    return rows


def read_given(path: str) -> GivenReference:
    """`dpo.reference_file`: by id the log-probabilities of the chosen and the rejected answer.

    Raises:
        ConfigError, DataError: no such file, or a line without them.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise ConfigError(f"dpo.reference_file {file.absolute()}: {instead_of_file(file)}")
    reference = GivenReference(path)
    for where, line in read_lines(file, "correct it"):
        if line.keys() == {"model"}:
            reference.models.add(str(line["model"]))
            continue
        if "id" not in line or not all(is_logprob(line.get(name)) for name in VALUES):
            raise DataError(f"{where}: must have id, chosen and rejected, each of the two {LOGPROB}; is {line!r:.200}")
        key = str(line["id"])
        given_line = GivenLine(float(line["chosen"]), float(line["rejected"]), line.get("fingerprint"))
        other = reference.by_id.setdefault(key, given_line)
        if (other.chosen, other.rejected) != (given_line.chosen, given_line.rejected):
            raise DataError(f"{where}: the id {key!r} is there twice with other values; give each row an id")
    return reference
