"""Tests that the compatible parser gives the same results as cosmos-reason1's evaluator.

The expected values come from that evaluator's own functions.
"""

from __future__ import annotations

import pytest

from dsreason.evaluation import parse


@pytest.mark.parametrize(
    ("text", "answer", "reasoning"),
    [
        ("<think>r</think>\n\n<answer>A</answer>", "A", "r"),
        ("<answer>(B)</answer>", "B", ""),
        ("<answer>The answer is B</answer>", "T", ""),
        ("<answer>b</answer>", "", ""),
        ("<answer>C. move</answer>", "C", ""),
        ("A", "", ""),
        ("<answer></answer>", "", ""),
        ("<think>\n r\ns \n</think>\n<answer>\n\nD\n</answer>", "D", "r\ns"),
        ("<answer>A</answer><answer>B</answer>", "A", ""),
        ("<answer>a</answer><answer>B</answer>", "", ""),
        ("<answer>B", "", ""),
        ("B</answer>", "", ""),
        ("<Answer>B</Answer>", "", ""),
        ("<answer><answer>B</answer></answer>", "B", ""),
        ("<answer>x <answer>y</answer> B</answer>", "", ""),
        ("<think>r <answer>C</answer>", "C", ""),
        ("<think>one</think><think>two</think><answer>A</answer>", "A", "one"),
        ("<think>use <answer>A</answer> tags</think><answer>B</answer>", "A", "use <answer>A</answer> tags"),
        ("<answer>Éa B</answer>", "B", ""),
        ("", "", ""),
    ],
)
def test_compat_parser_reads_first_capital_in_answer(text, answer, reasoning):
    parsed = parse(text, "reasoning", parser="compat")
    assert (parsed.answer, parsed.reasoning) == (answer, reasoning)
    assert parsed.rule == ("first capital in the answer tags" if answer else "none")


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("A", "A"),
        ("B.", "B"),
        ("(C)", "C"),
        ("Answer: C", "A"),
        ("answer: C", "C"),
        ("b", ""),
        ("", ""),
        ("\n\nD\n", "D"),
        ("<think>R</think><answer>b</answer>", "R"),
        ("é É z Z", "Z"),
    ],
)
def test_compat_letter_is_first_capital_anywhere(text, answer):
    rule = "first capital" if answer else "none"
    assert parse(text, "letter", parser="compat") == (answer, "", rule)


@pytest.mark.parametrize("kind", ["yes_no", "open", "free_text", "ordinal"])
def test_compat_parser_ignores_question_kind(kind):
    assert parse("Yes, 3", "letter", "compat", kind=kind, options={"A": "x"}).answer == "Y"
