r"""Rewards for mathematical answers, compared with `math-verify` (sympy).

math-verify interrupts long computations with a signal, which only a process's main thread can receive; an interrupted
computation counts as wrong. A computation inside C code, as for some forms of `\boxed{9^{9^{9^9}}}`, cannot be interrupted. The
`Scorer` then kills the worker and uses `score_on_timeout`, because the fault lies with the completion, not the function.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable

from dsreason.data.types import Sample

SECONDS = 3
"""Time limit for parsing an expression, and for each comparison, in seconds."""

UNITS = (
    "square|ways|integers|dollars|cents|mph|inches|feet|cm|km|gm|m|meters|pounds|units|hours|minutes|degrees|points|digits"
    "|edges|meals|multiples|students"
)
"""Words that are ignored next to a number."""

LONGEST = 1000
"""Maximum number of characters in braces. Without a limit, each unclosed brace would cause a search to the end of the text."""


def score_on_timeout(score: float) -> Callable[[Callable[..., float]], Callable[..., float]]:
    """Set the score for calls of a plain (not async) reward that exceed the time limit, which would otherwise end the run."""

    def mark(function: Callable[..., float]) -> Callable[..., float]:
        vars(function)["score_on_timeout"] = score
        return function

    return mark


@score_on_timeout(0.0)
def boxed_math(completion: str, sample: Sample) -> float:
    r"""Return 1 if the completion's `\boxed{…}` equals the reference's, else 0. The reward is the same as in cosmos-rl.

    The reference must be LaTeX (`\boxed{5}` or `$5$`; a bare `5` always gives 0), but the completion may also contain a bare
    number. A completion with several different boxed answers is wrong.
    """
    if sample.answer is None:
        return 0.0
    return float(is_equal(sample.answer, completion, bare_numbers=True))


@score_on_timeout(-1.0)
def direct_math(completion: str, sample: Sample) -> float:
    r"""Return 1 if the last `Answer: …` in the completion equals the reference, else -1.

    Answers are equal if they have the same text after `normalise`, as in cosmos-rl, or the same value, like `0.5` and `\frac12`.
    """
    lines = re.findall(r"answer\s*:\s*([^\n]+)", completion, re.IGNORECASE)
    if not lines or sample.answer is None:
        return -1.0
    answer_text, right = normalise(lines[-1]), normalise(sample.answer)
    same = answer_text == right or (
        is_formula(answer_text) and is_formula(right) and is_equal(f"${right}$", f"${answer_text}$")
    )
    return 1.0 if same else -1.0


def is_equal(reference: str, answer: str, *, bare_numbers: bool = False) -> bool:
    """Return whether two LaTeX texts have the same value; with `bare_numbers`, the answer may also be a bare number."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify  # slow: loads sympy

    seconds = SECONDS if threading.current_thread() is threading.main_thread() else None
    latex, number = LatexExtractionConfig(), ExprExtractionConfig()
    right = parse(reference, (latex,), parsing_timeout=seconds)
    answer_value = parse(answer, (number, latex) if bare_numbers else (latex,), parsing_timeout=seconds)
    return bool(verify(right, answer_value, timeout_seconds=seconds))


def is_formula(text: str) -> bool:
    """Return whether the text contains no words. sympy parses a word as a product of letters, so `left` would equal `felt`."""
    return re.search(r"(?<![\\A-Za-z])[A-Za-z]{3,}", text) is None


def normalise(answer: str) -> str:
    r"""Normalise an answer as Minerva's evaluation does: `x = 5 cm` → `5`, `\frac12` → `\frac{1}{2}`, `1,000` → `1000`."""
    text = answer.rpartition("=")[2]
    text = re.sub(r"\b[Aa]n? ", "", text)
    for noise in (r"\$", r"\ ", r"\;", r"\,", r"\!", "{,}", r"^\circ", r"^{\circ}", r"\ldots", r"\dots", '"'):
        text = text.replace(noise, "," if noise == "{,}" else "")
    text = text.replace(r"\text{.}", "")
    formula = re.search(r"\$+([^$]*)\$+", text)
    text = formula[1] if formula else text.replace("$", "")
    text = re.sub(rf"\\boxed\{{(.{{0,{LONGEST}}})\}}", r"\1", text, flags=re.DOTALL)
    text = re.sub(rf"\\(?:text|textbf|mbox|mathrm|overline)\{{(.{{0,{LONGEST}}}?)\}}", r" \1", text)
    text = re.sub(rf"(?<![A-Za-z\\])(?:{UNITS})(?![A-Za-z])(?:\^[23])?", "", text)
    text = re.sub(r"\\[dt]frac", r"\\frac", text)
    text = re.sub(r"\\frac\s*([^\s{}\\])\s*([^\s{}\\])", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\sqrt\s*([^\s{}\\\[])", r"\\sqrt{\1}", text)
    text = "".join(text.split()).removesuffix(".")  # the full stop ends the sentence, even in `$42.$`
    digits = text.replace(",", "")
    return digits if digits.isdigit() else text
