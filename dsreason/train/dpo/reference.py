"""Reference log-probabilities of answers: measured and saved in the run folder, or read from rows or a file."""

from __future__ import annotations

import json
import logging
import math
import os
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
from dsreason.files.disk import MOST_REPORT_BYTES, read_small
from dsreason.job.ranks import World, gather_objects, run_on_rank_zero
from dsreason.losses.preference import Pairs, build_pairs
from dsreason.problems import describe_missing_file, describe_parse_error
from dsreason.train.dpo.loader import PairFacts, PairMicroBatch, StepPairs
from dsreason.train.dpo.pairs import LOGPROB, is_logprob

log = logging.getLogger(__name__)

FILE = "reference.jsonl"
"""Name of the file in the run folder that contains the measured rows. Its first line identifies the model; each further
line holds one row."""
START = b'{"model"'
VALUES = ("chosen", "rejected")
REMOVE = "remove the file to measure its rows again"


class PairReference(Protocol):
    """The reference policy for log-ratios."""

    def compute_logprobs(self, engine: DeepSpeedEngine, micro_batch: PairMicroBatch, part: str) -> Tensor:
        """Return the log-probabilities of the chosen and the rejected answers, `[P, 2]` float64. Collective.

        The result is on the engine's device.

        Args:
            part: "training" or "validation".

        Raises:
            DataError: the reference has no log-probabilities for a pair.
        """


class NoReference:
    """A reference whose log-probabilities are all 0."""

    def compute_logprobs(self, engine: DeepSpeedEngine, micro_batch: PairMicroBatch, part: str) -> Tensor:
        return torch.zeros(len(micro_batch.pairs), 2, dtype=torch.float64, device=engine.device)


class AdapterOff:
    """A reference that evaluates the current model, with its LoRA adapters turned off, in every step."""

    def __init__(self, base: BaseReference) -> None:
        self.base = base

    def compute_logprobs(self, engine: DeepSpeedEngine, micro_batch: PairMicroBatch, part: str) -> Tensor:
        with self.base.in_place():
            pairs = compute_policy_pairs(engine, micro_batch)
        return torch.stack([pairs.chosen, pairs.rejected], dim=1)


NOTHING_GIVEN = (
    'fields ref_chosen_logprob and ref_rejected_logprob are missing, but dpo.reference = "precomputed" needs them; add them, '
    'set dpo.reference_file, or set dpo.reference = "model"'
)


class RowReference:
    """A reference that reads the log-probabilities from the rows."""

    def compute_logprobs(self, engine: DeepSpeedEngine, micro_batch: PairMicroBatch, part: str) -> Tensor:
        return to_tensor([self.get_logprobs(pair) for pair in micro_batch.pairs], engine)

    def get_logprobs(self, pair: PairFacts) -> tuple[float, float]:
        if pair.ref_logprobs is None:
            raise DataError(f"{pair.where} (sample {pair.id!r}): {NOTHING_GIVEN}")
        return pair.ref_logprobs


@dataclass(frozen=True)
class ReferenceLine:
    """A line of `dpo.reference_file`. `fingerprint` identifies the row; it is None if the file was not written by a run."""

    chosen: float
    rejected: float
    fingerprint: str | None = None


@dataclass
class FileReference:
    """A reference that reads the log-probabilities from `dpo.reference_file`."""

    file: str
    by_id: dict[str, ReferenceLine] = field(default_factory=dict)
    models: set[str] = field(default_factory=set)
    """Fingerprints of the models that computed the file's log-probabilities; empty if the file does not name a model."""

    def compute_logprobs(self, engine: DeepSpeedEngine, micro_batch: PairMicroBatch, part: str) -> Tensor:
        return to_tensor([self.get_logprobs(pair) for pair in micro_batch.pairs], engine)

    def get_logprobs(self, pair: PairFacts) -> tuple[float, float]:
        if problem := self.find_problem(pair.id, pair.fingerprint):
            raise DataError(f"{pair.where} (sample {pair.id!r}): {problem}")
        line = self.by_id[pair.id]
        return line.chosen, line.rejected

    def find_problem(self, row_id: str, fingerprint: str | None = None) -> str | None:
        """Return why the file cannot be used for a row, or None if it can. Without a fingerprint, check only the id."""
        line = self.by_id.get(row_id)
        if line is None:
            return f"dpo.reference_file ({self.file}) has no line with this id; add it"
        if None not in (fingerprint, line.fingerprint) and fingerprint != line.fingerprint:
            return (
                f"the row has changed since dpo.reference_file ({self.file}) was computed (its fingerprint is "
                f"{fingerprint}, but the file has {line.fingerprint}); restore data, processor and data.vision, use a file "
                'computed from these rows, or set dpo.reference = "model"'
            )
        return None

    def warn_if_model_differs(self, model: str) -> None:
        """Warn if the file was computed with a model other than the initial one, whose fingerprint is `model`."""
        if other_models := sorted(self.models - {model}):
            log.warning(
                "dpo.reference_file (%s) was computed by a model with fingerprint %s, but training starts with %s, so "
                'log-ratios do not start at 0; if this is not intended, set dpo.reference = "model"',
                self.file,
                " and ".join(other_models),
                model,
            )


