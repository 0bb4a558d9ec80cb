"""Tables that show the results of `dsreason data inspect`."""

from __future__ import annotations

from collections.abc import Mapping

from rich.filesize import decimal
from rich.table import Table

from dsreason.monitor.console import open_console
from dsreason.problems import summarise_problems
from dsreason.tools.datasets.inspection import Inspection, PartReport, Spread

SHOWN_PIXELS = 3
"""Maximum number of media items to print whose pixels differ from cosmos-rl's; inspection.json lists more of them."""


def show_inspection(inspection: Inspection) -> None:
    console = open_console()
    console.print(build_facts_table(inspection))
    for name, part in inspection.parts.items():
        if part.letters:
            console.print(build_letters_table(name, part))
        if part.answers:
            console.print(build_counts_table(f"{name}: answers", "answer", part.answers, part.inspected))
        if part.system_prompts:
            console.print(build_counts_table(f"{name}: system prompts", "prompt", part.system_prompts, part.inspected))
    if inspection.balance:
        console.print(build_balance_table(inspection))
    if inspection.overlaps:
        console.print(build_overlaps_table(inspection))
    for name, part in inspection.parts.items():
        for text in part.pixels.examples[:SHOWN_PIXELS] if part.pixels else ():
            console.print(f"{name}: pixels differ: {text}", markup=False, highlight=False)
    for line in summarise_problems([describe_problem(problem) for problem in inspection.problems]):
        console.print(line, markup=False, highlight=False)


def describe_problem(problem: Mapping[str, str]) -> str:
    """Return an entry of `Inspection.problems` as a message that names the row: `missing media: a.jsonl, row 2: …`."""
    where, reason = problem["where"], problem["reason"]
    return f"{problem['kind']}: {reason if reason.startswith(where) else f'{where}: {reason}'}"


def build_facts_table(inspection: Inspection) -> Table:
    """Build a table with one column per part. Spreads are shown as minimum, median, 95th percentile and maximum."""
    table = Table("", *inspection.parts, title="minimum / median / 95th percentile / maximum")
    columns = [collect_facts(part, inspection.max_length) for part in inspection.parts.values()]
    for name in dict.fromkeys(name for column in columns for name in column):
        table.add_row(name, *(column.get(name, "-") for column in columns))
    return table


def collect_facts(part: PartReport, max_length: int | None) -> dict[str, str]:
    rows = {"rows": f"{part.rows}" + (f" ({part.inspected} inspected)" if part.inspected < part.rows else "")}
    rows |= {f"unusable rows: {reason}": str(count) for reason, count in part.unusable.items()}
    rows |= {"unreadable media files": str(part.unreadable_media)} if part.unreadable_media else {}
    rows |= {f"rows with {kind}": str(count) for kind, count in sorted(part.modalities.items())}
    rows |= {"question, characters": format_spread(part.question_characters)}
    rows |= {"answer, characters": format_spread(part.answer_characters)}
    if (pairs := part.preferences) is not None:
        rows |= {
            "preferences": str(pairs.rows),
            "rejected answer, characters": format_spread(pairs.rejected_characters),
        }
        rows["chosen answer is longer"] = f"{pairs.longer_chosen / pairs.rows:.1%}"
        rows |= {"both answers are identical": str(pairs.undecided)} if pairs.undecided else {}
    if part.too_long is not None:
        rows |= {"tokens": format_spread(part.tokens), f"rows with more than {max_length} tokens": str(part.too_long)}
    if part.pixels is not None and part.pixels.compared:
        rows["media whose pixels differ from cosmos-rl's"] = f"{part.pixels.differing} of {part.pixels.compared}"
    for kind, media in part.media.items():
        rows[f"{kind} files"] = f"{media.files}, {decimal(media.bytes)}"
        for label, numbers in (("height", media.height), ("width", media.width)):
            rows[f"{kind} {label}, pixels"] = format_spread(numbers)
        if kind == "video":
            rows |= {
                "video, seconds": format_spread(media.seconds),
                "video, frames per second": format_spread(media.fps),
            }
    if part.unlisted_answers:
        rows["answers that match no option of the question"] = str(part.unlisted_answers)
    if part.best_constant is not None:
        rows["accuracy of the best constant answer"] = f"{part.best_constant:.1%}"
    for label, count in (
        ("<think> in the reply", part.with_think),
        ("<answer> in the reply", part.with_answer_tag),
        ("multi-turn conversations", part.several_turns),
        ("duplicate rows", part.duplicates),
    ):
        rows[label] = str(count)
    return rows


def format_spread(numbers: Spread | None) -> str:
    if numbers is None:
        return "-"
    return " / ".join(f"{value:.4g}" for value in (numbers.min, numbers.median, numbers.p95, numbers.max))


def build_letters_table(name: str, part: PartReport) -> Table:
    table = Table("correct letter", "rows", "expected if uniform", title=f"{name}: position bias")
    for letter, counts in part.letters.items():
        table.add_row(letter, str(counts.count), f"{counts.expected:.1f}")
    return table


def build_counts_table(title: str, value_column: str, counts: dict[str, int], total: int) -> Table:
    table = Table(value_column, "rows", "share", title=title)
    for text, count in counts.items():
        table.add_row(text.replace("\n", " ")[:80].replace("[", r"\["), str(count), f"{count / total:.1%}")
    return table


def build_balance_table(inspection: Inspection) -> Table:
    table = Table("label", "rows", "rows per epoch", "each row is used", title="training: data.balance")
    for name, label in inspection.balance.items():
        table.add_row(
            name.replace("[", r"\["), str(label.rows), str(label.per_epoch), f"{label.per_epoch / label.rows:.2f} times"
        )
    return table


def build_overlaps_table(inspection: Inspection) -> Table:
    table = Table("rows of", "also in", "same question and media", "a media item in common", title="duplicates")
    for overlap in inspection.overlaps:
        table.add_row(overlap.part, overlap.other, str(overlap.same_rows), str(overlap.same_media))
    return table
