"""A reimplementation of cosmos-reason1's `calculate_accuracy.py`, with the same counts and reports of skipped files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from dsreason.evaluation.report.results import OWN_FILES, list_json_files, make_safe_name
from dsreason.files.disk import read_small


class Count(NamedTuple):
    """Counts over all files. `complaints` holds one message per skipped file, and `files` includes the skipped files."""

    files: int
    samples: int
    correct: int
    complaints: list[str]

    def lines(self) -> Iterator[str]:
        accuracy = self.correct / self.samples if self.samples else 0.0
        yield f"Total samples processed across all files: {self.samples}"
        yield f"Total samples counted as correct: {self.correct}"
        yield f"Mean accuracy: {accuracy:.4f} ({accuracy * 100:.2f}%)"


def calculate_accuracy(results_dir: Path, dataset: Sequence[str] | None = None) -> Count:
    """Count the items in all `**/*.json` files that have `is_correct`, and the items in which it is truthy ("false" is, null is
    not).

    If `dataset` is set, only files directly in folders with these names count, as in the older version of the script.
    """
    files = list_json_files(results_dir)
    if dataset is not None:
        names = {make_safe_name(name) for name in dataset}
        files = [file for file in files if file.parent.name in names]
    samples = correct = 0
    complaints = []
    for file in files:
        try:
            items = json.loads(read_small(file))
        except (OSError, ValueError, RecursionError) as error:
            complaints.append(f"Error: {file}: {error}; skipped")
            continue
        if not isinstance(items, list):
            if file.name not in OWN_FILES:
                complaints.append(f"Warning: {file}: must contain a list, but contains {type(items).__name__}; skipped")
            continue
        counted = [bool(item["is_correct"]) for item in items if isinstance(item, dict) and "is_correct" in item]
        samples += len(counted)
        correct += sum(counted)
    return Count(len(files), samples, correct, complaints)