@dataclass(frozen=True)
class ReferenceRecord:
    """A row's measured log-probabilities, which form one line of `FILE`.

    Example: `{"part": "training", "row": 3, "id": "7", "fingerprint": "…", "chosen": -10.5, "rejected": -9.8}`.
    """

    part: str
    row: int
    id: str
    fingerprint: str
    chosen: float
    rejected: float


@dataclass
class StoredReference:
    """A reference that measures each row once with the initial model and saves the results."""

    file: Path
    rows: dict[tuple[str, int], ReferenceRecord] = field(default_factory=dict)
    """(part, row index) → measured row; the same on all ranks."""

    def compute_logprobs(self, engine: DeepSpeedEngine, micro_batch: PairMicroBatch, part: str) -> Tensor:
        return to_tensor([self.get_logprobs(pair, part) for pair in micro_batch.pairs], engine)

    def get_logprobs(self, pair: PairFacts, part: str) -> tuple[float, float]:
        row = self.rows.get((part, pair.row))
        if row is None or row.fingerprint != pair.fingerprint:
            raise DataError(
                f"{pair.where} (sample {pair.id!r}): the row has changed since {self.file} was computed; restore the data, "
                "or start a new run in another --output-dir"
            )
        return row.chosen, row.rejected

    def list_missing(self, part: str, rows: Iterable[int]) -> list[int]:
        return sorted(row for row in set(rows) if (part, row) not in self.rows)

    def measure(self, engine: DeepSpeedEngine, part: str, batch: StepPairs, world: World) -> None:
        """Measure the rows in `batch` with the engine's weights, and add the results to `rows` and to the file. Collective."""
        local_rows = [row for micro_batch in batch.parts for row in measure_rows(engine, micro_batch, part)]
        rows = [row for rank in world.select_group_values(gather_objects(local_rows)) for row in rank]
        for row in rows:
            if not math.isfinite(row.chosen + row.rejected):
                raise DataError(
                    f"{part} row {row.row + 1} (sample {row.id!r}): the log-probabilities of its answers under the reference are "
                    f"{row.chosen} and {row.rejected}, but they must be finite; check the model and the row"
                )
            self.rows[part, row.row] = row
        run_on_rank_zero(partial(append, self.file, rows))


def measure_rows(engine: DeepSpeedEngine, micro_batch: PairMicroBatch, part: str) -> list[ReferenceRecord]:
    pairs = compute_policy_pairs(engine, micro_batch)
    sums = zip(micro_batch.pairs, pairs.chosen.tolist(), pairs.rejected.tolist(), strict=True)
    return [ReferenceRecord(part, pair.row, pair.id, pair.fingerprint, *both) for pair, *both in sums]


@torch.no_grad()
def compute_policy_pairs(engine: DeepSpeedEngine, micro_batch: PairMicroBatch) -> Pairs:
    """Run a forward pass and return the pairs with the policy's log-probabilities; those of the reference are 0. Collective."""
    lengths = micro_batch.lengths.to(engine.device)
    zeros = torch.zeros(len(micro_batch.pairs), 2, dtype=torch.float64, device=engine.device)
    return build_pairs(engine(micro_batch.batch.to(engine.device)), lengths, zeros)


def to_tensor(values: list[tuple[float, float]], engine: DeepSpeedEngine) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device=engine.device).view(-1, 2)


