"""Reading of the files that a run has written. What is damaged is left out, and the page says so."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from pydantic import BaseModel, FiniteFloat, TypeAdapter

from dsreason.config.output import read_record
from dsreason.errors import DataError
from dsreason.files.disk import read_valid_lines
from dsreason.files.step_names import is_step_name, parse_step
from dsreason.monitor.sinks.json_lines import ENTRY

LOG_TAIL_BYTES = 4_000_000
"""Number of bytes to search for warnings at the end of the log."""
LOG_LINE = re.compile(r"^\S+ \S+ rank \d+ (?:step (?P<step>\d+) )?(?P<level>[A-Z]+) (?P<logger>[\w.]+): (?P<text>.*)")
Row = dict[str, Any]


class CompletionRow(BaseModel):
    """A line in `rollouts/step_N.jsonl`: a completion with its rewards. A reward is None if it does not apply to the row."""

    id: str
    prompt: str
    completion: str
    length: int
    finish_reason: str
    reference: str | None
    reward: FiniteFloat | None
    rewards: dict[str, FiniteFloat | None]
    advantage: FiniteFloat
    trained: bool
    media: list[str]


class AnswerRow(BaseModel):
    """A line in `validation/step_N.jsonl`: a generated answer."""

    row: int
    id: str
    prompt: str
    completion: str
    reference: str | None
    correct: bool | None
    finish_reason: str
    media: list[str]
    rewards: dict[str, FiniteFloat | None]


COMPLETION_ROW, ANSWER_ROW = TypeAdapter(CompletionRow), TypeAdapter(AnswerRow)


@dataclass(frozen=True)
class LoggedWarning:
    """A warning in rank 0's log, with the number of times that it occurs."""

    text: str
    step: int | None
    """Step of the last occurrence; None before the first step."""
    count: int


@dataclass(frozen=True)
class RunFiles:
    """The files of a run. `notices` collects messages about what could not be read."""

    folder: Path
    record: Row
    notices: list[str] = field(default_factory=list)
    rows: dict[Path, list[Row]] = field(default_factory=dict)
    """The rows of each file that has been read, because several parts of the page use the same file."""

    @property
    def name(self) -> str:
        return self.folder.absolute().name

    @property
    def config(self) -> Row:
        return dict(self.record["config"])

    @property
    def algorithm(self) -> str:
        """The run's algorithm, which is also the name of its command: `grpo`, `dpo` or `sft`."""
        return next((name for name in ("grpo", "dpo") if self.config.get(name)), "sft")

    @property
    def metrics(self) -> list[Row]:
        """The lines of `metrics.jsonl`, one per step."""
        return self._read_rows(self.folder / "metrics.jsonl", ENTRY)

    def list_steps(self, kind: str) -> list[int]:
        """Return the steps with a file in the folder `kind` (`rollouts` or `validation`), in order."""
        return sorted(parse_step(file) for file in (self.folder / kind).glob("*.jsonl") if is_step_name(file.stem))

    def read_rollouts(self, step: int) -> list[list[Row]]:
        """Read the completions that were sampled after `step`, grouped by prompt."""
        rows = self._read_rows(self.folder / "rollouts" / f"step_{step}.jsonl", COMPLETION_ROW)
        size = self.config.get("grpo", {}).get("num_generations") or 1
        remaining = iter(rows)
        groups = iter(lambda: list(islice(remaining, size)), [])
        return [group for group in groups if len({(row["id"], row["prompt"]) for row in group}) == 1]

    def read_answers(self, step: int) -> list[Row]:
        """Read the answers that were generated after `step` for the held-out rows."""
        return self._read_rows(self.folder / "validation" / f"step_{step}.jsonl", ANSWER_ROW)

    def _read_rows(self, file: Path, schema: TypeAdapter[Any]) -> list[Row]:
        if file in self.rows or not file.exists():
            return self.rows.get(file, [])
        try:
            rows, problem = read_valid_lines(file, schema)
        except OSError as error:
            rows, problem = [], f"cannot be read ({error.strerror})"
        if problem:
            self.notices.append(f"{file.relative_to(self.folder)}: damaged lines are left out: {problem}")
        self.rows[file] = rows
        return rows

    def read_warnings(self) -> list[LoggedWarning]:
        """Return dsreason's own warnings and errors, not those of libraries, from rank 0's log in order of first occurrence."""
        file = self.folder / "logs" / "rank_0.log"
        try:
            with file.open("rb") as log:
                log.seek(max(0, file.stat().st_size - LOG_TAIL_BYTES))
                lines = log.read().decode(errors="replace").splitlines()
        except OSError:
            return []
        matches = [match for line in lines if (match := LOG_LINE.match(line)) and is_own_warning(match)]
        counts = Counter(match["text"] for match in matches)
        last_steps = {match["text"]: match["step"] for match in matches}
        return [
            LoggedWarning(text, None if step is None else int(step), counts[text]) for text, step in last_steps.items()
        ]


def is_own_warning(match: re.Match[str]) -> bool:
    return match["level"] in ("WARNING", "ERROR", "CRITICAL") and match["logger"].startswith("dsreason.")


def open_run(folder: Path) -> RunFiles:
    """Read the record of the run in `folder`.

    Raises:
        DataError: the folder contains no run, or its `config.json` is damaged.
    """
    try:
        return RunFiles(folder, read_record(folder))
    except FileNotFoundError:
        raise DataError(f"{folder}: contains no config.json; give the output folder of a run") from None
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{folder}: its config.json does not describe a run: {error}") from None
