"""Comparison of dsreason's answer reader with the rules of VLMEvalKit and lmms-eval: answers read, unread and misread.

    python benchmarks/answer_reading.py [--show tuned|held-out|new] [--write]

The responses are in `tests/unit/answers/responses.jsonl`, each with the option that a person would read, or null if it names
no option. The other packages' rules run if the packages are installed (`pip install --no-deps ms-vlmeval lmms-eval` suffices);
`--write` then saves their readings to `others_readings.json` next to the responses. Otherwise, the saved readings are used.
Neither judge models nor random choices are used: if a rule would choose at random, the answer counts as unread. All rules get
the response without its thoughts. If the options have no texts, the other packages' rules get the letters A to E.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

from dsreason.answers.parsing import parse
from dsreason.text import split_response

FOLDER = Path(__file__).resolve().parents[1] / "tests" / "unit" / "answers"
RESPONSES, OTHERS = FOLDER / "responses.jsonl", FOLDER / "others_readings.json"
OURS = "dsreason"
NO_TEXTS = "ABCDE"
UNREAD = "-"

Rule = Callable[[str, "dict[str, str] | None"], str]
"""Function (response, options) → letter, or any other string if the rule reads no letter."""


class Row(NamedTuple):
    part: str
    """`tuned`: used while the rules were written; `held-out`: unused then; `new`: written after the last change to a rule."""
    options: dict[str, str] | None
    response: str
    reading: str | None


class Counts(NamedTuple):
    """Numbers of responses by outcome.

    `read`: the rule reads the same option as a person; `unread`: it reads nothing, although a person reads an option;
    `misread`: it reads a different option, or any option although a person reads none.
    """

    read: int
    unread: int
    misread: int


def load_rows(file: Path = RESPONSES) -> list[Row]:
    return [Row(**json.loads(line)) for line in file.read_text(encoding="utf-8").splitlines()]


def read_ours(rows: Sequence[Row]) -> str:
    """Return what dsreason's reader reads, one character per row."""
    return "".join(parse(row.response, "letter", options=row.options).answer or UNREAD for row in rows)


def load_others(file: Path = OTHERS) -> dict[str, str]:
    """Return the saved readings of the other packages' rules: rule → one character per row."""
    readings: dict[str, str] = json.loads(file.read_text(encoding="utf-8"))
    return readings


def count_outcomes(rows: Sequence[Row], readings: str, part: str | None = None) -> Counts:
    """Count the outcomes of the rule's readings.

    If a person reads B, the reading `B` counts as read, `-` as unread and `A` as misread. If a person reads nothing, `B` counts
    as misread.
    """
    outcomes: Counter[str] = Counter()
    for row, reading in zip(rows, readings, strict=True):
        if part is not None and row.part != part:
            continue
        if reading == UNREAD:
            outcomes["unread" if row.reading else "none"] += 1
        else:
            outcomes["read" if reading == row.reading else "misread"] += 1
    return Counts(outcomes["read"], outcomes["unread"], outcomes["misread"])


def format_table(rows: Sequence[Row], readings: Mapping[str, str]) -> str:
    """Format a Markdown table of the read, unread and misread counts for each part and for all rows."""
    parts = [*dict.fromkeys(row.part for row in rows), None]
    sizes = {part: sum(part in (row.part, None) for row in rows) for part in parts}
    heads = [f"{part or 'all'} ({sizes[part]})" for part in parts]
    lines = [f"| read / unread / misread | {' | '.join(heads)} |", f"|---|{'--:|' * len(parts)}"]
    for name, row_readings in readings.items():
        cells = [" / ".join(map(str, count_outcomes(rows, row_readings, part))) for part in parts]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


# ---------------------------------------------------------------- rules of the other packages


def load_rules() -> dict[str, Rule]:
    """Return the installed packages' rules: name → rule."""
    rules: dict[str, Rule] = {}
    if importlib.util.find_spec("vlmeval"):
        version = importlib.metadata.version("ms-vlmeval")
        rules[f"VLMEvalKit (ms-vlmeval {version}) can_infer"] = build_vlmeval_rule()
    if importlib.util.find_spec("lmms_eval"):
        version = importlib.metadata.version("lmms-eval")
        rules |= {f"lmms-eval {version} {name}": rule for name, rule in build_lmms_eval_rules().items()}
    return rules