# ---------------------------------------------------------------- files


def open_stored(output_dir: Path, checkpoint: Path | None, model: str) -> StoredReference:
    """Load the rows that were measured by the resumed run, or by an earlier start of this run. Call this only on rank 0.

    Args:
        model: fingerprint of the initial model.

    Raises:
        ConfigError: the resumed run had a different reference model.
    """
    file = output_dir / FILE
    candidates = [file] if checkpoint is None else [file, checkpoint.parent.parent / FILE]
    existing_file = next((candidate for candidate in candidates if os.path.lexists(candidate)), None)
    lines = [] if existing_file is None else read_lines(existing_file, REMOVE)
    measured_model = lines[0][1].get("model") if lines else model
    if measured_model != model and checkpoint is not None:
        raise ConfigError(
            f"model.path has fingerprint {model}, but the reference of this run was computed by the model with "
            f"fingerprint {measured_model} ({existing_file}); restore the model, or start a new run in another --output-dir"
        )
    if measured_model != model:
        log.warning("%s was computed by a different model; computing its rows again", existing_file)
        lines = []
    rows = [parse_measured_row(line, where) for where, line in lines[1:]]
    write_file(file, "".join(json.dumps(line) + "\n" for line in [{"model": model}, *map(asdict, rows)]))
    return StoredReference(file, {(row.part, row.row): row for row in rows})


def parse_measured_row(line: dict[str, Any], where: str) -> ReferenceRecord:
    kinds = {"part": str, "row": int, "id": str, "fingerprint": str}
    fits = line.keys() == {*kinds, *VALUES} and all(type(line[name]) is kind for name, kind in kinds.items())
    if not fits or not all(is_logprob(line[name]) for name in VALUES):
        raise DataError(f"{where}: {line!r:.200} is not a measured row; {REMOVE}")
    return ReferenceRecord(**line)


def append(file: Path, rows: Iterable[ReferenceRecord]) -> None:
    with file.open("a", encoding="utf-8") as lines:
        lines.writelines(json.dumps(asdict(row)) + "\n" for row in rows)


def read_lines(file: Path, advice: str) -> list[tuple[str, dict[str, Any]]]:
    """Read a file with one JSON object per line; return (location for error messages, object) for each line.

    If the file was written by a run, an incomplete last line is skipped; a killed process may have left it.

    Args:
        advice: what the user should do; error messages end with it.

    Raises:
        DataError: the file cannot be read, or a line is not a JSON object.
    """
    try:
        content = read_small(file, MOST_REPORT_BYTES)
    except OSError as error:
        raise DataError(f"{file}: cannot be read: {error.strerror}; {advice}") from error
    rows, lines = [], content.splitlines()
    unfinished = len(lines) if content.startswith(START) and not content.endswith(b"\n") else 0
    for number, line in enumerate(lines, start=1):
        location = f"{file}, line {number}"
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            if number == unfinished:
                break
            raise DataError(f"{location}: is not JSON ({describe_parse_error(error)}); {advice}") from error
        if not isinstance(value, dict):
            raise DataError(f"{location}: is not a JSON object; {advice}")
        rows.append((location, value))
    return rows


def read_reference_file(path: str) -> FileReference:
    """Read `dpo.reference_file`, which has the log-probabilities of the chosen and the rejected answer for each row id.

    Raises:
        ConfigError: the file does not exist.
        DataError: a line is invalid.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise ConfigError(f"dpo.reference_file {file.absolute()}: {describe_missing_file(file)}")
    reference = FileReference(path)
    for where, line in read_lines(file, "correct it"):
        if line.keys() == {"model"}:
            reference.models.add(str(line["model"]))
            continue
        if "id" not in line or not all(is_logprob(line.get(name)) for name in VALUES):
            raise DataError(
                f"{where}: must have id, chosen and rejected (the last two must each be {LOGPROB}); got {line!r:.200}"
            )
        key = str(line["id"])
        entry = ReferenceLine(float(line["chosen"]), float(line["rejected"]), line.get("fingerprint"))
        other = reference.by_id.setdefault(key, entry)
        if (other.chosen, other.rejected) != (entry.chosen, entry.rejected):
            raise DataError(f"{where}: the id {key!r} occurs twice with different values; make the ids unique")
    return reference
