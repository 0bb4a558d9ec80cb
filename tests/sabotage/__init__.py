"""Deliberate faults, and the tests that detect each of them.

    python -m tests.sabotage                        # every fault; one with real ranks takes minutes
    python -m tests.sabotage kl_sign prune_one_more # these two
    python -m tests.sabotage --unit                 # only those that unit tests should detect, some seconds each
    python -m tests.sabotage --markdown FILE        # the table as Markdown, too

A suite that is made faster must still detect what it detected before. `faults.toml` holds mistakes that people
really make; each replaces one snippet of one file in a copy of the tree. Then the tests that should detect it run:
first those of the short suite and, if none of them fails, those marked `long`. A fault that no test detects is a gap,
and the exit status is 1.

To add one, write into `faults.toml`:

    [[fault]]
    name = "prune_one_more"
    what = "one checkpoint more than asked for is deleted"  # a line of the table
    file = "dsreason/checkpoints/checkpoint_folder.py"
    old = "len(complete) - keep, 0)"                         # occurs in the file exactly once
    new = "len(complete) - keep + 1, 0)"                     # code that still runs
    tests = ["tests/unit/checkpoints/test_checkpoint.py"]    # the narrowest files that should detect it

A good fault is one letter or one line, looks harmless in a review, and raises nothing by itself.
`tests/unit/test_sabotage.py` fails when the code has changed and a snippet no longer occurs in its file.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FAULTS = Path(__file__).with_name("faults.toml")


@dataclass(frozen=True)
class Fault:
    name: str
    what: str
    """The mistake, in words."""
    file: str
    """Path of the changed file, from the root of the tree."""
    old: str
    """A text that stands in the file once."""
    new: str
    tests: list[str]
    """Test files that should see it, from the root of the tree."""

    @property
    def is_for_unit_tests(self) -> bool:
        return all(test.startswith("tests/unit/") for test in self.tests)

    def planted_in(self, source: str) -> str:
        """The source with the fault. ValueError if the text to replace does not stand there exactly once."""
        if (count := source.count(self.old)) != 1:
            raise ValueError(
                f"fault {self.name}: {self.file} has its text {count} times instead of once; correct `old`"
            )
        return source.replace(self.old, self.new)


def read_faults() -> list[Fault]:
    return [Fault(**fault) for fault in tomllib.loads(FAULTS.read_text())["fault"]]