def skip_init(package: str, *below: str) -> None:
    """Make a package's modules importable without running its `__init__`, which imports much that they do not need."""
    spec = importlib.util.find_spec(package)
    assert spec is not None
    for name in ("", *below):
        module = ModuleType(f"{package}.{name}".rstrip("."))
        module.__path__ = [str(Path(folder, name)) for folder in spec.submodule_search_locations or ()]
        sys.modules[module.__name__] = module


def build_vlmeval_rule() -> Rule:
    skip_init("vlmeval", "smp", "utils")
    rules = import_module("vlmeval.utils.matching_util")

    def can_infer(response: str, options: dict[str, str] | None) -> str:
        if options is None:
            return rules.can_infer_option(response, dict.fromkeys(NO_TEXTS, "")) or UNREAD
        return rules.can_infer(response, dict(options)) or UNREAD  # a copy, because the rule modifies its argument

    return can_infer


def build_lmms_eval_rules() -> dict[str, Rule]:
    skip_init("lmms_eval", "tasks", "filters", "api")
    mmmu: Any = import_module("lmms_eval.tasks._task_utils.mmmu_mcq_utils")
    mmmu.random = SimpleNamespace(choice=lambda letters: UNREAD)
    extract = import_module("lmms_eval.tasks._task_utils.mcq_extract").extract_mcq_answer
    filters = import_module("lmms_eval.filters.extraction").MultiChoiceRegexFilter

    def list_letters(options: dict[str, str] | None) -> list[str]:
        return list(options or NO_TEXTS)

    def apply_mmmu(response: str, options: dict[str, str] | None) -> str:
        return str(mmmu.parse_mmmu_multi_choice_response(response, list_letters(options), dict(options or {})))

    def apply_videomme(response: str, options: dict[str, str] | None) -> str:
        return str(extract(response, list_letters(options)))

    def apply_filter(response: str, options: dict[str, str] | None) -> str:
        settings: dict[str, Any] = {"regex_pattern": r"(\([A-Z]\))", "ignore_case": True, "ignore_punctuation": True}
        choices = list((options or dict.fromkeys(NO_TEXTS, "\0")).values())
        [[match]] = filters(**settings).apply([[response]], [{"choices": choices}])
        return str(match).strip("()")

    return {
        "parse_multi_choice_response (MMMU)": apply_mmmu,
        "extract_mcq_answer (Video-MME)": apply_videomme,
        "MultiChoiceRegexFilter": apply_filter,
    }


def read_with(rule: Rule, rows: Sequence[Row]) -> str:
    def read_letter(row: Row) -> str:
        reading = rule(split_response(row.response).answer, row.options)
        return reading if reading in (row.options or NO_TEXTS) and len(reading) == 1 else UNREAD

    return "".join(map(read_letter, rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--show", choices=["tuned", "held-out", "new"], help="print the rows of a part that our reader gets wrong"
    )
    parser.add_argument("--write", action="store_true", help="save the readings of the other packages' rules")
    arguments = parser.parse_args()
    rows = load_rows()
    their_readings = {name: read_with(rule, rows) for name, rule in load_rules().items()}
    if arguments.write:
        if not their_readings:
            parser.error(
                "neither ms-vlmeval nor lmms-eval is installed, so there is nothing to write; install one of them"
            )
        OTHERS.write_text(json.dumps(their_readings, indent=1) + "\n", encoding="utf-8")
    our_readings = read_ours(rows)
    print(format_table(rows, {OURS: our_readings} | (their_readings or load_others())))
    for row, reading in zip(rows, our_readings, strict=True):
        if row.part == arguments.show and reading != (row.reading or UNREAD):
            print(f"\nread as {reading}, but means {row.reading or UNREAD}: {row.response!r}  {row.options}")


if __name__ == "__main__":
    main()
