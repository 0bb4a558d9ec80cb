"""Functions that remove markup from responses and split responses into sentences."""

from __future__ import annotations

import re
import unicodedata

PUNCTUATION = str.maketrans(
    {"。": ". ", "、": ", "}
    | dict.fromkeys("“”„‟«»「」『』", '"')
    | dict.fromkeys("【〔《", "(")
    | dict.fromkeys("】〕》", ")")
)
"""Punctuation from other languages and scripts that NFKC normalization leaves unchanged → ASCII punctuation."""
EAST_ASIAN = r"\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
"""Character ranges of scripts in which a Latin letter has no spaces around it."""
ABBREVIATION = re.compile(r"\b(?:fig|vs|cf|approx|etc|e\.g|i\.e|mr|dr|st|ans|opt)\.$", re.IGNORECASE)
NUMBER_SIGN = re.compile(r"\bno\.$", re.IGNORECASE)
"""Pattern for "no.", which abbreviates "number" if a digit follows, and is an answer otherwise."""
ABBREVIATION_LENGTH = 12
"""Number of characters at the end of a text to search for an abbreviation."""


def find_last_boxed(text: str) -> str | None:
    r"""Return the content of the last `\boxed{…}`; None if the text has none."""
    boxes: list[str] = re.findall(r"\\boxed\s*\{((?:[^{}]|\{[^{}]*\})*)\}", text)
    return boxes[-1] if boxes else None


def strip_markup(text: str) -> str:
    """Remove Markdown, LaTeX and HTML markup, replace full-width letters with ASCII, and remove extra spaces and empty lines."""
    text = unicodedata.normalize("NFKC", text).translate(PUNCTUATION)
    text = re.sub(r"\\([()\[\]])", r"\1", re.sub(r"\\(?:text|textbf|mathbf|mathrm)\s*\{([^{}]*)\}", r"\1", text))
    lines = (" ".join(line.split()) for line in re.sub(r"[*`$]|</?\w+>", "", text).splitlines())
    return "\n".join(filter(None, lines))


def clean_text(text: str) -> str:
    """Remove markup, pictographs and bullets, as well as list numbers before a letter that stands alone on a line."""
    plain = re.sub(
        r"<\|\w+\|>|(?<!\w)_{1,2}(?=\S)|(?<=\S)_{1,2}(?!\w)|[\u2600-\u27bf\ufe0f\U0001f000-\U0001faff]", " ", text
    )
    plain = re.sub(f"([{EAST_ASIAN}]+)", r" \1 ", strip_markup(plain))
    plain = re.sub(r"(?m)^(?:[-•#>]+ )+", "", "\n".join(line.strip() for line in plain.splitlines()))
    return re.sub(r"(?m)^\d{1,2}[.)] (?=\(?[A-Za-z]\)?\W*$)", "", plain)


def take_text_before(text: str, position: int, limit: int) -> str:
    """Return at most `limit` characters before `position`. Copying the entire preceding text at every match would be slow."""
    return text[max(0, position - limit) : position]


def split_sentences(text: str) -> list[str]:
    """Split a text into sentences: `It turns, see Fig. 2. So B.` → `["It turns, see Fig. 2.", "So B."]`."""
    rows: list[list[str]] = []
    for part in re.split(r"\n|(?<=[.!?;])\s+", text):
        if rows and _is_abbreviated(rows[-1][-1], part):
            rows[-1].append(part)
        elif part:
            rows.append([part])
    return [" ".join(parts) for parts in rows]


def _is_abbreviated(part: str, following: str) -> bool:
    end = part[-ABBREVIATION_LENGTH:]
    return bool(ABBREVIATION.search(end) or (following[:1].isdigit() and NUMBER_SIGN.search(end)))
